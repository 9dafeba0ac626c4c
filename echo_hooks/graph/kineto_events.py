"""What a Kineto trace says of one rank: host calls, and the device's work by the call that launched it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.graph.chrome_trace import Repairs, chrome_events
from echo_hooks.graph.program import Kind

MAX_EVENTS = 20_000_000
"""Events kept of one trace: more than hours of training issue."""

DEVICE = {"kernel": Kind.COMPUTE, "gpu_memcpy": Kind.COPY, "gpu_memset": Kind.COMPUTE}
_NAME_CHARACTERS = 160  # of a kernel's demangled name


@dataclass(slots=True)
class Work:
    """One operation of the device. ``record``: where the importer put it in the program."""

    kind: Kind
    name: str
    stream: int
    start_us: float
    end_us: float
    args: dict[str, Any]
    record: int = -1


@dataclass(slots=True)
class Call:
    name: str
    thread: str
    start_us: float
    end_us: float
    args: dict[str, Any]


@dataclass
class Events:
    """``calls``: of the host, by begin. ``launched``: the device's work by correlation. ``optimizer_ends``,
    ``profiler_steps``: where steps end, as the trace's annotations tell. Times in microseconds of the trace's clock."""

    calls: list[Call] = field(default_factory=list)
    launched: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    optimizer_ends: list[float] = field(default_factory=list)
    profiler_steps: list[tuple[float, float]] = field(default_factory=list)


_COMMUNICATION_ARGS = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Src Rank",
    "Dst Rank",
    "Root Rank",
)


def read_events(path: Path, repairs: Repairs | None = None) -> Events:
    """UsageError for a file that is no trace, or has an event without a proper time.

    With ``repairs`` such an event is left out and counted, a device operation may lack stream and correlation, and a
    file may be truncated.
    """
    events = Events()
    kept = 0
    for event in chrome_events(path, repairs):
        category = event.get("cat")
        name = event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        annotation = category == "user_annotation" and name.startswith(("Optimizer.step", "ProfilerStep"))
        described = category == "cpu_op" and name == "record_param_comms"
        host = category in ("cuda_runtime", "cuda_driver")
        if not (annotation or described or host or category in DEVICE) or _SYNCHRONISATION.match(name):
            continue
        kept += 1
        if kept > MAX_EVENTS:
            if repairs is None:
                raise UsageError(f"{path}: more than {MAX_EVENTS} events; profile fewer steps")
            repairs.sentences.append(f"{path}: more than {MAX_EVENTS} events; those behind are left out")
            break
        try:
            _keep(path, events, event, annotation, repairs is not None)
        except UsageError:
            if repairs is None:
                raise
            repairs.dropped += 1
    events.calls.sort(key=lambda call: call.start_us)
    for works in events.launched.values():
        works.sort(key=lambda work: work.start_us)
    if not events.launched:
        raise UsageError(f"{path}: no kernel in it; profile with ProfilerActivity.CUDA")
    return events


# Newer Kineto shows waits of streams and hosts on the device's tracks: nothing runs in them.
_SYNCHRONISATION = re.compile(r"(Stream|Event|Context|Device) (Sync|Wait|Synchroni[sz]e)\b")


def _keep(path: Path, events: Events, event: dict[str, Any], annotation: bool, lenient: bool) -> None:
    category, name = event.get("cat"), str(event["name"])
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    start = _number(path, event, "ts")
    end = start + _number(path, event, "dur")
    if annotation and name.startswith("Optimizer.step"):
        events.optimizer_ends.append(end)
    elif annotation:
        events.profiler_steps.append((start, end))
    elif category in DEVICE:
        wanted = {key: args[key] for key in (*_COMMUNICATION_ARGS, "bytes") if key in args}
        numbers = [args.get("stream"), args.get("correlation")]
        if lenient:
            numbers = [n if type(n) is int else i for n, i in zip(numbers, (0, -1 - len(events.launched)))]
            args = {"stream": numbers[0], "correlation": numbers[1]}
        stream = _whole(path, args, "stream", name)
        work = Work(DEVICE[category], name[:_NAME_CHARACTERS], stream, start, end, wanted)
        events.launched[_whole(path, args, "correlation", name)].append(work)
    else:
        wanted = {key: args[key] for key in (*_COMMUNICATION_ARGS, "correlation") if key in args}
        events.calls.append(Call(name, str(event.get("tid")), start, end, wanted))


def _number(path: Path, event: dict[str, Any], key: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{path}: {key} of event {str(event.get('name'))[:60]!r} is {value!r}, not a time")
    return float(value)


def _whole(path: Path, args: dict[str, Any], key: str, name: str) -> int:
    value = args.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{path}: {key} of event {name[:60]!r} is {value!r}, not a number")
    return value


def measured_span(path: Path, events: Events) -> tuple[float, float, int]:
    """(begin, end, steps) of what is imported."""
    if len(events.profiler_steps) > 1:
        spans = sorted(events.profiler_steps)
        return spans[0][1], spans[-1][1], len(spans) - 1
    syncs = [call.end_us for call in events.calls if call.name == "cudaDeviceSynchronize"]
    ends: list[float] = []
    for done in sorted(events.optimizer_ends):
        after = next((end for end in syncs if end > done), None)
        if after is not None and after not in ends:
            ends.append(after)
    if not ends:
        raise UsageError(
            f"{path}: no step in it: neither ProfilerStep nor a device synchronisation behind Optimizer.step"
        )
    if len(ends) == 1:
        return events.calls[0].start_us, ends[0], 1
    return ends[0], ends[-1], len(ends) - 1
