"""HCCL on servers of 8 Ascend 910B: selection and durations worked out by hand."""

from __future__ import annotations

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.hccl import A3_LAUNCH_US, HOP_US, LAUNCH_US, NET_HOP_US, SUPERPOD_HOP_US
from echo_hooks.network.model import COLLECTIVES, CommunicationModel

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
LINK = 18.3e3  # bytes per us of one HCCS link, as HCCL counts on
A2 = load_cluster("ascend-910b:8x8")
MODEL = CommunicationModel(A2)
NODE, TWO, EIGHT = tuple(range(8)), tuple(range(16)), tuple(range(64))


def test_mesh_all_reduce_in_a_server():
    cost = MODEL.collective("all_reduce", NODE, GI, "float16")
    # Two passes of an eighth over each of the seven links; six loops through the buffer of 200 MiB.
    assert cost.algorithm == "mesh"
    assert cost.duration_us == pytest.approx(LAUNCH_US + 6 * 2 * HOP_US + 2 * GI / 8 / LINK, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "ranks", "size", "algorithm"),
    [
        ("all_gather", TWO, 16 * KI, "mesh+ring"),  # two servers: all cost the same, ring comes first
        ("all_gather", TWO, 32 * KI, "pipeline"),
        ("all_reduce", TWO, 15 * MI, "mesh+ring"),
        ("all_reduce", TWO, 16 * MI, "pipeline"),  # 1 MiB per rank
        ("all_reduce", EIGHT, MI, "mesh+nhr"),
        ("all_reduce", (0, 8, 16, 24), GI, "nhr"),  # one per server: no mesh to pipeline with
    ],
)
def test_selection(name, ranks, size, algorithm):
    assert MODEL.collective(name, ranks, size, "float16").algorithm == algorithm


def test_small_all_reduce_between_servers_counts_steps():
    cost = MODEL.collective("all_reduce", EIGHT, 8, "float16")
    assert cost.duration_us == pytest.approx(LAUNCH_US + 2 * HOP_US + 2 * 3 * NET_HOP_US, abs=0.1)


def test_environment():
    forced = CommunicationModel(A2, environment={"HCCL_ALGO": "level0:NA;level1:ring"})
    assert forced.collective("all_reduce", EIGHT, MI, "float16").algorithm == "mesh+ring"
    for variables in ({"HCCL_ALGO": "level1:star"}, {"HCCL_BUFFSIZE": "big"}):
        with pytest.raises(UsageError, match=next(iter(variables))):
            CommunicationModel(A2, environment=variables)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", [NODE, EIGHT, (0, 8)])
def test_more_bytes_are_never_faster(name, ranks):
    root = ranks[0] if name in ("broadcast", "reduce", "gather", "scatter") else -1
    durations = [MODEL.collective(name, ranks, 3**k, "float16", root=root).duration_us for k in range(21)]
    assert durations == sorted(durations)


def test_it_is_said_to_be_uncalibrated():
    assert any("HCCL" in note for note in MODEL.notes)


# ---- A3: 910C, a die is a rank ----

A3 = load_cluster("ascend-910c:48x16")  # a superpod
A3_MODEL = CommunicationModel(A3)


@pytest.mark.parametrize(
    ("ranks", "size", "algorithm"),
    [
        (tuple(range(16)), 8 * MI, "mesh"),  # 512 KiB per rank
        (tuple(range(16)), 9 * MI, "double ring"),
        (tuple(range(64)), 16 * MI, "switch+nhr"),  # 1 MiB per die of a server
        ((0, 16), GI, "ring"),  # both cost the same, ring comes first
        ((0, 16, 32, 48), GI, "nhr"),
    ],
)
def test_selection_on_a3(ranks, size, algorithm):
    assert A3_MODEL.collective("all_reduce", ranks, size, "float16").algorithm == algorithm


def test_a_ring_in_an_a3_server_by_hand():
    cost = A3_MODEL.collective("all_reduce", tuple(range(16)), GI, "float16")
    # Two passes of 15 steps, six loops through the buffer of 200 MiB, at 18.3 of 28 GB/s of each of the die's lanes.
    rate = 196e3 * 18.3 / 28
    assert cost.duration_us == pytest.approx(A3_LAUNCH_US + 6 * 30 * HOP_US + 2 * 15 / 16 * GI / rate, rel=2e-3)


def test_between_servers_of_a_superpod_sends_take_the_unified_bus():
    cost = A3_MODEL.point_to_point(0, 16, GI, group_size=2)
    # HCCL counts on 0.8 of what leaves a server.
    assert cost.duration_us == pytest.approx(A3_LAUNCH_US + SUPERPOD_HOP_US + GI / (0.8 * 196e3), rel=1e-3)
    assert not any("superpod" in note for note in A3_MODEL.notes)
    assert any("taken as one superpod" in note for note in CommunicationModel(load_cluster("ascend-910c:49x16")).notes)
