"""Communication and compute tables, worked out by hand from the clock in conftest."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hooks.report.activity import (
    communication_rows,
    compute_by_class,
    compute_by_module,
    length,
    overlap,
    union,
)

MIB = 1 << 20


def test_communication_of_rank_0(run, composition):
    reduce, send = communication_rows(composition.timelines[0], run.traces[0].ops, run.groups, 1)
    assert (reduce.group, reduce.size, reduce.operation, reduce.calls) == ("dp", 2, "all_reduce", 1)
    assert reduce.bytes == 14 * MIB
    assert reduce.time_ms == pytest.approx(0.140)  # moves 260-400
    assert reduce.waiting_ms == pytest.approx(0.060)  # 200-260
    assert reduce.exposed_ms == pytest.approx(0.090)  # 310-400: backward ends at 310
    assert reduce.busbw_bytes_per_s == pytest.approx(14 * MIB / 140e-6)  # factor 2 (n - 1) / n is 1 for two ranks
    assert (send.operation, send.time_ms, send.exposed_ms) == ("send", pytest.approx(0.020), pytest.approx(0.0))


def test_communication_of_rank_1(run, composition):
    reduce, receive = communication_rows(composition.timelines[1], run.traces[1].ops, run.groups, 1)
    assert (reduce.waiting_ms, reduce.exposed_ms) == (pytest.approx(0.0), pytest.approx(0.140))
    assert (receive.waiting_ms, receive.exposed_ms) == (pytest.approx(0.115), pytest.approx(0.020))


def test_exposed_agrees_with_the_breakdown(run, composition):
    for timeline in composition.timelines:
        for row in communication_rows(timeline, run.traces[timeline.representative].ops, run.groups, 1):
            assert row.exposed_ms * 1e3 == pytest.approx(timeline.breakdown.exposed_communication_us[row.group])


def test_communication_hidden_under_the_next_step_is_not_exposed(run, composition):
    timeline = composition.timelines[0]
    timeline.end_us[4] = 500.0  # 40 us into the next step, whose first kernel runs from 470
    reduce = communication_rows(timeline, run.traces[0].ops, run.groups, 1)[0]
    # exposed: 310-400 before adam, 450-470 after it
    assert reduce.exposed_ms == pytest.approx(0.090 + 0.020)


def test_two_traced_steps_are_averaged(run, composition):
    timeline = composition.timelines[0]
    timeline.breakdown.step_us /= 2
    reduce = communication_rows(timeline, run.traces[0].ops, run.groups, 2)[0]
    assert (reduce.calls, reduce.bytes, reduce.time_ms) == (0.5, 7 * MIB, pytest.approx(0.070))


def test_compute_by_class_and_module(run, composition):
    rows = compute_by_class(composition.timelines[0], run.traces[0].ops, 1)
    assert [(r.name, r.calls, round(r.time_ms, 9)) for r in rows] == [
        ("matrix product", 2, 0.3),
        ("optimizer (fused, foreach)", 1, 0.05),
    ]
    rows = compute_by_module(composition.timelines[0], 1)
    assert [(r.name, round(r.time_ms, 9)) for r in rows] == [("layers.*.mlp", 0.3), ("(no module)", 0.05)]


def test_intervals():
    a = union(np.array([5.0, 0.0, 1.0, 9.0]), np.array([6.0, 2.0, 3.0, 9.5]))
    assert a.tolist() == [[0, 3], [5, 6], [9, 9.5]]
    assert length(a) == 4.5
    assert overlap(a, np.array([[2.0, 5.5]])) == pytest.approx(1.5)
    assert length(union(np.array([]), np.array([]))) == 0.0
