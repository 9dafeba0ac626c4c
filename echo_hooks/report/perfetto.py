"""The timelines as Trace Event JSON, which https://ui.perfetto.dev and chrome://tracing open.

A process per class of ranks, a thread per host thread and per stream. Times are in microseconds with nanosecond digits
(the format's unit, whatever ``displayTimeUnit`` says). Slices of one thread never overlap, except that the wait of a
communication for its last member lies inside the communication: readers drop slices that cross.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.compose.result import Composition, Timeline
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.graph.program import HOST_STREAM, Evidence, Kind, Phase, Program
from echo_hooks.graph.rundir import RankTrace, Run, atomic_write
from echo_hooks.report.activity import COMMUNICATION, COMPUTE, operation_name
from echo_hooks.report.matching import agree, find_meetings, own_group, own_peer
from echo_hooks.report.quantities import ranks_text

MAX_RECORDS = 1_000_000
_THREADS_A_PROCESS = 10_000


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
        lanes.append(_Lanes(i + 1, timeline, trace.ops, run.groups, shift_us))
        yield from _names(i, timeline, i == composition.critical, lanes[-1])
        for event in lanes[-1].events:
            summary.slices += event["ph"] == "X"
            yield event
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


def _names(index: int, timeline: Timeline, critical: bool, lanes: _Lanes) -> Iterator[dict]:
    def meta(kind: str, tid: int, **args) -> dict:
        return {"ph": "M", "name": kind, "pid": index + 1, "tid": tid, "ts": 0, "args": args}

    title = _title(timeline) + (" (critical)" if critical else "")
    yield meta("process_name", 0, name=title)
    yield meta("process_sort_index", 0, sort_index=index)
    for order, (name, tid) in enumerate(lanes.threads.items()):
        yield meta("thread_name", tid, name=name)
        yield meta("thread_sort_index", tid, sort_index=order)


def _flow(members, lanes: dict[int, _Lanes], first_id: int) -> Iterator[list[dict]]:
    """Arrows from the member that arrives last, for which the others wait (from the sender, for send and recv)."""
    places = [place for i, record in members if (place := lanes[i].place_of.get(record))]
    if not places:
        return
    source, *targets = sorted(places, key=lambda place: -place.begin_ns)
    for target in targets:
        # One nanosecond apart: readers that sort by time must meet the start first.
        from_ns = source.begin_ns
        to_ns = max(from_ns + 1, target.begin_ns)
        if to_ns > target.end_ns:
            continue
        base = {"name": "releases", "cat": "communication", "id": first_id}
        first_id += 1
        yield [
            {"ph": "s", "ts": from_ns / 1e3, "pid": source.pid, "tid": source.tid, **base},
            {"ph": "f", "bp": "e", "ts": to_ns / 1e3, "pid": target.pid, "tid": target.tid, **base},
        ]


@dataclass(frozen=True)
class _Place:
    pid: int
    tid: int
    begin_ns: int
    end_ns: int


class _Lanes:
    """The threads of one process and their slices: ``events`` in order of time per thread, ``place_of`` each record."""

    def __init__(self, pid: int, timeline: Timeline, ops: list[OpSignature], groups: GroupTable, shift_us: float):
        self.pid = pid
        self.threads: dict[str, int] = {}
        self.events: list[dict] = []
        self.place_of: dict[int, _Place] = {}
        self._ends: dict[int, int] = {}
        self._shift_us = shift_us
        self._host(timeline, ops)
        self._streams(timeline, ops, groups)

    def _host(self, timeline: Timeline, ops: list[OpSignature]) -> None:
        """Host work before each record is issued, and blocking: a synchronisation lasts until the host goes on."""
        program = timeline.program
        for thread in np.unique(program.thread).tolist():
            tid = self._thread("host" if thread == 0 else f"host thread {thread}")
            records = np.flatnonzero((program.thread == thread) & np.isfinite(timeline.issue_us)).tolist()
            for record, following in zip(records, [*records[1:], None]):
                issue = timeline.issue_us[record]
                name = _host_name(timeline, record, ops)
                self._slice(tid, name, "host", issue - program.host_us[record], issue, {})
                kind = program.kind[record]
                if kind == Kind.MARK:
                    ts = self._ns(issue) / 1e3
                    mark = {"ph": "i", "s": "p", "name": f"{name} {program.seq[record]}", "cat": "step"}
                    self.events.append({**mark, "ts": ts, "pid": self.pid, "tid": tid})
                elif kind == Kind.SYNC and following is not None:
                    end = timeline.issue_us[following] - program.host_us[following]
                    self._slice(tid, "wait for the device", "synchronize", issue, end, {})

    def _streams(self, timeline: Timeline, ops: list[OpSignature], groups: GroupTable) -> None:
        program = timeline.program
        ran = np.isin(program.kind, (*COMPUTE, *COMMUNICATION))
        ran &= np.isfinite(timeline.start_us) & np.isfinite(timeline.end_us)
        for stream in np.unique(program.stream[ran]).tolist():
            name = "host communication" if stream == HOST_STREAM else _stream_name(program, stream)
            records = np.flatnonzero(ran & (program.stream == stream))
            records = records[np.argsort(timeline.start_us[records], kind="stable")]
            for calls in _kernels(timeline, records.tolist()):
                self._kernel(name, timeline, calls, ops, groups)

    def _kernel(self, name: str, timeline: Timeline, calls: list[int], ops, groups: GroupTable) -> None:
        first = calls[0]
        start, end = float(timeline.start_us[first]), float(timeline.end_us[first])
        tid = self._free_lane(name, self._ns(start))
        if timeline.program.kind[first] in COMMUNICATION:
            label, args = _describe_communication(timeline, calls, ops, groups)
            place = self._slice(tid, label, "communication", start, end, args)
            ready = float(timeline.ready_us[first])
            if math.isfinite(ready) and place and self._ns(ready) > place.begin_ns:
                end_ns = min(self._ns(ready), place.end_ns)
                self._append(tid, "waits for the last member", "waiting", place.begin_ns, end_ns, {})
        else:
            label, args = _describe_compute(timeline, first, ops)
            category = "copy" if timeline.program.kind[first] == Kind.COPY else "compute"
            place = self._slice(tid, label, category, start, end, args)
        if place:
            self.place_of.update(dict.fromkeys(calls, place))

    def _slice(self, tid: int, name: str, cat: str, start_us: float, end_us: float, args: dict) -> _Place | None:
        """A slice after all earlier ones of the thread; none when nothing of it is left."""
        begin = max(self._ns(start_us), self._ends.get(tid, 0))
        end = self._ns(end_us)
        if end <= begin and (cat in ("host", "synchronize") or end < begin):
            return None
        self._append(tid, name, cat, begin, end, args)
        self._ends[tid] = end
        return _Place(self.pid, tid, begin, end)

    def _append(self, tid: int, name: str, cat: str, begin_ns: int, end_ns: int, args: dict) -> None:
        event: dict[str, Any] = {"ph": "X", "name": name, "cat": cat, "pid": self.pid, "tid": tid}
        event |= {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        if args:
            event["args"] = args
        self.events.append(event)

    def _ns(self, time_us: float) -> int:
        return round((time_us + self._shift_us) * 1e3)

    def _thread(self, name: str) -> int:
        return self.threads.setdefault(name, self.pid * _THREADS_A_PROCESS + len(self.threads))

    def _free_lane(self, name: str, begin_ns: int) -> int:
        """The stream's thread, or a further one where it runs two things at once (one nanosecond is rounding)."""
        lane = 1
        while True:
            tid = self._thread(name if lane == 1 else f"{name} ({lane})")
            if self._ends.get(tid, 0) <= begin_ns + 1:
                return tid
            lane += 1


