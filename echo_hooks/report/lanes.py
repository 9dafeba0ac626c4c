"""The slices of one process of the trace: what the host thread and the streams of a class of ranks do, when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_hooks.compose.result import Timeline
from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.graph.program import HOST_STREAM, Evidence, Kind, Phase
from echo_hooks.report.activity import COMMUNICATION, COMPUTE
from echo_hooks.report.matching import own_group, own_peer

_THREADS_A_PROCESS = 10_000
# Plain numbers and names: looking up members of an enumeration a million times takes longer than all the rest.
_KINDS = [kind.name.lower().replace("_", " ") for kind in Kind]
_PHASES = [phase.name.lower() for phase in Phase]
_EVIDENCE = [evidence.name.lower() for evidence in Evidence]
_MOVES = frozenset(int(kind) for kind in COMMUNICATION)
_COPY, _MARK, _SYNC = int(Kind.COPY), int(Kind.MARK), int(Kind.SYNC)
_COLUMNS = (
    *("kind", "host_us", "stream", "evidence", "op", "group", "seq", "bytes", "dtype", "peer", "batch"),
    *("module", "phase", "microbatch", "site"),
)


@dataclass(frozen=True)
class Place:
    """Where a record is drawn."""

    pid: int
    tid: int
    begin_ns: int
    end_ns: int


class Lanes:
    """``threads``: name to tid. ``events``: slices, in order of time per thread. ``place_of``: of each record drawn.

    A wait of a communication for its last member lies inside the communication; no other slices overlap.
    ``shift_us`` is added to all times of the timeline.
    """

    def __init__(self, pid: int, timeline: Timeline, ops: list[OpSignature], groups: GroupTable, shift_us: float):
        self.pid = pid
        self.threads: dict[str, int] = {}
        self.events: list[dict] = []
        self.place_of: dict[int, Place] = {}
        self._ends: dict[int, int] = {}
        self._shift_us = shift_us
        self._timeline = timeline
        self._strings = timeline.program.strings
        self._columns = {name: timeline.program.columns[name].tolist() for name in _COLUMNS}
        times = ("issue_us", "start_us", "ready_us", "end_us", "slowdown")
        self._times = {name: getattr(timeline, name).tolist() for name in times}
        self._op_names = [op.name.removesuffix(".default") for op in ops]
        self._op_args = [_op_args(op) for op in ops]
        self._groups = groups
        self._mapped: dict[int, Group] = {}
        self._host()
        self._streams()

    # ---- threads ----

    def _host(self) -> None:
        """Host work before each record is issued, and blocking: a synchronisation lasts until the host goes on."""
        issued, host_us = self._times["issue_us"], self._columns["host_us"]
        threads = self._timeline.program.thread
        for thread in np.unique(threads).tolist():
            tid = self._thread("host" if thread == 0 else f"host thread {thread}")
            records = np.flatnonzero((threads == thread) & np.isfinite(self._timeline.issue_us)).tolist()
            for record, following in zip(records, [*records[1:], None]):
                issue, kind = issued[record], self._columns["kind"][record]
                name = self._name(record)
                self._slice(tid, name, "host", issue - host_us[record], issue, {})
                if kind == _MARK:
                    mark = {"ph": "i", "s": "p", "name": f"{name} {self._columns['seq'][record]}", "cat": "step"}
                    self.events.append({**mark, "ts": self._ns(issue) / 1e3, "pid": self.pid, "tid": tid})
                elif kind == _SYNC and following is not None:
                    end = issued[following] - host_us[following]
                    self._slice(tid, "wait for the device", "synchronize", issue, end, {})

    def _streams(self) -> None:
        timeline, program = self._timeline, self._timeline.program
        ran = np.isin(program.kind, (*COMPUTE, *COMMUNICATION))
        ran &= np.isfinite(timeline.start_us) & np.isfinite(timeline.end_us)
        for stream in np.unique(program.stream[ran]).tolist():
            label = f"stream {stream} {program.streams[stream]}" if stream != HOST_STREAM else "host communication"
            records = np.flatnonzero(ran & (program.stream == stream))
            records = records[np.argsort(timeline.start_us[records], kind="stable")]
            for calls in self._kernels(records.tolist()):
                self._kernel(label.strip(), calls)

    def _kernels(self, records: list[int]) -> Iterator[list[int]]:
        """Records of one stream, those that form one kernel (same batch and times) together."""
        batch, start, end = self._columns["batch"], self._times["start_us"], self._times["end_us"]
        group: list[int] = []
        for record in records:
            first = group[0] if group else record
            same = (batch[record], start[record], end[record]) == (batch[first], start[first], end[first])
            if group and not (same and batch[record] >= 0):
                yield group
                group = []
            group.append(record)
        if group:
            yield group

    def _kernel(self, label: str, calls: list[int]) -> None:
        first = calls[0]
        start, end, ready = (self._times[name][first] for name in ("start_us", "end_us", "ready_us"))
        kind = self._columns["kind"][first]
        tid = self._free_lane(label, self._ns(start))
        if kind in _MOVES:
            name, args = self._communication(calls)
            place = self._slice(tid, name, "communication", start, end, args)
            if place and math.isfinite(ready) and self._ns(ready) > place.begin_ns:
                end_ns = min(self._ns(ready), place.end_ns)
                self._append(tid, "waits for the last member", "waiting", place.begin_ns, end_ns, {})
        else:
            category = "copy" if kind == _COPY else "compute"
            place = self._slice(tid, self._name(first), category, start, end, self._compute(first))
        if place:
            self.place_of.update(dict.fromkeys(calls, place))

    # ---- slices ----

    def _slice(self, tid: int, name: str, cat: str, start_us: float, end_us: float, args: dict) -> Place | None:
        """A slice after all earlier ones of the thread; none when nothing of it is left."""
        begin = max(self._ns(start_us), self._ends.get(tid, 0))
        end = self._ns(end_us)
        if end <= begin and (cat in ("host", "synchronize") or end < begin):
            return None
        self._append(tid, name, cat, begin, end, args)
        self._ends[tid] = end
        return Place(self.pid, tid, begin, end)

    def _append(self, tid: int, name: str, cat: str, begin_ns: int, end_ns: int, args: dict) -> None:
        event: dict[str, Any] = {"ph": "X", "name": name, "cat": cat, "pid": self.pid, "tid": tid}
        event["ts"], event["dur"] = begin_ns / 1e3, (end_ns - begin_ns) / 1e3
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

    # ---- names and arguments ----

    def _name(self, record: int) -> str:
        op = self._columns["op"][record]
        return self._op_names[op] if op >= 0 else _KINDS[self._columns["kind"][record]]

    def _labels(self, record: int) -> dict[str, Any]:
        columns = self._columns
        args: dict[str, Any] = {"phase": _look_up(_PHASES, columns["phase"][record])}
        if columns["module"][record]:
            args["module"] = self._strings[columns["module"][record]]
        if columns["microbatch"][record] >= 0:
            args["microbatch"] = columns["microbatch"][record]
        slowdown = self._times["slowdown"][record]
        if slowdown != 1.0 and math.isfinite(slowdown):
            args["slowdown"] = round(slowdown, 4)
        return args

    def _compute(self, record: int) -> dict[str, Any]:
        columns = self._columns
        args = self._labels(record)
        args["evidence"] = _look_up(_EVIDENCE, columns["evidence"][record])
        if columns["op"][record] >= 0:
            args |= self._op_args[columns["op"][record]]
        if columns["bytes"][record]:
            args["bytes"] = columns["bytes"][record]
        return args

    def _communication(self, calls: list[int]) -> tuple[str, dict[str, Any]]:
        columns, first = self._columns, calls[0]
        name = " + ".join(dict.fromkeys(self._name(call) for call in calls))
        args = {"bytes": sum(columns["bytes"][call] for call in calls), "calls": len(calls), **self._labels(first)}
        index = columns["group"][first]
        if index >= 0:
            if index not in self._mapped:
                self._mapped[index] = own_group(self._groups, index, self._timeline.representative)
            mapped = self._mapped[index]
            name = f"{name} {mapped.name}"
            args |= {"group": mapped.name, "ranks": rank_ranges(mapped.ranks), "backend": mapped.backend}
            peers = [columns["peer"][call] for call in calls if columns["peer"][call] >= 0]
            if peers:
                args["peer"] = rank_ranges(own_peer(self._groups[index], peer, mapped) for peer in peers)
        if columns["seq"][first] >= 0:
            args["seq"] = columns["seq"][first]
        for key in ("dtype", "site"):
            if columns[key][first]:
                args[key] = self._strings[columns[key][first]]
        return name, args


def _op_args(op: OpSignature) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if op.inputs:
        args["inputs"] = " ".join(f"{meta.dtype}{list(meta.shape)}" for meta in op.inputs)
    if op.flops:
        args["flops"] = op.flops
    return args


def _look_up(names: list[str], index: int) -> str:
    return names[index] if index < len(names) else "unknown"
