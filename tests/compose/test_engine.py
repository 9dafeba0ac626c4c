"""Times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_built import FakeNetwork, Plan

from echo_hooks.errors import UsageError
from echo_hooks.graph.program import Kind


def only(plan: Plan, **options):
    (timeline,) = plan.compose(**options).timelines
    return timeline


def test_stream_is_first_in_first_out_behind_the_host():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10, host=2)
    rank.run(1, host=3)
    rank.run(4, host=20)
    rank.sync()
    t = only(plan)
    assert t.issue_us.tolist() == [2, 5, 25, 25]
    assert t.start_us[:3].tolist() == [2, 12, 25] and t.end_us[:3].tolist() == [12, 13, 29]
    assert np.isnan(t.end_us[3]) and t.breakdown.step_us == 29
    assert t.breakdown.compute_us == 15 and t.breakdown.host_us == 14


def test_launch_cost_is_charged_per_kernel_and_call():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(1)
    rank.wait(rank.record())
    rank.collective(1)
    rank.sync()
    assert only(plan, host_launch_us=3.0).issue_us.tolist() == [3, 3, 3, 6, 6]


def test_event_orders_two_streams():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10)
    event = rank.record()
    rank.run(5)
    rank.run(3, stream="side")  # no wait yet: runs at once
    rank.wait(event, stream="side")
    rank.run(4, stream="side")
    rank.sync()
    t = only(plan)
    assert t.start_us.tolist()[:6] == [0, 10, 10, 0, 3, 10]
    assert t.end_us.tolist()[:6] == [10, 10, 15, 3, 10, 14]


def test_event_recorded_again_is_a_new_event():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10)
    first = rank.record()
    rank.run(10)
    rank.record()
    rank.wait(first, stream="side")
    rank.run(1, stream="side")
    rank.sync()
    assert only(plan).start_us[5] == 10


def test_event_from_before_the_program_is_complete():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.wait(999, stream="side")
    rank.run(1, stream="side")
    rank.sync(event=998)
    rank.run(1, host=2)
    rank.sync()
    assert only(plan).start_us[3] == 2


@pytest.mark.parametrize("target, resumed", [("event", 10), ("stream", 14), ("device", 30)])
def test_synchronisation_blocks_the_host(target, resumed):
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10)
    event = rank.record()
    rank.run(4)
    rank.run(30, stream="side")
    rank.sync(**{"event": {"event": event}, "stream": {"stream": "default"}, "device": {}}[target])
    rank.run(1, host=2)
    rank.sync()
    assert only(plan).issue_us[5] == resumed + 2


def test_synchronisation_waits_for_work_of_the_copy_before():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.sync()
    rank.run(7, host=1)
    assert plan.compose(repeat=3).step_time_us == 8


def test_queue_depth_blocks_the_host():
    plan = Plan(1)
    rank = plan.rank(0)
    for _ in range(1030):
        rank.run(1)
    rank.sync()
    t = only(plan)
    assert t.issue_us[1023] == 0 and t.issue_us[1024] == 1 and t.issue_us[1029] == 6


def test_threads_issue_in_program_order():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(1, host=5)
    rank.run(1, host=1, thread=1)  # backward's thread: not before the main thread's record
    rank.run(1, host=1, thread=1)
    rank.run(1, host=1)
    rank.sync()
    t = only(plan)
    assert (t.issue_us - t.issue_us[0]).tolist() == [0, 0, 1, 1, 1]


def test_collective_starts_with_its_last_member_and_holds_the_early_ones():
    plan = Plan(3)
    for r in range(3):
        rank = plan.rank(r)
        rank.run(10 * (r + 1))
        rank.collective(7, site="train.py:1")
        rank.run(1)
        rank.sync()
    result = plan.compose()
    for r, t in enumerate(result.timelines):
        assert (t.start_us[1], t.ready_us[1], t.end_us[1]) == (10 * (r + 1), 30, 37)
        assert t.start_us[2] == 37
        assert t.breakdown.waiting_us == 20 - 10 * r and t.breakdown.exposed_communication_us == {"world": 7}
    assert result.step_time_us == 38 and result.critical == 2


def test_collective_on_its_own_stream_hides_behind_compute():
    plan = Plan(2)
    g = plan.group(0, 1, name="dp")
    rank = plan.rank(0, (1,))
    rank.run(10)
    done = rank.asynchronous(20, g, "comm:dp")
    rank.run(12)
    rank.wait(done)
    rank.run(1)
    rank.sync()
    t = only(plan)
    assert t.start_us[3] == 10 and t.end_us[3] == 30 and t.start_us[7] == 30
    assert t.breakdown.exposed_communication_us == {"dp": 8} and t.breakdown.communication_us == {"dp": 20}
    assert t.breakdown.compute_us == 23 and t.breakdown.step_us == 31


def test_host_collective_blocks_the_host():
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        rank.host(5 + 10 * r)
        rank.collective(4, stream="host")
        rank.run(1, host=1)
        rank.sync()
    for r, t in enumerate(plan.compose().timelines):
        assert (t.start_us[1], t.ready_us[1], t.end_us[1]) == (5 + 10 * r, 15, 19)
        assert t.issue_us[2] == 20


def test_send_waits_for_its_receive():
    plan = Plan(2)
    sender, receiver = plan.rank(0), plan.rank(1)
    sender.run(3)
    sender.send(1, 5)
    sender.sync()
    receiver.run(10)
    receiver.recv(0, 5)
    receiver.run(2)
    receiver.sync()
    a, b = plan.compose().timelines
    # Rank 1 computes 2 more behind the first receive, so rank 0 begins its second copy 2 before rank 1 does.
    assert (a.offset_us, b.offset_us) == (0, 2)
    assert (a.start_us[1], a.ready_us[1], a.end_us[1]) == (3, 12, 17)
    assert (b.start_us[1], b.ready_us[1], b.end_us[1]) == (10, 10, 15)
    assert b.breakdown.step_us == 17 and a.breakdown.bubble_us == 9
    assert plan.compose(repeat=4).step_time_us == 17


def test_batch_is_one_kernel_that_ends_with_its_last_part():
    plan = Plan(3)
    for r in range(3):
        rank = plan.rank(r)
        rank.run(r + 1)
        rank.open_batch()
        for other in range(3):
            if other != r:
                rank.send(other, 10 if {r, other} == {0, 2} else 4)
                rank.recv(other, 10 if {r, other} == {0, 2} else 4)
        rank.close_batch()
        rank.run(1)
        rank.collective(0)
        rank.sync()
    a, b, c = plan.compose().timelines
    # Pairs meet at 2 (0 and 1), 3 (0 and 2, 1 and 2); rank 1 ends at 3 + 4, the others at 3 + 10.
    assert a.start_us[5] == 13 and b.start_us[5] == 7 and c.start_us[5] == 13
    assert a.start_us[1] == 1 and sorted(set(a.ready_us[1:5])) == [2, 3]


def test_coalesced_collectives_cost_what_their_sum_costs():
    plan = Plan(2)
    rank = plan.rank(0, (1,))
    rank.open_batch()
    rank.collective(6)
    rank.collective(2)
    rank.close_batch()
    rank.sync()
    network = FakeNetwork(lambda name, ranks, bytes: 10.0 + bytes)
    t = only(plan, network=network)
    assert [(call[2], call[5]) for call in network.asked] == [(8, 2)]
    assert t.end_us[:2].tolist() == [13.5, 18.0]


def test_communicator_runs_its_calls_in_order():
    plan = Plan(2)
    rank = plan.rank(0, (1,))
    rank.collective(10, stream="a")
    rank.collective(5, stream="b")
    rank.sync()
    t = only(plan)
    assert t.start_us[1] == 0 and t.ready_us[1] == 10 and t.end_us[1] == 15


def test_uneven_all_to_all_asks_for_its_splits():
    plan = Plan(2)
    for r, (sends, expects) in enumerate([((1, 3), (1, 2)), ((2, 5), (3, 5))]):
        attrs = (("input_splits", sends), ("output_splits", expects))
        plan.rank(r).collective(2 * max(sum(sends), sum(expects)), name="all_to_all", attrs=attrs)
    network = FakeNetwork(lambda *a: 3.0)
    assert plan.compose(network).step_time_us == 3.0
    assert [call[6] for call in network.asked] == [((2, 6), (4, 10))]


def test_device_work_outstanding_at_the_boundary_gives_the_true_period():
    """The host issues a step in 2, the device needs 30: no synchronisation ever, the period is 30."""
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10, host=1)
    rank.run(20, host=1)
    result = plan.compose()
    assert result.step_time_us == 30 and result.timelines[0].breakdown.compute_us == 30


def test_work_across_the_boundary_counts_once():
    """The side stream's kernel of a copy runs beside the main stream's of the copy before."""
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(4, stream="side", host=1)
    rank.run(10)
    rank.run(6, stream="third")
    for repeat in (2, 3, 5):
        parts = plan.compose(repeat=repeat).timelines[0].breakdown
        assert parts.step_us == 10 and parts.compute_us == 10 and parts.host_us == 0


def test_steps_in_a_program_share_its_time():
    plan = Plan(1)
    rank = plan.rank(0)
    for _ in range(4):
        rank.run(5)
        rank.sync()
    made = rank.trace(0, steps=4)
    from echo_hooks.compose import compose
    from echo_hooks.graph.roles import Role

    result = compose(1, plan.groups, [Role("r", 0, (0,), (0,))], {0: made}, FakeNetwork(), accelerators_per_node=8)
    assert result.step_time_us == 5 and result.timelines[0].breakdown.compute_us == 5


def test_copies_and_kernels_need_durations():
    plan = Plan(1)
    plan.rank(0).run(float("nan"), kind=Kind.COPY)
    with pytest.raises(UsageError, match="no duration"):
        plan.compose()


def test_roles_must_cover_the_world():
    plan = Plan(2)
    plan.rank(0).run(1)
    with pytest.raises(UsageError, match="rank 1 has no role"):
        plan.compose()


def test_evidence_of_a_network_failure_is_an_error():
    plan = Plan(2)
    plan.rank(0, (1,)).collective(1)
    with pytest.raises(UsageError, match="network model"):
        plan.compose(FakeNetwork(lambda *a: float("nan")))
