"""The model as its users see it: durations, loads, groups that lie differently, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import Level, load_cluster
from echo_hooks.network.calibration import Calibration
from echo_hooks.network.describe import describe
from echo_hooks.network.model import COLLECTIVES, CommunicationModel
from echo_hooks.network.sharing import max_min_rates

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
H100 = load_cluster("h100-sxm:4x8")
WIDE = CommunicationModel(load_cluster("h100-sxm:24x8"), calibration=Calibration())
WIDE_CALIBRATED = CommunicationModel(load_cluster("h100-sxm:24x8"))
MODEL = CommunicationModel(H100, calibration=Calibration())  # NCCL's own numbers, so that hands can follow
CALIBRATED = CommunicationModel(H100)
GROUPS = {
    "pair": (0, 1),
    "node": tuple(range(8)),
    "two nodes": tuple(range(16)),
    "world": tuple(range(32)),
    "strided": (3, 11, 19, 27),
    "partial": (0, 1, 8, 9, 16, 17),
    "irregular": (0, 1, 2, 8, 17, 18),
}


def changed(cluster, *, nic=1.0, scale_up=1.0, **changes):
    accelerator = cluster.accelerator
    return dataclasses.replace(
        cluster,
        nic_bandwidth_bytes_per_s=cluster.nic_bandwidth_bytes_per_s * nic,
        accelerator=dataclasses.replace(
            accelerator, scaleup_bandwidth_bytes_per_s=accelerator.scaleup_bandwidth_bytes_per_s * scale_up
        ),
        **changes,
    )


def costs_of(model, name, ranks, sizes):
    root = ranks[0] if name in ("broadcast", "reduce", "gather", "scatter") else -1
    return [model.collective(name, ranks, size, "bfloat16", root=root).duration_us for size in sizes]


# ---- monotone ----


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(COLLECTIVES),
    group=st.sampled_from(sorted(GROUPS)),
    sizes=st.lists(st.integers(0, 8 * GI) | st.integers(0, 4 * MI), min_size=2, max_size=6),
)
def test_more_bytes_are_never_faster(name, group, sizes):
    for model in (MODEL, CALIBRATED):
        durations = costs_of(model, name, GROUPS[group], sorted(sizes))
        assert durations == sorted(durations)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(COLLECTIVES),
    group=st.sampled_from(sorted(GROUPS)),
    size=st.integers(1, 40).map(lambda k: 1 << k if k < 33 else 3 * k * MI),
    fast=st.floats(0.02, 2.5),
    slow=st.floats(0.05, 1.0),
    which=st.sampled_from(["nic", "scale_up"]),
)
def test_a_slower_link_is_never_faster(name, group, size, fast, slow, which):
    a = costs_of(CommunicationModel(changed(H100, **{which: fast})), name, GROUPS[group], [size])
    b = costs_of(CommunicationModel(changed(H100, **{which: fast * slow})), name, GROUPS[group], [size])
    assert b[0] >= a[0] * (1 - 1e-9)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_more_nodes_are_never_faster(name, per_node):
    model = CommunicationModel(load_cluster("h100-sxm:8x8"))
    sizes = [1 << k for k in range(3, 34, 3)]
    before = [0.0] * len(sizes)
    for nodes in (1, 2, 3, 4, 8):
        ranks = tuple(8 * n + i for n in range(nodes) for i in range(per_node))
        durations = costs_of(model, name, ranks, sizes)
        if len(ranks) > 1:
            assert all(now >= then * (1 - 1e-9) for now, then in zip(durations, before))
            before = durations


def on_nodes(nodes, per_node):
    return tuple(8 * n + i for n in range(nodes) for i in range(per_node))


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(COLLECTIVES),
    few=st.integers(1, 12),
    more=st.integers(1, 12),
    per_node=st.integers(1, 8),
    size=st.integers(0, 33).map(lambda k: 1 << k),
)
def test_any_number_of_nodes_more_is_never_faster(name, few, more, per_node, size):
    a, b = on_nodes(few, per_node), on_nodes(few + more, per_node)
    if len(a) > 1:
        for model in (WIDE, WIDE_CALIBRATED):
            assert costs_of(model, name, b, [size])[0] >= costs_of(model, name, a, [size])[0] * (1 - 1e-9)


SPREAD = [  # (ranks, ranks per node of the one, of the other)
    (ranks, fewer, more)
    for ranks in range(2, 25)
    for fewer, more in itertools.combinations([g for g in range(1, 9) if ranks % g == 0], 2)
]


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(COLLECTIVES), case=st.sampled_from(SPREAD), size=st.integers(0, 33).map(lambda k: 1 << k))
def test_the_same_ranks_on_more_nodes_are_never_faster(name, case, size):
    ranks, fewer, more = case
    for model in (WIDE, WIDE_CALIBRATED):
        spread, dense = (costs_of(model, name, on_nodes(ranks // g, g), [size])[0] for g in (fewer, more))
        assert spread >= dense * (1 - 1e-9)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_blocking_switch_is_never_faster(name):
    world = GROUPS["world"]
    durations = [
        costs_of(CommunicationModel(changed(H100, levels=(Level("leaf", 2, o),))), name, world, [64 * MI])[0]
        for o in (1.0, 2.0, 4.0, 64.0)
    ]
    assert durations == sorted(durations)


# ---- never above the wire ----


def volumes(function, algorithm, n, m, g):
    """Bytes that the fullest accelerator and the fullest node send, per byte of the buffer."""
    passes = 2 if function == "all_reduce" else 1
    if function in ("broadcast", "reduce"):
        return 1.0, 1.0
    if algorithm == "ring":  # every step a share, and one share stays
        return passes * (n - 1) / n, passes * (n - 1) / n
    if algorithm == "tree":  # up and down; between two nodes half the bytes go up on one and half on the other
        return 2.0, 1.0 if m == 2 else 2.0
    if algorithm in ("nvls", "nvls_tree"):  # the switch reduces
        return (1.0 if passes == 2 else (g - 1) / g), 1.0 if m == 2 else 2.0
    assert algorithm == "pat"
    return 0.0, (m - 1) / m


WIRES = {
    (*by, kind): CommunicationModel(
        H100,
        calibration=calibration,
        environment={k: v for k, v in zip(("NCCL_ALGO", "NCCL_PROTO"), by) if v},
    )
    for by in itertools.product(("", "Ring", "Tree", "NVLS", "NVLSTree", "PAT"), ("", "LL", "LL128", "Simple"))
    for kind, calibration in (("stock", Calibration()), ("shipped", None))
}


@settings(max_examples=300, deadline=None)
@given(
    model=st.sampled_from(sorted(WIRES)),
    name=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]),
    group=st.sampled_from(["pair", "node", "two nodes", "world", "strided"]),
    k=st.integers(10, 36),
)
def test_no_algorithm_sends_faster_than_its_links(model, name, group, k):
    """Tree and NVLS may beat the bus bandwidth's convention, but not what they put on a link. NCCL's own numbers stay
    below what it counts on of a link; a calibration may find more, up to the wire."""
    ranks = GROUPS[group]
    try:
        cost = WIRES[model].collective(
            name, ranks, 1 << k, "bfloat16", root=ranks[0] if name in ("broadcast", "reduce") else -1
        )
    except UsageError:  # forced where NCCL cannot run it
        return
    nodes = len({r // 8 for r in ranks})
    g = len(ranks) // nodes
    local, net = volumes(name, cost.algorithm, len(ranks), nodes, g)
    scale_up, nic = (370.8e3, 48e3) if model[-1] == "stock" else (450e3, 50e3)
    if g > 1:
        assert local * (1 << k) / cost.duration_us <= scale_up
    if nodes > 1:
        assert net * (1 << k) / cost.duration_us <= g * nic


@pytest.mark.parametrize("name", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_alone_an_operation_is_held_up_by_no_link(name, group):
    cost = MODEL.collective(name, GROUPS[group], 256 * MI, "bfloat16", root=GROUPS[group][0])
    transfer = cost.duration_us - cost.latency_us
    demand = [[(r, b / transfer) for r, b in cost.loads]]
    capacities = [r.capacity_bytes_per_us for r in MODEL.resources]
    assert max_min_rates(demand, capacities) == pytest.approx([1.0])


# ---- values by hand ----


def test_large_ring_all_gather_in_a_node():
    cost = MODEL.collective("all_gather", GROUPS["node"], GI, "bfloat16")
    # Ring, Simple: 8.4 us less the 1.5 us between kernels + 7 hops of 3.4 us + 7/8 GiB at 370.8 GB/s, and half a
    # step more for a rank's own share.
    assert (cost.algorithm, cost.protocol) == ("ring", "simple")
    assert cost.latency_us == pytest.approx(8.4 - 1.5 + 7 * 3.4)
    assert cost.duration_us == pytest.approx(8.4 - 1.5 + 7 * 3.4 + 7.5 / 8 * GI / 370.8e3, rel=1e-6)
    assert cost.channels == 24


def test_small_tree_all_reduce_between_nodes():
    cost = MODEL.collective("all_reduce", GROUPS["world"], 4 * KI, "float32")
    # LL: 6.8 us less the 1.5 us between kernels + 2 (7 hops of 0.6 us and 2 of 5 us), at 0.5 * 20.4 GB/s times NCCL's
    # correction 0.7.
    assert (cost.algorithm, cost.protocol) == ("tree", "ll")
    transfer = 4096 / (0.5 * 20.4e3 * 0.7) * 16 / 3
    assert cost.duration_us == pytest.approx(6.8 - 1.5 + 2 * (7 * 0.6 + 2 * 5) + transfer, rel=1e-3)


def loads_by_name(cost, model=MODEL):
    return {model.resources[r].name: b for r, b in cost.loads}


def test_loads_of_a_ring():
    model = CommunicationModel(
        H100, calibration=Calibration(), environment={"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    )
    loads = loads_by_name(model.collective("all_reduce", GROUPS["two nodes"], 16 * MI, "float32"), model)
    volume = 2 * 15 / 16 * 16 * MI
    expected = {f"scale-up {way} {r}": volume for r in range(16) for way in ("out of", "into")}
    expected |= {f"NIC {k} of node {n} {way}": volume / 8 for n in (0, 1) for k in range(8) for way in ("out", "in")}
    assert loads == pytest.approx(expected)


def test_a_strided_group_loads_its_rail_and_nothing_else():
    loads = loads_by_name(MODEL.collective("all_reduce", GROUPS["strided"], GI, "bfloat16"))
    assert {name for name in loads} == {f"NIC 3 of node {n} {way}" for n in range(4) for way in ("out", "in")}


def test_eight_strided_groups_do_not_collide_and_on_four_nics_they_do():
    # While a rank copies its own share (half a step beside the ring's 6) its NIC is free for others.
    for nics, expected in ((8, 1.0), (4, 0.5 * 6.5 / 6)):
        model = CommunicationModel(changed(H100, nics_per_node=nics), calibration=Calibration())
        costs = [model.collective("all_reduce", (k, 8 + k, 16 + k, 24 + k), GI, "bfloat16") for k in range(8)]
        demand = [[(r, b / (c.duration_us - c.latency_us)) for r, b in c.loads] for c in costs]
        rates = max_min_rates(demand, [r.capacity_bytes_per_us for r in model.resources])
        assert rates == pytest.approx([expected] * 8, rel=0.02)


def test_loads_of_an_even_all_to_all():
    cost = MODEL.collective("all_to_all", GROUPS["node"], 8 * MI, "bfloat16")
    assert set(loads_by_name(cost).values()) == {7 * MI}


def test_uneven_all_to_all_takes_its_fullest_link():
    ranks = GROUPS["node"]
    even = [[MI] * 8 for _ in range(8)]
    skewed = [[MI] * 7 + [4 * MI] for _ in range(8)]  # all send four times as much to the last
    assert MODEL.collective("all_to_all", ranks, 8 * MI, "bfloat16", splits=even).duration_us == pytest.approx(
        MODEL.collective("all_to_all", ranks, 8 * MI, "bfloat16").duration_us
    )
    assert MODEL.collective("all_to_all", ranks, 0, "bfloat16", splits=skewed).duration_us == pytest.approx(
        MODEL.collective("all_to_all", ranks, 32 * MI, "bfloat16").duration_us
    )


def test_an_uneven_all_to_all_loads_each_link_with_what_goes_over_it():
    """Rank 0 of node 0 sends 3 MiB to rank 1 beside it and 2 MiB to rank 8 on the same rail of node 1; nobody else."""
    splits = [[0] * 16 for _ in range(16)]
    splits[0][1], splits[0][8] = 3 * MI, 2 * MI
    cost = MODEL.collective("all_to_all", GROUPS["two nodes"], 0, "bfloat16", splits=splits)
    loads = {name: round(load / MI, 6) for name, load in loads_by_name(cost).items()}
    assert loads == {
        "scale-up out of 0": 3.0, "scale-up into 1": 3.0, "NIC 0 of node 0 out": 2.0, "NIC 0 of node 1 in": 2.0,
    }  # fmt: skip


def test_oversubscription_holds_an_all_to_all_up():
    free = CommunicationModel(changed(H100, levels=()), calibration=Calibration())
    tight = CommunicationModel(changed(H100, levels=(Level("leaf", 1, 4.0),)), calibration=Calibration())
    world = GROUPS["world"]
    a, b = (m.collective("all_to_all", world, GI, "bfloat16") for m in (free, tight))
    # Between nodes 24/32 of the bytes of 8 ranks go out over 8 NICs; the uplinks have a quarter of their speed.
    assert a.duration_us == pytest.approx(24 / 32 * GI / 48e3, rel=0.02)
    assert b.duration_us == pytest.approx(4 * 24 / 32 * GI / 48e3, rel=0.02)


def test_a_send_depends_on_the_communicator_that_carries_it():
    pair = MODEL.point_to_point(0, 1, 32 * MI, group_size=2)
    group = MODEL.point_to_point(0, 1, 32 * MI, group_size=8)
    assert (pair.channels, group.channels) == (16, 4)
    assert pair.duration_us < group.duration_us
    assert loads_by_name(pair) == {"scale-up out of 0": 32 * MI, "scale-up into 1": 32 * MI}


def test_a_send_in_a_node_takes_few_channels_of_a_communicator_that_spans_nodes():
    """NCCL gives every pair of a communicator the channels of its worst pair, which is one between nodes."""
    inside = MODEL.point_to_point(0, 1, 32 * MI, group_size=8)
    spanning = MODEL.point_to_point(0, 1, 32 * MI, group_size=16)
    assert spanning.channels < inside.channels
    assert spanning.duration_us > inside.duration_us
    assert {MODEL.resources[r].name for r, _ in spanning.loads} == {"scale-up out of 0", "scale-up into 1"}


def test_a_send_between_rails_passes_through_the_node():
    loads = loads_by_name(MODEL.point_to_point(0, 9, MI, group_size=2))
    assert set(loads) == {"scale-up out of 0", "scale-up into 1", "NIC 1 of node 0 out", "NIC 1 of node 1 in"}


def test_sends_between_nodes_take_at_most_the_nic():
    cost = MODEL.point_to_point(0, 8, GI, group_size=2)
    assert GI / cost.duration_us <= 48e3


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
@pytest.mark.parametrize("places", [(0,), (3,), (0, 1), (0, 4), (5, 6, 7), tuple(range(8))])
def test_the_fullest_link_of_even_traffic_is_that_of_all_its_pairs(name, places):
    for nics, rails, levels in itertools.product((8, 2), (False, True), ((), (Level("leaf", 2, 2.0),))):
        model = CommunicationModel(
            changed(load_cluster("h100-sxm:6x8"), nics_per_node=nics, rails=rails, levels=levels)
        )
        for nodes in (1, 2, 3, 5):
            placement = model.placement(tuple(8 * n + i for n in range(nodes) for i in places))
            root = placement.ranks[-1] if name != "all_to_all" else -1
            found = model._links.fullest_even_us(name, placement.layout(model.cluster), root)
            assert found == pytest.approx(model._fullest_us(model._even(name, placement, root)), rel=1e-9)


def test_as_many_ranks_on_more_nodes_may_have_more_nics_for_an_all_to_all():
    """What is never faster with more nodes is so at as many NICs per rank: four ranks on one NIC take longer than one
    each on four."""
    model = CommunicationModel(changed(H100, nics_per_node=2), calibration=Calibration())
    spread = model.collective("all_to_all", tuple(range(0, 32, 4)), GI, "bfloat16").duration_us
    dense = model.collective("all_to_all", (0, 1, 2, 3, 8, 9, 10, 11), GI, "bfloat16").duration_us
    assert dense == pytest.approx(4 * 4 / 8 * GI / 48e3, rel=0.05)
    assert spread < dense


def test_a_group_of_one_communicates_nothing():
    launch = H100.accelerator.launch_overhead_us
    for name in COLLECTIVES:
        cost = MODEL.collective(name, (5,), MI, "bfloat16")
        assert cost.loads == ()
        assert launch <= cost.duration_us < launch + 5


def test_coalesced_collectives_pay_for_every_round_of_channels():
    one = MODEL.collective("all_gather", GROUPS["node"], GI, "bfloat16")
    many = MODEL.collective("all_gather", GROUPS["node"], GI, "bfloat16", count=48)
    assert many.duration_us - one.duration_us == pytest.approx(one.latency_us, rel=1e-6)


def test_groups_that_lie_alike_cost_the_same():
    a, b = (MODEL.collective("all_reduce", tuple(range(k, k + 8)), MI, "bfloat16") for k in (0, 8))
    assert dataclasses.replace(a, loads=()) == dataclasses.replace(b, loads=())


def test_slow_nics_of_a_preset_show():
    slow = CommunicationModel(changed(H100, nic=0.25), calibration=Calibration())
    a, b = (m.collective("all_reduce", GROUPS["world"], GI, "bfloat16").duration_us for m in (MODEL, slow))
    assert 3 < b / a < 4.5


def test_large_messages_get_less_of_a_nic_on_roce():
    roce = CommunicationModel(changed(H100, transport="roce"), calibration=Calibration())
    a, b = (m.point_to_point(0, 8, GI, group_size=2).duration_us for m in (MODEL, roce))
    # LL's base 6.6 us less 1.5 between kernels, a hop of 14; two channels of 14 GB/s hold both up.
    assert (a, b) == pytest.approx((19.1 + GI / 28e3, 19.1 + GI / 28e3))
    a, b = (m.collective("all_gather", GROUPS["world"], 16 * GI, "bfloat16").duration_us for m in (MODEL, roce))
    assert b / a == pytest.approx(370.8 / (8 * 48 * 0.87), rel=0.01)


def test_environment_of_the_job():
    forced = CommunicationModel(
        H100, calibration=Calibration(), environment={"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL", "HOME": "/"}
    )
    cost = forced.collective("all_reduce", GROUPS["node"], GI, "bfloat16")
    assert (cost.algorithm, cost.protocol) == ("tree", "ll")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.collective("allreduce", (0, 1), 8, "float32"), "all_reduce"),
        (lambda m: m.collective("all_reduce", (), 8, "float32"), "without ranks"),
        (lambda m: m.collective("all_reduce", (0, 0), 8, "float32"), "twice"),
        (lambda m: m.collective("all_reduce", (0, 99), 8, "float32"), "rank 99"),
        (lambda m: m.collective("all_reduce", (0, 1), -8, "float32"), "bytes"),
        (lambda m: m.collective("broadcast", (0, 1), 8, "float32", root=2), "root 2"),
        (lambda m: m.collective("all_reduce", (0, 1), 8, "float32", count=0), "count"),
        (lambda m: m.collective("all_to_all", (0, 1), 8, "float32", splits=[[1, 2]]), "2 rows of 2"),
        (lambda m: m.collective("all_to_all", (0, 1), 8, "float32", splits=[[1, 2], [3]]), "2 rows of 2"),
        (lambda m: m.point_to_point(0, 99, 8, group_size=2), "rank 99"),
        (lambda m: m.point_to_point(1, 1, 8, group_size=2), "twice"),
    ],
)
def test_errors(call, said):
    with pytest.raises(UsageError, match=said):
        call(MODEL)


def test_describe():
    said = describe(MODEL, "all_gather", GROUPS["node"], GI)
    assert said["bus_bandwidth_gb_per_s"] == pytest.approx(GI * 7 / 8 / said["duration_us"] / 1e3)
    assert said["latency_us"] + said["transfer_us"] == pytest.approx(said["duration_us"])
    assert said["resources_in_all"] == 16
    assert said["resources"][0]["busy_share"] == pytest.approx(7 / 7.5, rel=1e-3)  # half a step copies only
    json.dumps(said)
    assert describe(MODEL, "send", (0, 8), MI)["placement"]["nodes"] == 2
    with pytest.raises(UsageError, match="two ranks"):
        describe(MODEL, "send", (0, 1, 2), MI)
