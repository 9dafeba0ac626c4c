"""Rates that change: hand-computed overlaps and shared links, and agreement with the engine of constant durations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hand_built import FakeCost, FakeNetwork, Plan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_folding import random_plan, uneven_network

from echo_hooks.compose.costs import Costs
from echo_hooks.compose.engine import run
from echo_hooks.compose.fluid import run_fluid
from echo_hooks.compose.folding import fold
from echo_hooks.compose.interference import build_interference
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.tables import build_tables
from echo_hooks.compose.world import build_world
from echo_hooks.graph.roles import Role
from echo_hooks.report.report import _slowdown_ms


@dataclass
class Factors:
    """One answer for every pair."""

    moving: float = 1.0
    waiting: float = 1.0
    call: float = 1.0

    def slowdowns(self, pairs):
        return np.tile((self.moving, self.waiting, self.call), (len(pairs), 1))


@dataclass(frozen=True)
class Resource:
    capacity_bytes_per_us: float


@dataclass
class LinkedNetwork(FakeNetwork):
    """One byte per us; a call loads the links of its ranks' nodes with its bytes, ``latency`` us of it moving none."""

    per_node: int = 2
    nodes: int = 4
    capacity: float = 1.0
    latency: float = 0.0
    resources: list[Resource] = field(init=False)

    def __post_init__(self):
        self.resources = [Resource(self.capacity)] * self.nodes

    def _cost(self, name, ranks, bytes):
        nodes = sorted({r // self.per_node for r in ranks})
        loads = tuple((node, float(bytes)) for node in nodes) if len(nodes) > 1 else ()
        return FakeCost(self.us(name, ranks, bytes) + self.latency, self.latency, loads)

    def collective(self, name, ranks, bytes, dtype, *, root=-1, count=1, splits=None):
        return self._cost(name, ranks, bytes)

    def point_to_point(self, source, destination, bytes, *, group_size):
        return self._cost("p2p", (source, destination), bytes)


def beside(kernel_us: float, call_us: int) -> Plan:
    """A kernel on the default stream and a call on another, both from 0."""
    plan = Plan(2)
    g = plan.group(0, 1, name="dp")
    rank = plan.rank(0, (1,))
    rank.collective(call_us, g, stream="comm:dp")
    rank.run(kernel_us)
    rank.sync()
    return plan


@dataclass
class ByTime:
    """Kernels take twice as long beside a call, those of 100 us and more three times."""

    asked: list = field(default_factory=list)

    def slowdowns(self, pairs):
        self.asked += [kernel.run_us for kernel, _ in pairs]
        return np.array([(3.0 if kernel.run_us >= 100 else 2.0, 1.0, 1.0) for kernel, _ in pairs])


def test_kernels_of_one_name_and_different_times_are_slowed_each_in_its_own_way():
    """As where a script really ran: its kernels' names stand for many sizes."""
    plan, model = Plan(2), ByTime()
    g = plan.group(0, 1, name="dp")
    rank = plan.rank(0, (1,))
    rank.collective(1000, g, stream="comm:dp")
    for us in (10, 100, 10.1):
        rank.run(us, name="nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT")
    rank.sync()
    (t,) = plan.compose(overlap=model).timelines
    assert sorted(model.asked) == [10, 100]  # 10.1 is 10 within a few per cent
    assert t.end_us[1:4] == pytest.approx([20, 320, 340.2])


def test_the_report_says_what_slowdown_cost():
    # As below: the kernel ends at 16.25 instead of 10, the call at 12.5 instead of 10.
    (t,) = beside(10, 10).compose(overlap=Factors(2.0, 1.0, 1.25)).timelines
    found = _slowdown_ms(t, steps=1)
    assert found == {"kernels": pytest.approx(6.25e-3), "communication": pytest.approx(2.5e-3)}
    (t,) = beside(10, 10).compose().timelines
    assert _slowdown_ms(t, steps=1) == {"kernels": 0.0, "communication": 0.0}


def test_kernel_and_call_slow_each_other_down():
    # Together the kernel runs at 1/2 and the call at 1/1.25: the call ends at 12.5 with the kernel at 6.25 of 10.
    (t,) = beside(10, 10).compose(overlap=Factors(2.0, 1.0, 1.25)).timelines
    assert t.end_us[0] == 12.5 and t.end_us[1] == 16.25
    assert t.slowdown[0] == 1.25 and t.slowdown[1] == 1.625
    assert t.breakdown.exposed_communication_us == {"dp": 0} and t.breakdown.communication_us == {"dp": 12.5}


def test_call_goes_on_at_full_rate_when_the_kernel_is_over():
    # The kernel takes 8 at 1/2; the call has 10 - 8/1.25 = 3.6 left.
    (t,) = beside(4, 10).compose(overlap=Factors(2.0, 1.0, 1.25)).timelines
    assert t.end_us[:2] == pytest.approx([11.6, 8], abs=1e-12)


def test_two_calls_add_up_and_kernels_on_two_streams_are_both_slowed():
    plan = Plan(2)
    a, b = plan.group(0, 1, name="a"), plan.group(0, 1, name="b", site="elsewhere")
    rank = plan.rank(0, (1,))
    rank.collective(12, a, stream="a")
    rank.collective(6, b, stream="b")
    rank.run(9)
    rank.run(30, stream="side")
    rank.sync()
    (t,) = plan.compose(overlap=Factors(1.5, 1.0, 1.0)).timelines
    # Until 6 both calls add a half each: 3 done. Until 12 one does: 4 more. Then full rate.
    assert t.end_us[:4].tolist() == [12, 6, 14, 35]


def test_waiting_call_holds_multiprocessors():
    plan = Plan(2)
    g = plan.group(0, 1, name="dp")
    for r in (0, 1):
        rank = plan.rank(r)
        rank.host(8.0 * r)
        rank.collective(4, g, stream="comm")
        rank.run(6 if r == 0 else 1)
        rank.sync()
        rank.collective(0)
        rank.sync()
    early, late = plan.compose(overlap=Factors(3.0, 1.5, 1.0)).timelines
    # Rank 0's call waits until 8: its kernel runs at 1/1.5 till 8 (5.33 done), at 1/3 (2 us for the rest: 10).
    assert early.end_us[2] == pytest.approx(10.0)
    assert late.end_us[2] == 11.0 and early.end_us[1] == 12.0


def test_members_move_in_lockstep():
    """Only rank 1 computes meanwhile, and slows the call for both."""
    plan = Plan(2)
    g = plan.group(0, 1, name="dp")
    for r in (0, 1):
        rank = plan.rank(r)
        rank.collective(10, g, stream="comm")
        if r:
            rank.run(5)
        rank.sync()
    a, b = plan.compose(overlap=Factors(1.0, 1.0, 2.0)).timelines
    # 5 us of the kernel move 2.5 of the call.
    assert a.end_us[0] == b.end_us[0] == 12.5


def test_uplink_is_shared():
    """Ranks 0 and 1 of node 0 each reduce with one of node 1; their calls of 10 and 30 bytes share the nodes' links."""
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="a"), plan.group(1, 3, name="b", site="elsewhere")]
    for r in (0, 1):
        rank = plan.rank(r, (r + 2,))
        rank.collective(10 if r == 0 else 30, pairs[r])
        rank.collective(0)
        rank.sync()
    network = LinkedNetwork()
    a, b = plan.compose(network, 2).timelines
    # At half speed the short one takes 20; the long one has 20 left and then the link to itself.
    assert a.end_us[0] == 20 and b.end_us[0] == 40
    assert a.slowdown[0] == 2 and b.slowdown[0] == pytest.approx(4 / 3)
    assert [t.ranks for t in plan.compose(network, 2).timelines] == [(0, 2), (1, 3)]
    apart = plan.compose(network, 2, share_links=False).timelines
    assert [t.end_us[0] for t in apart] == [10, 30]


