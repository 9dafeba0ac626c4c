"""NCCL's own choices and expectations, against tables worked out by hand from its source and against its logs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_environment import Environment, read_environment
from echo_hooks.network.nccl_graph import Communicator, nvls_graph, ring_graph
from echo_hooks.network.nccl_selection import candidates, channels, choose
from echo_hooks.network.nccl_tables import DEFAULT_VERSION, parse_version, tables

HOPPER = dict(architecture="hopper", nvlink=370.8, pci=48.0, multicast=True, nic=48.0, cpu="intel")
AMPERE = dict(architecture="ampere", nvlink=240.0, pci=24.0, multicast=False, nic=24.0, cpu="amd")
BLACKWELL = dict(architecture="blackwell", nvlink=721.8, pci=48.0, multicast=True, nic=48.0, cpu="intel")
KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KI, 64 * KI, MI, 16 * MI, 256 * MI, GI)


def hopper(per_node, nodes, nics=None, **changes):
    values = HOPPER | changes
    return Communicator(ranks=per_node * nodes, nodes=nodes, per_node=per_node, nics=nics or per_node, **values)


# Choices and NCCL's expected times with the constants of 2.30, worked out by hand from its source.
ORACLE = [
    ("all_reduce", 8, 1, "ring/ll 15, ring/ll 16, ring/ll 28, nvls 87, nvls 1012, nvls 3973"),
    ("all_gather", 8, 1, "ring/ll 11, ring/ll 11, ring/ll 17, ring/ll128 72, ring/simple 685, ring/simple 2642"),
    ("all_reduce", 8, 2, "tree/ll 26, tree/ll 31, tree/ll128 60, nvls_tree 135, nvls_tree 1157, nvls_tree 4428"),
    ("all_reduce", 8, 8, "tree/ll 46, tree/ll 56, tree/ll128 98, nvls_tree 241, nvls_tree 1602, nvls_tree 5958"),
    ("all_gather", 8, 8, "ring/ll 82, ring/ll 85, ring/ll 132, ring/ll128 205, ring/simple 1031, ring/simple 3233"),
    ("all_reduce", 8, 128, "tree/ll 86, tree/ll 96, tree/ll128 166, tree/ll128 311, nvls_tree 1791, nvls_tree 6212"),
    ("all_gather", 8, 128, "ring/ll 1246, ring/ll 1249, ring/ll 1297, ring/ll 2067, ring/ll128 3138, ring/ll128 5878"),
    (
        "all_reduce",
        1,
        64,
        "tree/ll 68, tree/ll 86, tree/ll128 200, tree/ll128 1017, ring/ll128 13052, ring/simple 46522",
    ),
    ("all_gather", 1, 64, "pat 211, pat 213, pat 240, pat 677, ring/simple 6395, ring/simple 22910"),
]


@pytest.mark.parametrize(("function", "per_node", "nodes", "expected"), ORACLE)
def test_choices_of_2_30(function, per_node, nodes, expected):
    comm = hopper(per_node, nodes)
    rows = candidates(function, comm, tables("2.30.7"), Environment())
    best, times = choose(rows, function, comm, "bfloat16", np.array(SIZES))
    names, figures = zip(*(cell.split() for cell in expected.split(", ")))
    said = [r.algorithm if r.algorithm in ("nvls", "nvls_tree", "pat") else f"{r.algorithm}/{r.protocol}" for r in rows]
    assert [said[b] for b in best] == list(names)
    np.testing.assert_allclose(times, [float(f) for f in figures], atol=0.51, rtol=1e-3)


@pytest.mark.parametrize(
    ("comm", "channels_x_speed", "launched"),
    [
        (Communicator(ranks=8, nodes=1, per_node=8, nics=8, **AMPERE), (12, 20), 24),
        (hopper(8, 1), (12, 30), 24),
        (hopper(2, 1), (12, 30), 24),  # 24 logged by NCCL 2.28.9 on two H200
        (Communicator(ranks=8, nodes=1, per_node=8, nics=8, **BLACKWELL), (16, 45), 32),
        (Communicator(ranks=16, nodes=2, per_node=8, nics=8, **AMPERE), (8, 24), 16),
        (hopper(8, 16), (8, 45), 16),
        (hopper(8, 5, nics=4), (8, 24), 16),
        (hopper(1, 64), (2, 24), 4),
    ],
)
def test_rings(comm, channels_x_speed, launched):
    graph = ring_graph(comm, tables("2.30.7"))
    assert (graph.channels, graph.intra) == channels_x_speed
    assert graph.launched == launched


@pytest.mark.parametrize(
    ("comm", "intra", "inter"),
    [
        (hopper(8, 1), 40, 60),
        (hopper(8, 4), 40, 48),
        (Communicator(ranks=8, nodes=1, per_node=8, nics=8, **BLACKWELL), 80, 90),
    ],
)
def test_nvls_channels(comm, intra, inter):
    graph = nvls_graph(comm, 16)
    assert (graph.channels, graph.intra, graph.inter) == (8, intra, inter)


def bus_bandwidth(comm, algorithm, protocol):
    rows = candidates("all_reduce", comm, tables("2.30.7"), Environment())
    row = next(r for r in rows if (r.algorithm, r.protocol) == (algorithm, protocol))
    return row.gb_per_s * 2 * (comm.ranks - 1) / comm.ranks


@pytest.mark.parametrize(
    ("comm", "algorithm", "expected"),
    [
        (hopper(8, 1), "ring", 360),
        (hopper(8, 1), "nvls", 476),
        (hopper(8, 2), "nvls_tree", 461.6),
        (hopper(8, 4), "nvls_tree", 364),
        (hopper(8, 5, nics=4), "ring", 192),
        (Communicator(ranks=16, nodes=2, per_node=8, nics=8, **AMPERE), "ring", 192),
    ],
)
def test_bus_bandwidth(comm, algorithm, expected):
    assert bus_bandwidth(comm, algorithm, "simple") == pytest.approx(expected, rel=1e-6)


def test_nvls_before_2_28_has_no_efficiency_table():
    def expected(version, nodes):
        rows = candidates("all_reduce", hopper(8, nodes), tables(version), Environment())
        return next(r.gb_per_s for r in rows if r.algorithm == ("nvls" if nodes == 1 else "nvls_tree"))

    assert expected("2.27.7", 1) == pytest.approx(8 * 40 * 5 / 6)
    assert expected("2.23.4", 2) == pytest.approx(8 * 40 * 5 / 6)
    assert expected("2.23.4", 4) == pytest.approx(8 * 48 / 2 * 5 / 6)
    assert expected("2.18.6", 4) == pytest.approx(8 * 48 / 2 * 0.7 * 4 / 6)


def test_all_channels_from_786_kib_on_eight_h100():
    comm = hopper(8, 1)
    rows = candidates("all_reduce", comm, tables("2.30.7"), Environment())
    by_name = {(r.algorithm, r.protocol): r for r in rows}
    for name, full in ((("ring", "simple"), 786432), (("ring", "ll"), 786432), (("ring", "ll128"), 122880)):
        counts = channels(by_name[name], comm, np.array([1, full // 2, full - 1, full, GI]), Environment())
        assert counts.tolist() == [1, 12, 23, 24, 24]


def test_nothing_but_rings_across_two_gpus_or_without_multicast():
    for comm in (hopper(2, 1), hopper(8, 1, multicast=False)):
        rows = candidates("all_reduce", comm, tables("2.30.7"), Environment())
        assert {r.algorithm for r in rows} == {"ring", "tree"}


def test_float8_avoids_long_rings():
    comm = hopper(8, 2)
    rows = candidates("reduce_scatter", comm, tables("2.30.7"), Environment())
    _, times = choose(rows, "reduce_scatter", comm, "float8_e4m3fn", np.array([MI]))
    _, plain = choose(rows, "reduce_scatter", comm, "bfloat16", np.array([MI]))
    assert times[0] == pytest.approx(1024 * plain[0])


def only(variables, function="all_reduce", comm=None):
    rows = candidates(function, comm or hopper(8, 1), tables("2.30.7"), read_environment(variables))
    return {(r.algorithm, r.protocol) for r in rows}


def test_environment_restricts_the_table():
    assert only({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}) == {("ring", "simple")}
    assert only({"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "^LL128"}) == {("tree", "ll"), ("tree", "simple")}
    assert only({"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "LL"}, "all_gather") == {("ring", "ll")}
    assert {a for a, _ in only({"NCCL_NVLS_ENABLE": "0"})} == {"ring", "tree"}
    assert ("pat", "simple") not in only({"NCCL_PAT_ENABLE": "0"}, "all_gather", hopper(1, 8))


def test_environment_clamps_channels():
    comm = hopper(8, 1)
    env = read_environment({"NCCL_MAX_NCHANNELS": "8"})
    rows = candidates("all_gather", comm, tables("2.30.7"), env)
    assert channels(rows[2], comm, np.array([GI]), env)[0] == 8


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_ALGO", "rings", "'rings' should be one of tree, ring"),
        ("NCCL_PROTO", "ll256", "ll, ll128, simple"),
        ("NCCL_ALGO", "allred:ring", "allreduce"),
        ("NCCL_MAX_NCHANNELS", "many", "whole number"),
        ("NCCL_NVLS_ENABLE", "7", "from 0 to 2"),
        ("NCCL_P2P_LEVEL", "XXX", "NVL"),
    ],
)
def test_environment_errors_name_the_variable(name, value, said):
    with pytest.raises(UsageError, match=name) as error:
        read_environment({name: value})
    assert said in str(error.value)


def test_forbidding_everything_is_refused_as_nccl_does():
    with pytest.raises(UsageError, match="leave nothing"):
        only({"NCCL_ALGO": "PAT"})


def test_versions():
    assert parse_version(DEFAULT_VERSION) == (2, 28, 9)
    assert tables("2.22.3").hop_us["net"]["tree"][2] == 28.0
    assert tables("2.23.4").hop_us["net"]["tree"][2] == 14.0
    assert tables("2.18.5").hop_us["pci"]["tree"][2] == 6.0
    assert tables("2.18.5").hop_us["nvlink"]["nvls"][2] == 0.0
    assert tables("2.27.7").hop_us["net"]["nvls_tree"][2] == 14.0
    assert tables("2.24.3").max_channels == 32
    assert tables("2.26.2").ring_ll128_gb_per_s["blackwell"] == (73.4, 73.4, 73.4)
    assert dataclasses.asdict(tables("2.30.7")) != dataclasses.asdict(tables("2.28.9"))
    for bad in ("2", "2.17.1", "3.0.0", "two", "2.99"):
        with pytest.raises(UsageError):
            tables(bad)
