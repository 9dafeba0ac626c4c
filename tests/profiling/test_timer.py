"""Samples from the profiler's events: which kernels belong to which call."""

from __future__ import annotations

import pytest

from echo_hooks.profiling.timer import DeviceEvent, TimingFailed, grouped

MARKERS, WORK = 7, 8


def event(stream: int, start_us: int, duration_us: int, name: str = "k") -> DeviceEvent:
    return DeviceEvent(name, stream, start_us * 1000, duration_us * 1000)


def test_kernels_between_markers_belong_to_the_call():
    events = [
        event(MARKERS, 0, 5),
        event(WORK, 10, 2, "memset"),
        event(WORK, 13, 4, "gemm"),
        event(MARKERS, 20, 1),
        event(MARKERS, 22, 1),
        event(WORK, 30, 3, "add"),
    ]
    first, second = grouped(events, MARKERS, [1, 2])
    assert first.span_us == 7.0 and first.busy_us == 6.0 and first.kernels == ("memset", "gemm")
    assert second.span_us == second.busy_us == 3.0


def test_a_call_without_kernels_has_an_empty_sample():
    events = [event(MARKERS, 0, 1), event(MARKERS, 2, 1), event(WORK, 5, 2)]
    assert [s.kernels for s in grouped(events, MARKERS, [1, 1])] == [(), ("k",)]


def test_events_that_do_not_fit_are_refused():
    with pytest.raises(TimingFailed, match="1 marker kernels instead of 2"):
        grouped([event(MARKERS, 0, 1), event(WORK, 2, 1)], MARKERS, [1, 1])
    with pytest.raises(TimingFailed, match="beside the markers"):
        grouped([event(MARKERS, 0, 1), event(WORK, 2, 1), event(MARKERS, 4, 1)], MARKERS, [2])
    with pytest.raises(TimingFailed, match="beside the markers"):
        grouped([event(WORK, 0, 1), event(MARKERS, 2, 1)], MARKERS, [1])
