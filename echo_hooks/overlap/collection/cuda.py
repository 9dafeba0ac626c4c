"""Trials on a CUDA device: two streams that begin together, with an event between every two groups and calls.

Both streams wait for a kernel that sleeps, the gate, until the host has issued the whole trial: so neither lane has
gaps for want of work.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from echo_hooks.overlap.collection.trials import Stamps
from echo_hooks.overlap.samples import Launch
from echo_hooks.overlap.traces import launch_of


class Repeated:
    """``per_group`` launches of one kernel as one CUDA graph where the kernel can be captured, else one by one."""

    def __init__(self, call: Callable[[], Any], per_group: int):
        self._call, self.per_group = call, per_group
        self._graph: torch.cuda.CUDAGraph | None = None
        if per_group > 1:
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(per_group):
                        call()
                self._graph = graph
            except RuntimeError:
                torch.cuda.synchronize()

    def launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for _ in range(self.per_group):
            self._call()


class CudaTrials:
    """Runs trials on one device; times in microseconds from the gate's opening.

    ``issue_us``: what the host last needed to issue one group and one call: the gate has to be held for longer than
    all of a trial's together.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.issue_us = (10.0, 60.0)
        self._kernels, self._calls = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._events: list[torch.cuda.Event] = []
        self._cycles_per_us = self._calibrated()

    def _calibrated(self) -> float:
        """Cycles of the sleep kernel per microsecond."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            begin.record()
            torch.cuda._sleep(2_000_000)
            end.record()
            torch.cuda.synchronize()
        return 2_000_000 / (begin.elapsed_time(end) * 1e3)

    def repeated(self, call: Callable[[], Any], per_group: int) -> Repeated:
        return Repeated(call, per_group)

    def trial(
        self,
        kernel: Repeated | None,
        groups: int,
        call: Callable[[], Any] | None,
        calls: int,
        *,
        gate_us: float,
        kernels_after_us: float = 0.0,
        calls_after_us: float = 0.0,
    ) -> Stamps:
        """One trial; the lanes begin so many microseconds after the gate, which stays shut for ``gate_us``."""
        events = iter(self._pool(groups + calls + 3))
        opened = next(events)
        main = torch.cuda.current_stream(self.device)
        self._sleep(gate_us)
        opened.record(main)
        began = time.perf_counter()
        call_events: list[torch.cuda.Event] = []
        kernel_events: list[torch.cuda.Event] = []
        if call is not None:
            with torch.cuda.stream(self._calls):
                self._calls.wait_event(opened)
                self._sleep(calls_after_us)
                call_events.append(_stamp(next(events), self._calls))
                for _ in range(calls):
                    call()
                    call_events.append(_stamp(next(events), self._calls))
        between = time.perf_counter()
        if kernel is not None:
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(opened)
                self._sleep(kernels_after_us)
                kernel_events.append(_stamp(next(events), self._kernels))
                for _ in range(groups):
                    kernel.launch()
                    kernel_events.append(_stamp(next(events), self._kernels))
        ended = time.perf_counter()
        torch.cuda.synchronize(self.device)
        a_group, a_call = self.issue_us
        if kernel is not None:
            a_group = (ended - between) * 1e6 / groups
        if call is not None:
            a_call = (between - began) * 1e6 / calls
        self.issue_us = (a_group, a_call)
        return Stamps(
            tuple(opened.elapsed_time(e) * 1e3 for e in kernel_events),
            tuple(opened.elapsed_time(e) * 1e3 for e in call_events),
            (ended - began) * 1e6 > gate_us,
        )

    def release(self) -> None:
        """Give back the memory of kernels measured before."""
        torch.cuda.empty_cache()

    def _sleep(self, us: float) -> None:
        if us > 0.0:
            torch.cuda._sleep(int(us * self._cycles_per_us))

    def _pool(self, count: int) -> list[torch.cuda.Event]:
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events

    def launches(self, calls: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Launch]:
        """Geometry of the longest kernel of each call, from one profiled run of all."""
        from torch.profiler import ProfilerActivity, profile, record_function

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for name, call in calls:
                call()
                torch.cuda.synchronize(self.device)
                with record_function(f"overlap:{name}"):
                    call()
                torch.cuda.synchronize(self.device)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return launches_in(json.loads(path.read_text())["traceEvents"])


def launches_in(events: list[dict[str, Any]]) -> dict[str, Launch]:
    """Geometry of the longest kernel inside each host range "overlap:NAME" of a Kineto trace."""
    ranges, runtime, kernels = [], [], {}
    for event in events:
        category, args = event.get("cat"), event.get("args", {})
        if category == "user_annotation" and str(event.get("name", "")).startswith("overlap:"):
            ranges.append((event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("overlap:")))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            runtime.append((event["ts"], args["correlation"]))
        elif category == "kernel":
            kernels[args.get("correlation")] = event
    found: dict[str, Launch] = {}
    for begin, end, name in ranges:
        inside = [kernels[c] for ts, c in runtime if begin <= ts <= end and c in kernels]
        if inside:
            longest = max(inside, key=lambda e: e["dur"])
            found[name] = launch_of(longest["args"], len(inside))
    return found


def _stamp(event: torch.cuda.Event, stream: torch.cuda.Stream) -> torch.cuda.Event:
    event.record(stream)
    return event
