"""Kernel times of calls on a CUDA device, by the profiler; launches and the host are left out.

Every measured call stands between kernels of a second stream, so that its own kernels are told by their stream and
place, whatever it launches:

    markers   |flush|        |flush|        |tick|
    work             |call a|       |call a|      |call b| ...

As long as the host is ahead, the device never waits for it: a call's span is its kernels and the gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20
"""Read before a cold call: several times the last cache of any device."""

HEATER = (8192, 8192, 4096)
"""A product of about 0.7 ms on an H100, before a loaded call: keeps the device at the clock it has under load, and
leaves none of the call's operands in the cache."""


CYCLES_PER_US = 1980
"""Of the highest clock of an H100: how long a rest takes need not be exact."""


@dataclass(frozen=True)
class Sample:
    """One call: first kernel's start to last kernel's end, the kernels' own times summed, and their names."""

    span_us: float
    busy_us: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """One call to be timed: its index, the condition, and how long the device rests before it."""

    index: int
    condition: str
    rest_us: float = 0.0


class Timer(Protocol):
    """What measures; a test's has no device."""

    def warm_up(self, call: Callable[[], Any]) -> None:
        """A first call, errors and compilation included."""

    def measure(self, calls: Sequence[Callable[[], Any]], plan: Sequence[Planned]) -> list[Sample]:
        """One sample for each item of ``plan``, made in that order."""


class TimingFailed(Exception):
    """The profiler's events do not fit what was launched."""


class KinetoTimer:
    """Times calls on ``device`` with torch.profiler's device events."""

    def __init__(self, device: torch.device):
        self.device = device
        self._work = torch.cuda.Stream(device)
        self._markers = torch.cuda.Stream(device)
        self._flushed = torch.empty(FLUSH_BYTES // 4 // 16384, 16384, device=device).normal_()
        self._sums = torch.empty(self._flushed.shape[0], device=device)
        self._dot = torch.zeros(1, device=device)
        m, n, k = HEATER
        self._left = torch.empty(m, k, device=device, dtype=torch.bfloat16).normal_()
        self._right = torch.empty(k, n, device=device, dtype=torch.bfloat16).normal_()
        self._product = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self._before = {"cold": self._flush, "warm": self._tick, "loaded": self._heat}
        torch.cuda.synchronize(device)
        self._marker_kernels = self._count_marker_kernels()

    def warm_up(self, call: Callable[[], Any]) -> None:
        """A first call, errors and compilation included, on the stream that will be measured."""
        torch.cuda.synchronize(self.device)  # its operands are still being filled on the caller's stream
        with torch.cuda.stream(self._work):
            call()
        torch.cuda.synchronize(self.device)

    def measure(self, calls: Sequence[Callable[[], Any]], plan: Sequence[Planned]) -> list[Sample]:
        events = self._profiled(lambda: self._issue(calls, plan))
        counts = [self._marker_kernels[p.condition] + (p.rest_us > 0.0) for p in plan]
        return grouped(events, self._marker_stream, counts)

    def _issue(self, calls: Sequence[Callable[[], Any]], plan: Sequence[Planned]) -> None:
        for planned in plan:
            with torch.cuda.stream(self._markers):
                if planned.rest_us > 0.0:
                    torch.cuda._sleep(max(int(planned.rest_us * CYCLES_PER_US), 1))
                self._before[planned.condition]()
            self._work.wait_stream(self._markers)
            with torch.cuda.stream(self._work):
                calls[planned.index]()
            self._markers.wait_stream(self._work)

    def _flush(self) -> None:
        torch.sum(self._flushed, dim=1, out=self._sums)

    def _tick(self) -> None:
        self._dot.fill_(1.0)

    def _heat(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def _count_marker_kernels(self) -> dict[str, int]:
        """How many kernels each condition's marker launches (a product may clear a counter first)."""
        counts = {}
        for condition, before in self._before.items():

            def issue(before=before) -> None:
                with torch.cuda.stream(self._markers):
                    before()

            issue()
            events = self._profiled(issue)
            if not events:
                raise TimingFailed("the profiler returned no device events: is another one attached, or CUPTI missing?")
            counts[condition] = len(events)
            self._marker_stream = events[0].stream
        return counts

    def _profiled(self, issue: Callable[[], None]) -> list[DeviceEvent]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
        inner: Any = profiler.profiler
        # Only the raw events are wanted; building torch's own list of them takes longer than the measurement.
        inner._parse_kineto_results = _no_events
        try:
            issue()
            torch.cuda.synchronize(self.device)
        finally:
            profiler.stop()
        kind = torch.autograd.DeviceType.CUDA
        events = [
            DeviceEvent(e.name(), e.device_resource_id(), e.start_ns(), e.duration_ns())
            for e in inner.kineto_results.events()
            if e.device_type() == kind and e.duration_ns() > 0
        ]
        return sorted(events, key=lambda e: e.start_ns)


def _no_events(_results: Any) -> list[Any]:
    return []


@dataclass(frozen=True)
class DeviceEvent:
    name: str
    stream: int
    start_ns: int
    duration_ns: int


def grouped(events: Sequence[DeviceEvent], marker_stream: int, marker_kernels: Sequence[int]) -> list[Sample]:
    """Samples of calls, each behind as many marker kernels as said; TimingFailed where that is not what ran.

    ``events``: in order of start.
    """
    opened_at = {0: -1}
    total = 0
    for item, count in enumerate(marker_kernels):
        total += count
        opened_at[total] = item
    groups: list[list[DeviceEvent]] = [[] for _ in marker_kernels]
    markers = 0
    for event in events:
        if event.stream == marker_stream:
            markers += 1
            continue
        item = opened_at.get(markers, -1)
        if item < 0:
            raise TimingFailed("a kernel ran beside the markers")
        groups[item].append(event)
    if markers != total:
        raise TimingFailed(f"{markers} marker kernels instead of {total}")
    return [_sample(group) for group in groups]


def _sample(group: list[DeviceEvent]) -> Sample:
    if not group:
        return Sample(0.0, 0.0, ())
    end = max(e.start_ns + e.duration_ns for e in group)
    busy = sum(e.duration_ns for e in group)
    return Sample((end - group[0].start_ns) / 1e3, busy / 1e3, tuple(e.name for e in group))
