"""Folded and unfolded worlds have the same times, to the last bit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hand_built import FakeNetwork, Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hooks.compose.costs import Costs
from echo_hooks.compose.folding import fold
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.world import build_world
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import Role


def uneven_network(per_node: int) -> FakeNetwork:
    """Costs that depend on the placement and are no round numbers."""

    def us(name, ranks, bytes):
        nodes = len({r // per_node for r in ranks})
        return 0.1 + bytes / 7 + nodes / 3 + (nodes > 1) * (ranks[0] % per_node) / 11 + len(name) / 13

    return FakeNetwork(us)


def communicate(rank, name, group, bytes, asynchronous, us):
    call = "all_to_all" if name == "ep" else "all_reduce"
    if asynchronous:
        event = rank.asynchronous(bytes, group, f"comm:{name}", name=call)
        rank.run(next(us), host=0.2)
        rank.wait(event)
    else:
        rank.collective(bytes, group, host=0.1, name=call)
    rank.run(next(us))


def random_plan(seed: int) -> tuple[Plan, int]:
    """DP x PP x TP x CP x EP with a random order of axes and random programs per stage, and irregular groups on top.

    Context parallel ranks pass blocks around in a ring, expert parallel ones exchange tokens all to all.
    """
    rng = random.Random(seed)
    pp, tp, cp, ep = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    dp = rng.choice([1, 2, 3]) if pp * tp * cp * ep <= 8 else 1
    size = dp * pp * tp * cp * ep
    axes = ["dp", "pp", "tp", "cp", "ep"]
    rng.shuffle(axes)
    extent = {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "ep": ep}
    at = []
    for r in range(size):
        place, rest = {}, r
        for axis in axes:
            place[axis], rest = rest % extent[axis], rest // extent[axis]
        at.append(place)
    plan = Plan(size)

    def groups_along(axis: str) -> dict[int, int]:
        of_rank: dict[int, int] = {}
        for r in range(size):
            if r not in of_rank:
                same = [s for s in range(size) if all(at[s][a] == at[r][a] for a in axes if a != axis)]
                index = plan.group(*same, name=axis, site=axis)
                of_rank |= dict.fromkeys(same, index)
        return of_rank

    along = {axis: groups_along(axis) for axis in axes}
    odd = None
    if size > 2 and rng.random() < 0.5:  # pairs of neighbours, the last rank perhaps alone
        odd = {}
        for r in range(0, size, 2):
            index = plan.group(*range(r, min(r + 2, size)), name="odd", site="odd")
            odd |= dict.fromkeys(range(r, min(r + 2, size)), index)
    kinds = ["tp", "dp", "cp", "ep", "world", "odd"]
    steps = [(rng.choice(kinds), rng.randint(0, 50), rng.random() < 0.5) for _ in range(rng.randint(1, 4))]
    micro = rng.randint(1, 3)
    durations = [[rng.random() * 9 for _ in range(12)] for _ in range(pp)]

    for stage, block in itertools.product(range(pp), range(cp)):
        ranks = [r for r in range(size) if at[r]["pp"] == stage and at[r]["cp"] == block]
        alone = [r for r in ranks if odd and len(plan.groups[odd[r]].ranks) == 1]
        for members in ([r for r in ranks if r not in alone], alone):
            if not members:
                continue
            first = members[0]
            rank = plan.rank(first, tuple(members[1:]))
            us = iter(durations[stage] * 9)
            pipe = plan.groups[along["pp"][first]].ranks
            ring = plan.groups[along["cp"][first]].ranks
            rank.host(0.3)
            for _ in range(micro):
                if stage > 0:
                    rank.recv(pipe[stage - 1], 11, group=along["pp"][first])
                rank.run(next(us), host=0.7)
                if cp > 1:
                    rank.open_batch()
                    rank.send(ring[(block + 1) % cp], 13, group=along["cp"][first])
                    rank.recv(ring[block - 1], 13, group=along["cp"][first])
                    rank.close_batch()
                for name, bytes, asynchronous in steps:
                    if name in along:  # within a stage
                        communicate(rank, name, along[name][first], bytes, asynchronous, us)
                if stage < pp - 1:
                    rank.send(pipe[stage + 1], 11, group=along["pp"][first])
            for name, bytes, asynchronous in steps:
                if name == "world":
                    communicate(rank, name, 0, bytes, asynchronous, us)
                elif name == "odd" and odd is not None:
                    communicate(rank, name, odd[first], bytes, asynchronous, us)
            if seed % 2:
                rank.sync()
    return plan, rng.choice([1, 2, 3, 5, 8])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_folded_times_equal_unfolded_times(seed):
    plan, per_node = random_plan(seed)
    folded = plan.compose(uneven_network(per_node), per_node, repeat=3)
    every = plan.compose(uneven_network(per_node), per_node, repeat=3, folded=False)
    assert not folded.problems and not every.problems
    assert folded.step_time_us == every.step_time_us
    assert len(every.timelines) == plan.world_size
    of_rank = {t.representative: t for t in every.timelines}
    assert sorted(r for t in folded.timelines for r in t.ranks) == list(range(plan.world_size))
    for t in folded.timelines:
        for r in t.ranks:
            for name in ("issue_us", "start_us", "ready_us", "end_us"):
                assert np.array_equal(getattr(t, name), getattr(of_rank[r], name), equal_nan=True)
            assert t.breakdown == of_rank[r].breakdown and t.offset_us == of_rank[r].offset_us
    assert of_rank[every.timelines[every.critical].representative].breakdown == (
        folded.timelines[folded.critical].breakdown
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_parts_sum_to_the_step(seed):
    plan, per_node = random_plan(seed)
    for t in plan.compose(uneven_network(per_node), per_node).timelines:
        b = t.breakdown
        parts = b.compute_us + sum(b.exposed_communication_us.values()) + b.bubble_us + b.waiting_us + b.host_us
        assert parts == pytest.approx(b.step_us, rel=1e-9)
        for name, exposed in b.exposed_communication_us.items():
            assert exposed <= b.communication_us[name] * (1 + 1e-9)


def grid(tp: int, dp: int, call=lambda rank, tp, dp: (rank.collective(8, tp), rank.collective(8, dp))) -> Plan:
    plan = Plan(tp * dp)
    rows = [plan.group(*range(tp * i, tp * i + tp), name="tp", site="tp") for i in range(dp)]
    columns = [plan.group(*range(i, tp * dp, tp), name="dp", site="dp") for i in range(tp)]
    call(plan.rank(0, tuple(range(1, tp * dp))), rows[0], columns[0])
    return plan


def test_even_world_folds_to_one_class():
    assert len(grid(8, 16).compose().timelines) == 1


def test_groups_that_straddle_nodes_stand_apart():
    """TP of 4 on nodes of 6: of every three rows the middle one spans two nodes."""
    network = FakeNetwork(lambda name, ranks, bytes: 1.0 + len({r // 6 for r in ranks}))
    plan = grid(4, 3, lambda rank, tp, dp: rank.collective(8, tp))
    timelines = plan.compose(network, 6).timelines
    assert sorted(t.ranks for t in timelines) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7)]
    # With the DP groups on top the rows still differ, though all columns are alike.
    assert len(grid(4, 3).compose(network, 6).timelines) == 2


def test_classes_follow_what_their_partners_are():
    """Equal programs and costs, but the peers of ranks 2 and 3 differ: 0 computes more than 1."""
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="pp", site="pp"), plan.group(1, 3, name="pp", site="pp")]
    for r in (0, 1):
        rank = plan.rank(r)
        rank.run(10 * (r + 1))
        rank.send(r + 2, 4, group=pairs[r])
    plan.rank(2, (3,)).recv(0, 4, group=pairs[0])
    assert sorted(t.ranks for t in plan.compose().timelines) == [(0,), (1,), (2,), (3,)]


def test_speed_splits_classes():
    plan = grid(2, 4)
    ((rank, (made, ranks)),) = plan.members.items()
    world = build_world(8, plan.groups, [role_program(Role("r", rank, ranks, ranks), made.trace(rank), plan.groups)])
    speed = np.ones(8)
    speed[2] = 1.1
    ranks = [tuple(r.tolist()) for r in fold(world, Costs(FakeNetwork(), 8), speed).ranks()]
    # The slow rank; its TP partner; its DP column; the rest.
    assert ranks == [(0, 4, 6), (1, 5, 7), (2,), (3,)]


def test_network_is_asked_once_per_call_and_placement():
    network = FakeNetwork()
    grid(8, 16).compose(network)
    # TP groups all lie alike; DP groups lie alike up to the place in the node, which counts as another placement.
    assert sum(1 for call in network.asked if len(call[1]) == 8) == 1
    assert sum(1 for call in network.asked if len(call[1]) == 16) == 8


def covered(intervals) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def wrapped(begin, end, until, period):
    """Intervals cut at the period's begin, what lies before it moved on by a period."""
    pieces = []
    for b, e in zip(begin.tolist(), end.tolist()):
        while e > b:
            cut = max(b, until - period)
            if e > cut:
                pieces.append((cut, e))
            b, e = b + period, min(e, cut) + period
    return pieces


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_exposed_and_hidden_are_all_communication(seed):
    """Against unions of intervals: communication is hidden where a kernel runs, exposed where none does."""
    plan, per_node = random_plan(seed)
    for t in plan.compose(uneven_network(per_node), per_node, repeat=4).timelines:
        parts, kind = t.breakdown, t.program.kind
        until, period = np.nanmax([np.nanmax(t.end_us), np.nanmax(t.issue_us)]), parts.step_us
        local = (kind == Kind.COMPUTE) | (kind == Kind.COPY)
        compute = wrapped(t.start_us[local], t.end_us[local], until, period)
        moving: dict[str, list] = {}
        for i in np.flatnonzero(np.isin(kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) & ~np.isnan(t.end_us)):
            name = plan.groups[int(t.program.group[i])].name
            moving.setdefault(name, []).extend(wrapped(t.ready_us[i : i + 1], t.end_us[i : i + 1], until, period))
        everything = [interval for intervals in moving.values() for interval in intervals]
        busy = covered(compute)
        assert parts.compute_us == pytest.approx(busy, abs=1e-6)
        assert sum(parts.exposed_communication_us.values()) == pytest.approx(
            covered(compute + everything) - busy, abs=1e-6
        )
        for name, intervals in moving.items():
            total, beside = covered(intervals), covered(compute + intervals) - busy
            hidden = total - beside
            assert parts.communication_us[name] == pytest.approx(total, abs=1e-6)
            # Less is exposed of it than lies beside the kernels only where another group's began earlier.
            assert parts.exposed_communication_us[name] <= beside + 1e-6
            if len(moving) == 1:
                assert parts.exposed_communication_us[name] + hidden == pytest.approx(total, abs=1e-6)
