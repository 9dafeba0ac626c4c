"""The timelines as Trace Event JSON, which https://ui.perfetto.dev and chrome://tracing open.

A process per class of ranks, a thread per host thread and per stream. Times are in microseconds with nanosecond digits
(the format's unit, whatever ``displayTimeUnit`` says). Slices of one thread never overlap, except that the wait of a
communication for its last member lies inside the communication: readers drop slices that cross.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.compose.result import Composition, Timeline
from echo_hooks.errors import UsageError
from echo_hooks.graph.files import atomic_write
from echo_hooks.graph.rundir import RankTrace, Run
from echo_hooks.report.lanes import Lanes
from echo_hooks.report.matching import agree, find_meetings
from echo_hooks.report.quantities import ranks_text

MAX_RECORDS = 400_000


@dataclass
class PerfettoSummary:
    """What was written: numbers of slices and flow arrows, and the classes left out to keep the file readable."""

    slices: int = 0
    flows: int = 0
    left_out: list[str] = field(default_factory=list)


def write_perfetto(
    path: Path, run: Run, composition: Composition, *, max_records: int = MAX_RECORDS
) -> PerfettoSummary:
    """Write ``path`` (gzip when it ends in .gz), whole and then renamed; the same input gives the same bytes.

    Timelines are taken until they have ``max_records`` records in all: the critical one first, then one per role, then
    the rest. Raises UsageError when there are no timelines (a hang), OSError when the file cannot be written.
    """
    if not composition.timelines:
        raise UsageError("there is no timeline to write: the plan does not get through a step")
    summary = PerfettoSummary()
    chosen = _choose(composition, max_records)
    summary.left_out = [_title(t) for i, t in enumerate(composition.timelines) if i not in chosen]
    buffer = io.BytesIO()
    with _compressor(path, buffer) as out:
        out.write(b'{"displayTimeUnit":"ms","otherData":')
        out.write(_json({"producer": "Echo (simulated)", "left_out": summary.left_out}))
        out.write(b',"traceEvents":[')
        separator = b"\n"
        for event in _events(run, composition, chosen, summary):
            out.write(separator + _json(event))
            separator = b",\n"
        out.write(b"\n]}\n")
    atomic_write(path, buffer.getvalue())
    return summary


def _compressor(path: Path, buffer: io.BytesIO):
    if path.suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=buffer, mtime=0)
    return nullcontext(buffer)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _choose(composition: Composition, max_records: int) -> list[int]:
    timelines = composition.timelines
    order = [composition.critical]
    first_of_role = {t.role: i for i, t in reversed(list(enumerate(timelines)))}
    order += [*sorted(first_of_role.values()), *range(len(timelines))]
    chosen: list[int] = []
    records = 0
    for i in dict.fromkeys(order):
        records += len(timelines[i].program)
        if chosen and records > max_records:
            break
        chosen.append(i)
    return sorted(chosen)


def _title(timeline: Timeline) -> str:
    return f"{ranks_text(timeline.ranks)}: {timeline.role}"


# ---- events ----


def _events(run: Run, composition: Composition, chosen: list[int], summary: PerfettoSummary) -> Iterator[dict]:
    meetings = find_meetings(composition.timelines, run.groups)
    origin_us = min(timeline.offset_us + _earliest(timeline) for timeline in composition.timelines)
    traced = {role.name: role.traced_rank for role in run.roles}
    lanes = []
    for i in chosen:
        timeline = composition.timelines[i]
        trace = run.traces[traced[timeline.role]]
        shift_us = timeline.offset_us - origin_us
        lanes.append(Lanes(i + 1, timeline, trace.ops, run.groups, shift_us))
        yield from _names(i, timeline, i == composition.critical, lanes[-1])
        for event in lanes[-1].events:
            summary.slices += event["ph"] == "X"
            yield event
        lanes[-1].events.clear()  # a big trace would not fit in memory twice
        yield from _memory_counter(i + 1, timeline, trace, shift_us)
    by_index = dict(zip(chosen, lanes))
    for meeting in meetings:
        if all(i in by_index for i, _ in meeting.members) and agree(composition.timelines, meeting):
            for pair in _flow(meeting.members, by_index, first_id=summary.flows + 1):
                summary.flows += 1
                yield from pair


def _earliest(timeline: Timeline) -> float:
    times = np.concatenate([timeline.issue_us - timeline.program.host_us, timeline.start_us])
    return float(np.nanmin(times, initial=0.0))


def _names(index: int, timeline: Timeline, critical: bool, lanes: Lanes) -> Iterator[dict]:
    def meta(kind: str, tid: int, **args) -> dict:
        return {"ph": "M", "name": kind, "pid": index + 1, "tid": tid, "ts": 0, "args": args}

    title = _title(timeline) + (" (critical)" if critical else "")
    yield meta("process_name", 0, name=title)
    yield meta("process_sort_index", 0, sort_index=index)
    for order, (name, tid) in enumerate(lanes.threads.items()):
        yield meta("thread_name", tid, name=name)
        yield meta("thread_sort_index", tid, sort_index=order)


def _flow(members, lanes: dict[int, Lanes], first_id: int) -> Iterator[list[dict]]:
    """Arrows from the member that arrives last, for which the others wait."""
    places = [place for i, record in members if (place := lanes[i].place_of.get(record))]
    if not places:
        return
    source, *targets = sorted(places, key=lambda place: -place.begin_ns)
    for target in targets:
        # One nanosecond apart: readers that sort by time must meet the start first.
        to_ns = max(source.begin_ns + 1, target.begin_ns)
        if to_ns > target.end_ns:
            continue
        base = {"name": "releases", "cat": "communication", "id": first_id}
        first_id += 1
        yield [
            {"ph": "s", "ts": source.begin_ns / 1e3, "pid": source.pid, "tid": source.tid, **base},
            {"ph": "f", "bp": "e", "ts": to_ns / 1e3, "pid": target.pid, "tid": target.tid, **base},
        ]


# ---- memory ----


def _memory_counter(pid: int, timeline: Timeline, trace: RankTrace, shift_us: float) -> Iterator[dict]:
    """Bytes that tensors hold, at the host's time: the allocator works when the host asks."""
    records = trace.memory_events["record"]
    issue_us = timeline.issue_us
    known = np.flatnonzero(np.isfinite(issue_us))
    if not len(records) or not len(known):
        return
    order = np.argsort(records, kind="stable")
    held = np.cumsum(trace.memory_events["bytes"][order])
    # An event happens once its record's predecessors are issued: at the last known issue time among them.
    place = np.clip(np.searchsorted(known, records[order] - 1, side="right") - 1, 0, None)
    times_ns = np.rint((issue_us[known[place]] + shift_us) * 1e3).astype(np.int64)
    last_of_instant = np.flatnonzero(np.append(times_ns[1:] != times_ns[:-1], True))
    for i in last_of_instant.tolist():
        yield {
            "ph": "C",
            "name": "allocated memory",
            "pid": pid,
            "ts": int(times_ns[i]) / 1e3,
            "args": {"bytes": int(held[i])},
        }
