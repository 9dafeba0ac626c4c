"""Kineto around a few steps: started, stopped, and its events read from memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from echo_hooks.graph.kineto_events import Call, Events, Work
from echo_hooks.graph.program import Kind

_NAME_CHARACTERS = 160
# Activities of CUPTI that are no work (Kineto's names, libkineto/src/CuptiActivity.cpp).
_NO_WORK = ("Stream Wait Event", "Stream Sync", "Event Sync", "Context Sync", "Synchronization", "CUDA Event")


class Profiler:
    """torch's own profiler of the device alone: without the host's ops it costs the host least."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self.base_ns = 0  # of time.time_ns(): what times are counted from, as microseconds since 1970 are too coarse
        self._profile: Any = None

    def start(self) -> None:
        self.base_ns = time.time_ns()
        self._profile = torch.autograd.profiler.profile(
            use_cpu=self.device == "cpu", use_device=None if self.device == "cpu" else self.device, use_kineto=True
        )
        self._profile.__enter__()

    def stop(self) -> Events:
        """The events seen, times in microseconds since ``base_ns``."""
        results = torch.autograd._disable_profiler()  # type: ignore[attr-defined]
        self._profile.enabled = False  # nothing is left for its own exit
        torch.autograd.profiler._run_on_profiler_stop()
        self._profile = None
        return events_of(results.events(), self.base_ns)


def events_of(kineto: Iterable[Any], base_ns: int) -> Events:
    """Host calls and device works from ``torch._C._autograd._KinetoEvent`` objects."""
    events = Events()
    for event in kineto:
        name = event.name()
        start = (event.start_ns() - base_ns) / 1e3
        end = start + event.duration_ns() / 1e3
        if event.device_type() == torch.autograd.DeviceType.CPU:
            if name.startswith(("cuda", "cu", "hip")):
                arguments = {"correlation": event.correlation_id()}
                events.calls.append(Call(name, str(event.device_resource_id()), start, end, arguments))
        elif not name.startswith(_NO_WORK) and not name.startswith("ProfilerStep"):
            kind = Kind.COPY if name.startswith("Memcpy") else Kind.COMPUTE
            size = event.nbytes() if name.startswith(("Memcpy", "Memset")) else 0
            work = Work(kind, name[:_NAME_CHARACTERS], event.device_resource_id(), start, end, {"bytes": size})
            events.launched[event.correlation_id()].append(work)
    events.calls.sort(key=lambda call: call.start_us)
    for works in events.launched.values():
        works.sort(key=lambda work: work.start_us)
    return events