def _kernels(timeline: Timeline, records: list[int]) -> Iterator[list[int]]:
    """Records of one stream, those that form one kernel (same batch and times) together."""
    batch, start, end = timeline.program.batch, timeline.start_us, timeline.end_us
    group: list[int] = []
    for record in records:
        if group and not (
            batch[record] >= 0
            and batch[record] == batch[group[0]]
            and (start[record], end[record]) == (start[group[0]], end[group[0]])
        ):
            yield group
            group = []
        group.append(record)
    if group:
        yield group


# ---- names and arguments ----


def _stream_name(program: Program, stream: int) -> str:
    label = program.streams[stream] if stream < len(program.streams) else ""
    return f"stream {stream} {label}".strip()


def _host_name(timeline: Timeline, record: int, ops: list[OpSignature]) -> str:
    kind = Kind(int(timeline.program.kind[record]))
    if kind in (Kind.RECORD_EVENT, Kind.WAIT_EVENT, Kind.SYNC, Kind.HOST):
        return kind.name.lower().replace("_", " ")
    return _short(operation_name(timeline, record, ops))


def _short(op: str) -> str:
    return op.removesuffix(".default")


def _labels(timeline: Timeline, record: int) -> dict[str, Any]:
    program = timeline.program
    args: dict[str, Any] = {"phase": Phase(min(int(program.phase[record]), max(Phase))).name.lower()}
    if program.module[record]:
        args["module"] = program.strings[program.module[record]]
    if program.microbatch[record] >= 0:
        args["microbatch"] = int(program.microbatch[record])
    slowdown = float(timeline.slowdown[record])
    if math.isfinite(slowdown) and slowdown != 1.0:
        args["slowdown"] = round(slowdown, 4)
    return args


def _describe_compute(timeline: Timeline, record: int, ops: list[OpSignature]) -> tuple[str, dict[str, Any]]:
    program = timeline.program
    args = _labels(timeline, record)
    args["evidence"] = Evidence(min(int(program.evidence[record]), max(Evidence))).name.lower()
    op = int(program.op[record])
    if op >= 0:
        if ops[op].inputs:
            args["inputs"] = " ".join(f"{m.dtype}{list(m.shape)}" for m in ops[op].inputs)
        if ops[op].flops:
            args["flops"] = ops[op].flops
    if program.bytes[record]:
        args["bytes"] = int(program.bytes[record])
    return _short(operation_name(timeline, record, ops)), args


def _describe_communication(
    timeline: Timeline, calls: list[int], ops: list[OpSignature], groups: GroupTable
) -> tuple[str, dict[str, Any]]:
    program, first = timeline.program, calls[0]
    operations = " + ".join(dict.fromkeys(operation_name(timeline, call, ops) for call in calls))
    args = {"bytes": int(program.bytes[calls].sum()), "calls": len(calls), **_labels(timeline, first)}
    name = operations
    g = int(program.group[first])
    if g >= 0:
        mapped = own_group(groups, g, timeline.representative)
        name = f"{operations} {mapped.name}"
        args |= {"group": mapped.name, "ranks": rank_ranges(mapped.ranks), "backend": mapped.backend}
        peers = [own_peer(groups[g], int(program.peer[c]), mapped) for c in calls if program.peer[c] >= 0]
        if peers:
            args["peer"] = rank_ranges(peers)
    if program.seq[first] >= 0:
        args["seq"] = int(program.seq[first])
    for key, column in (("dtype", program.dtype), ("site", program.site)):
        if column[first]:
            args[key] = program.strings[column[first]]
    return name, args


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