def test_uneven_all_to_alls_share_the_links_they_load():
    """Two pairs across nodes; of the first, rank 0 sends 8 bytes to rank 2, which sends 2 back; the second is even."""
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="a"), plan.group(1, 3, name="b", site="elsewhere")]
    for r, (sends, expects) in {0: ((1, 4), (1, 1)), 2: ((1, 1), (4, 1))}.items():
        attrs = (("input_splits", sends), ("output_splits", expects))
        rank = plan.rank(r)
        rank.collective(2 * max(sum(sends), sum(expects)), pairs[0], name="all_to_all", attrs=attrs)
        rank.collective(0)
        rank.sync()
    rank = plan.rank(1, (3,))
    rank.collective(10, pairs[1])
    rank.collective(0)
    rank.sync()
    seen = {}

    class Uneven(LinkedNetwork):
        """A byte per us; an uneven all-to-all takes as long as its largest message, on both nodes' links."""

        def collective(self, name, ranks, bytes, dtype, *, root=-1, count=1, splits=None):
            if splits is not None:
                seen[ranks] = splits
                bytes = max(splits[i][j] for i in (0, 1) for j in (0, 1) if i != j)
            return self._cost(name, ranks, bytes)

    network = Uneven(lambda name, ranks, bytes: float(bytes))
    times = {t.ranks: t.end_us[0] for t in plan.compose(network, 2).timelines}
    assert seen == {(0, 2): ((2, 8), (2, 2))}
    # Together both run at half speed until the 8 bytes are over at 16; the other has 2 of its 10 left.
    assert times == {(0,): 16, (2,): 16, (1, 3): 18}
    apart = plan.compose(network, 2, share_links=False).timelines
    assert {t.ranks: t.end_us[0] for t in apart} == {(0,): 8, (2,): 8, (1, 3): 10}


