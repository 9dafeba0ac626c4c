"""The critical path leads from the end of the step to its begin without a gap."""

from __future__ import annotations

import numpy as np
import pytest
from hand_built import FakeNetwork, Plan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_folding import random_plan, uneven_network


def test_path_crosses_to_the_rank_that_was_late():
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        rank.run(10 + 20 * r, host=2)
        rank.collective(8)
        rank.run(50 - 40 * r)
        rank.sync()
        rank.collective(0)
        rank.sync()
    result = plan.compose()
    path = result.critical_path
    # Rank 1's launch and kernel, the call, rank 0's second kernel.
    assert path.timeline.tolist()[:2] == [1, 1] and path.timeline.tolist()[-1] == 0
    assert path.record.tolist()[:2] == [0, 0] and path.record.tolist()[-1] == 2
    assert path.host.tolist() == [True, False, False, False]
    assert (path.end_us - path.begin_us).tolist() == [2, 30, 8, 50]
    assert result.evidence == {"measured": pytest.approx(2 / 90), "modelled": pytest.approx(88 / 90)}


def test_path_through_events_and_synchronisations():
    plan = Plan(1)
    rank = plan.rank(0)
    rank.run(10)
    event = rank.record()
    rank.wait(event, stream="side")
    rank.run(20, stream="side")
    rank.run(3)
    rank.sync()
    rank.run(4, host=5)
    rank.sync()
    path = plan.compose().critical_path
    assert path.record.tolist() == [0, 3, 6, 6] and path.host.tolist() == [False, False, True, False]
    assert path.begin_us.tolist() == [0, 10, 30, 35] and path.end_us[-1] == 39


def test_path_through_a_full_launch_queue():
    plan = Plan(1)
    rank = plan.rank(0)
    for _ in range(1025):
        rank.run(1)
    rank.run(1, stream="side", host=2)
    rank.sync()
    rank.sync()
    path = plan.compose().critical_path
    assert path.end_us[-1] == 1025 and (path.end_us - path.begin_us).sum() == 1025


def test_slack_of_two_ranks():
    """Rank 0: 10, waits, 8 of the call, 50. Rank 1: 30, the call, 10: its last kernel could end 40 later."""
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        rank.run(10 + 20 * r, host=2)
        rank.collective(8)
        rank.run(50 - 40 * r)
        rank.run(5, stream="side")
        rank.sync()
        rank.collective(0)
        rank.sync()
    first, second = plan.compose(slack=True).timelines
    # In order: kernel, call, kernel, kernel beside them from 2 to 7, synchronisation, call of no time, synchronisation.
    assert first.slack_us.tolist() == [20, 0, 0, 83, 0, 0, 0]
    assert second.slack_us.tolist() == [0, 0, 40, 83, 40, 0, 0]
    assert plan.compose().timelines[0].slack_us is None


def test_slack_through_events_sends_and_the_host():
    plan = Plan(2)
    rank = plan.rank(0)
    rank.run(10)
    event = rank.record()
    rank.wait(event, stream="side")
    rank.open_batch()
    rank.send(1, 6, stream="side")
    rank.recv(1, 4, stream="side")
    rank.close_batch()
    rank.host(7)
    rank.run(3)
    rank.sync()
    rank.collective(0)
    rank.sync()
    rank = plan.rank(1)
    rank.recv(0, 6, host=1)
    rank.send(0, 4)
    rank.run(20, host=2)
    rank.sync()
    rank.collective(0)
    rank.sync()
    first, second = plan.compose(slack=True).timelines
    # Rank 1 receives until 16, sends until 20, runs until 40; rank 0's host waits at 7, its last kernel ends at 13.
    assert first.slack_us.tolist() == [0, 0, 0, 0, 0, 30, 27, 20, 0, 0]
    assert second.slack_us.tolist() == [0, 0, 0, 0, 0, 0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_no_slack_on_the_critical_path_and_none_below_zero(seed):
    plan, per_node = random_plan(seed)
    result = plan.compose(uneven_network(per_node), per_node, repeat=4, slack=True)
    path = result.critical_path
    assert all((t.slack_us >= 0.0).all() for t in result.timelines)
    for timeline, record, host in zip(path.timeline, path.record, path.host):
        if not host:
            assert result.timelines[timeline].slack_us[record] == 0.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_path_has_no_gap(seed):
    plan, per_node = random_plan(seed)
    result = plan.compose(uneven_network(per_node), per_node, repeat=4)
    path = result.critical_path
    assert path.end_us[:-1] == pytest.approx(path.begin_us[1:], abs=1e-9)
    assert (np.diff(path.begin_us) >= 0).all()
    assert sum(result.evidence.values()) == pytest.approx(1.0)
    ends = max(t.offset_us + np.nanmax([np.nanmax(t.end_us), np.nanmax(t.issue_us)]) for t in result.timelines)
    assert path.end_us[-1] == pytest.approx(ends)


def test_communication_keeps_its_evidence():
    plan = Plan(2)
    rank = plan.rank(0, (1,))
    rank.collective(30)
    rank.run(10)
    rank.sync()

    class Calibrated(FakeNetwork):
        def collective(self, *args, **kwargs):
            from dataclasses import replace

            return replace(super().collective(*args, **kwargs), evidence="measured")

    assert plan.compose(Calibrated()).evidence == {"measured": 0.75, "modelled": 0.25}