def test_kernel_slows_one_of_two_calls_on_a_shared_link():
    """Calls of 10 bytes each share the nodes' links; on ranks 0 and 2 a kernel of 6 us runs beside the first one."""
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="a"), plan.group(1, 3, name="b", site="elsewhere")]
    for r in (0, 1):
        rank = plan.rank(r, (r + 2,))
        rank.collective(10, pairs[r], stream="comm")
        if r == 0:
            rank.run(6)
        rank.sync()
        rank.collective(0)
        rank.sync()
    a, b = plan.compose(LinkedNetwork(), 2, overlap=Factors(2.0, 1.0, 1.25)).timelines
    # The kernel runs at 1/2 until 12. Meanwhile a's call has half the link at 1/1.25: 4.8 done; b's call 6. Then both
    # run at 1/2: b's ends at 20, when a's has 1.2 left, which it moves with the link to itself.
    assert [a.end_us[1], b.end_us[0], a.end_us[0]] == pytest.approx([12, 20, 21.2], abs=1e-12)


def test_latency_does_not_stretch():
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="a"), plan.group(1, 3, name="b", site="elsewhere")]
    for r in range(4):
        rank = plan.rank(r)
        rank.collective(10, pairs[r % 2])
        rank.sync()
    assert plan.compose(LinkedNetwork(latency=5.0), 2).step_time_us == 25


def test_wide_link_holds_nobody_up():
    plan = Plan(4)
    pairs = [plan.group(0, 2, name="a"), plan.group(1, 3, name="b", site="elsewhere")]
    for r in range(4):
        plan.rank(r).collective(10, pairs[r % 2])
    assert plan.compose(LinkedNetwork(capacity=2.0), 2).step_time_us == 10
    assert plan.compose(LinkedNetwork(capacity=1.5), 2).step_time_us == pytest.approx(10 / 0.75)


def test_folded_flows_share_with_their_own_kind():
    """Four columns of one class over two nodes: one simulated call stands for four on each link."""
    plan = Plan(8)
    columns = [plan.group(r, r + 4, name="dp", site="dp") for r in range(4)]
    rank = plan.rank(0, tuple(range(1, 8)))
    rank.collective(10, columns[0])
    rank.sync()
    result = plan.compose(LinkedNetwork(per_node=4, nodes=2), 4)
    assert len(result.timelines) == 1 and result.step_time_us == 40
    assert plan.compose(LinkedNetwork(per_node=4, nodes=2), 4, folded=False).step_time_us == 40


def test_links_loaded_differently_split_classes():
    """Three pairs alike but for whom they share a node's link with."""
    plan = Plan(6)
    pairs = [plan.group(0, 3, name="dp", site="dp"), plan.group(1, 4, name="dp", site="dp")]
    lonely = plan.group(2, 5, name="dp", site="dp")
    rank = plan.rank(0, (1, 2, 3, 4, 5))
    rank.collective(10, pairs[0])
    rank.sync()
    del lonely
    # Nodes of two: {0,1} {2,3} {4,5}; links: node 0 carries pairs 0, 1; node 1 pairs 0, 2; node 2 pairs 1, 2.
    result = plan.compose(LinkedNetwork(per_node=2, nodes=3), 2)
    assert result.step_time_us == 20  # each link carries two of the three
    every = plan.compose(LinkedNetwork(per_node=2, nodes=3), 2, folded=False)
    assert every.step_time_us == 20


def test_slow_rank_holds_up_its_partners():
    plan = Plan(4)
    rank = plan.rank(0, (1, 2, 3))
    rank.run(10)
    rank.collective(5)
    rank.sync()
    result = plan.compose(slow_ranks={2: 1.5})
    assert [t.ranks for t in result.timelines] == [(0, 1, 3), (2,)]
    assert result.step_time_us == 20 and result.timelines[0].breakdown.waiting_us == 5
    assert result.critical == 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_without_overlap_the_clock_changes_nothing(seed):
    plan, per_node = random_plan(seed)
    roles = [Role(f"role{r}", r, ranks, ranks) for r, (_, ranks) in sorted(plan.members.items())]
    programs = [role_program(role, plan.members[role.traced_rank][0].trace(0), plan.groups) for role in roles]
    world = build_world(plan.world_size, plan.groups, programs)
    costs = Costs(uneven_network(per_node), per_node)
    partition = fold(world, costs)
    tables = build_tables(world, partition, costs, 2, np.ones(len(partition.representative)))
    constant, finished = run(tables, 2, 0.5)
    assert finished
    fluid = run_fluid(tables, build_interference(world, partition, tables, costs, None, None), 2, 0.5)
    for name in ("issue", "end", "start", "ready", "slot_end", "origin"):
        assert np.array_equal(getattr(constant, name), getattr(fluid, name), equal_nan=True), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_folded_times_equal_unfolded_times(seed):
    plan, per_node = random_plan(seed)
    network = LinkedNetwork(lambda name, ranks, bytes: float(bytes), per_node=per_node, nodes=64, latency=0.3)
    options = {"overlap": Factors(1.7, 1.2, 1.3), "repeat": 2}
    folded = plan.compose(network, per_node, **options)
    every = plan.compose(network, per_node, folded=False, **options)
    assert folded.step_time_us == pytest.approx(every.step_time_us, rel=1e-9)
    of_rank = {t.representative: t for t in every.timelines}
    for t in folded.timelines:
        for r in t.ranks:
            np.testing.assert_allclose(t.end_us, of_rank[r].end_us, rtol=1e-9, atol=1e-9)
        b = t.breakdown
        parts = b.compute_us + sum(b.exposed_communication_us.values()) + b.bubble_us + b.waiting_us + b.host_us
        assert parts == pytest.approx(b.step_us, rel=1e-9)
    path = folded.critical_path
    assert path.end_us[:-1] == pytest.approx(path.begin_us[1:], abs=1e-6)


def test_grouped_sends_have_one_latency_and_share_the_senders_link():
    """As NCCL's group: one kernel, whose parts start together and end with the last."""

    def sends(batched: bool) -> float:
        plan = Plan(3)
        sender = plan.rank(0)
        if batched:
            sender.open_batch()
        sender.send(1, 8)
        sender.send(2, 8)
        sender.close_batch()
        sender.sync()
        for r in (1, 2):
            plan.rank(r).recv(0, 8)
        # Every rank has a node of its own, whose link a send fills with 8 of 8 bytes per us.
        return plan.compose(LinkedNetwork(per_node=1, nodes=3, latency=2.0), 1).timelines[0].end_us[1]

    assert sends(batched=True) == 2 + 8 + 8  # each at half speed
    assert sends(batched=False) == 2 * (2 + 8)
