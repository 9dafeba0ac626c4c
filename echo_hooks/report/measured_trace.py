"""Where the time of measured steps went, from profiler traces of one or more ranks, in the report's own categories.

Traces are taken as they come: what is missing or damaged is left out and said. Time is counted as the composer counts
it (compose.breakdown), so that both sides of a comparison mean the same.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from echo_hooks.compose.breakdown import breakdown
from echo_hooks.compose.result import Breakdown
from echo_hooks.errors import UsageError
from echo_hooks.graph.chrome_trace import Repairs
from echo_hooks.graph.kineto import COLLECTIVES
from echo_hooks.graph.kineto_events import Events, Work, measured_span, read_events
from echo_hooks.graph.program import Kind
from echo_hooks.report import op_names
from echo_hooks.report.activity import length, union

GroupNames = Callable[[str, tuple[int, ...]], str]
"""(what the trace calls a group, its ranks or ()) -> what the report calls it."""

SEND_RECV = "send/recv"
SAME_END_US = 100.0
"""Two ends of one send and recv are over within this; traces whose clocks differ by more show no pair."""


@dataclass(frozen=True)
class CallTimes:
    """The calls of one kind in one step: ``time_ms`` data moves, ``waiting_ms`` before it, for the others."""

    calls: float
    time_ms: float
    waiting_ms: float


@dataclass(frozen=True)
class MeasuredSteps:
    """One rank. ``classes``: kernel time in ms by class. ``communication``: by (group, operation). ``split``: False
    where waiting could not be told from moving, for want of the other ranks' traces."""

    rank: int
    step_ms: float
    steps: int
    parts: Breakdown
    classes: dict[str, float]
    communication: dict[tuple[str, str], CallTimes]
    split: bool


@dataclass
class _Rank:
    rank: int
    path: Path
    works: list[Work]
    begin: float
    end: float
    steps: int
    sends_in: str  # the group of all sends and receives of the trace, "" where there are several
    calls: list[_Call] = field(default_factory=list)


@dataclass
class _Call:
    """A communication kernel. ``moving_us``: without the wait for others; None while not known."""

    work: Work
    operation: str
    group: str
    ranks: tuple[int, ...]
    moving_us: float | None = None

    @property
    def duration_us(self) -> float:
        return self.work.end_us - self.work.start_us


def read_traces(paths: list[Path], name_of: GroupNames) -> tuple[list[MeasuredSteps], float, list[str]]:
    """(ranks in order, step of the job in ms, sentences about what had to be left out or assumed).

    Raises UsageError when not one of the files is a trace with device activity.
    """
    told: list[str] = []
    ranks: dict[int, _Rank] = {}
    failures = []
    for place, path in enumerate(paths):
        try:
            found = _read(path, place, len(paths), name_of, told)
        except UsageError as error:
            failures.append(str(error))
            continue
        if found.rank in ranks:
            told.append(f"{path}: rank {found.rank} again, as in {ranks[found.rank].path}; left out")
        else:
            ranks[found.rank] = found
    if not ranks:
        raise UsageError(failures[0] if failures else "no trace was given")
    told += [f"left out: {failure}" for failure in failures]
    ordered = [ranks[rank] for rank in sorted(ranks)]
    _match(ordered)
    measured = [_steps(rank) for rank in ordered]
    if not all(m.split for m in measured):
        told.append("waiting for other ranks counts as communication where their traces are missing")
    return measured, _job_step_ms(ordered), told


def _read(path: Path, place: int, of: int, name_of: GroupNames, told: list[str]) -> _Rank:
    repairs = Repairs()
    try:
        events = read_events(path, repairs)
    finally:
        told += repairs.told(path)
    rank = _rank_of(path, repairs.header)
    if rank is None:
        rank = place
        told.append(f"{path}: names no rank; taken for rank {rank}" + (" by its place in the list" if of > 1 else ""))
    try:
        begin, end, steps = measured_span(path, events)
    except UsageError:
        works = [work for launched in events.launched.values() for work in launched]
        begin, end, steps = min(w.start_us for w in works), max(w.end_us for w in works), 1
        told.append(f"{path}: no mark of a step in it; all of it is taken for one step")
    works = [w for launched in events.launched.values() for w in launched if w.end_us > begin and w.start_us < end]
    works.sort(key=lambda w: w.start_us)
    found = _Rank(rank, path, works, begin, end, steps, _sends_in(events, name_of))
    found.calls = [_call(work, found.sends_in, name_of) for work in works if _is_communication(work)]
    return found


def _rank_of(path: Path, header: str) -> int | None:
    """From the trace's own header, else from the file's name."""
    inside = re.search(r'"distributedInfo".{0,200}?"rank"\s*:\s*(\d{1,9})', header, re.DOTALL)
    named = re.search(r"rank[-_.]?(\d{1,9})", path.name)
    found = inside or named
    return int(found[1]) if found else None


# ---- communication ----

_COMMUNICATION = re.compile(r"^(void )?(nccl|rccl|mscclKernel)", re.IGNORECASE)
_BY_KERNEL = (
    ("AllReduce", "all_reduce"),
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("SendRecv", SEND_RECV),
    ("AllToAll", "all_to_all"),
    ("Broadcast", "broadcast"),
    ("Reduce", "reduce"),
)


def _is_communication(work: Work) -> bool:
    return work.kind == Kind.COMPUTE and bool(_COMMUNICATION.match(work.name))


def _call(work: Work, sends_in: str, name_of: GroupNames) -> _Call:
    described = COLLECTIVES.get(str(work.args.get("Collective name", "")))
    operation = described or next((op for text, op in _BY_KERNEL if text in work.name), "other communication")
    group, ranks = _group(work.args, name_of)
    if operation == SEND_RECV and not group:
        group = sends_in
    return _Call(work, operation, group, ranks)


def _group(args: Mapping[str, object], name_of: GroupNames) -> tuple[str, tuple[int, ...]]:
    label = args.get("Process Group Description") or args.get("Process Group Name")
    if label is None:
        return "", ()
    try:
        ranks = tuple(int(r) for r in json.loads(str(args.get("Process Group Ranks", ""))))
    except (ValueError, TypeError, RecursionError):  # cut short by the profiler, or absent
        ranks = ()
    return name_of(str(label), ranks), ranks


def _sends_in(events: Events, name_of: GroupNames) -> str:
    names = {
        _group(call.args, name_of)[0]
        for call in events.calls
        if str(call.args.get("Collective name", "")).startswith(("send", "recv"))
    }
    return names.pop() if len(names) == 1 else ""


def _match(ranks: list[_Rank]) -> None:
    """Take the wait for others out: the one who came last moved data all the time."""
    collectives: dict[tuple, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    for r in ranks:
        for call in r.calls:
            if call.operation != SEND_RECV:
                collectives[call.operation, call.group, call.ranks][r.rank].append(call)
    present = {r.rank for r in ranks}
    for (_, _, members), by_rank in collectives.items():
        rows = list(by_rank.values())
        whole = set(members) == set(by_rank) if members else len(rows) == len(present)
        if len({len(row) for row in rows}) == 1 and whole:
            for calls in zip(*rows):
                least = min(call.duration_us for call in calls)
                for call in calls:
                    call.moving_us = least
    for r in ranks:
        others = [call for o in ranks if o is not r for call in o.calls if call.operation == SEND_RECV]
        others.sort(key=lambda call: call.work.end_us)
        ends = np.array([call.work.end_us for call in others])
        for call in r.calls:
            if call.operation == SEND_RECV and len(others):
                other = others[int(np.argmin(np.abs(ends - call.work.end_us)))]
                if abs(other.work.end_us - call.work.end_us) <= SAME_END_US:
                    call.moving_us = min(call.duration_us, other.duration_us)


# ---- one rank ----

MATRIX, ATTENTION, OTHER, COPIES = "matrix products", "attention", "other kernels", "copies"
_CLASSES = {op_names.MATRIX: MATRIX, op_names.ATTENTION: ATTENTION}


def kernel_class(name: str) -> str:
    """Class of a kernel by its name, as far as a comparison tells them apart."""
    return _CLASSES.get(op_names.op_class(name), OTHER)


def _steps(r: _Rank) -> MeasuredSteps:
    classes: dict[str, float] = defaultdict(float)
    for work in r.works:
        if not _is_communication(work):
            copies = work.kind == Kind.COPY and op_names.crosses(work.name)
            label = COPIES if copies else kernel_class(work.name)
            inside = min(work.end_us, r.end) - max(work.start_us, r.begin)
            classes[label] += inside / 1e3 / r.steps
    rows: dict[tuple[str, str], list[_Call]] = defaultdict(list)
    for call in r.calls:
        rows[call.group, call.operation].append(call)
    communication = {key: _times(calls, r) for key, calls in rows.items()}
    alone = all(len(call.ranks) == 1 for call in r.calls)
    split = alone or all(call.moving_us is not None for call in r.calls)
    step_ms = (r.end - r.begin) / 1e3 / r.steps
    return MeasuredSteps(r.rank, step_ms, r.steps, _breakdown(r), dict(classes), communication, split)


def _ready_us(call: _Call) -> float:
    return call.work.start_us if call.moving_us is None else call.work.end_us - call.moving_us


def _times(calls: list[_Call], r: _Rank) -> CallTimes:
    start, end = (
        np.array([getattr(c.work, name) for c in calls]).clip(r.begin, r.end) for name in ("start_us", "end_us")
    )
    ready = np.array([_ready_us(c) for c in calls]).clip(start, end)
    return CallTimes(
        calls=len(calls) / r.steps,
        time_ms=length(union(ready, end)) / 1e3 / r.steps,
        waiting_ms=length(union(start, ready)) / 1e3 / r.steps,
    )


def _breakdown(r: _Rank) -> Breakdown:
    by_work = {id(call.work): call for call in r.calls}
    names = sorted({call.group for call in r.calls})
    kind, name_of, ready = [], [], []
    for work in r.works:
        call = by_work.get(id(work))
        if call is None:
            kind.append(int(work.kind))
            name_of.append(-1)
            ready.append(work.start_us)
        else:
            kind.append(int(Kind.SEND if call.operation == SEND_RECV else Kind.COLLECTIVE))
            name_of.append(names.index(call.group))
            ready.append(_ready_us(call))
    start = np.array([w.start_us for w in r.works]).clip(r.begin, r.end)
    end = np.array([w.end_us for w in r.works]).clip(r.begin, r.end)
    return breakdown(
        np.array(kind, np.int64),
        np.array(name_of, np.int64),
        names,
        start,
        np.array(ready).clip(start, end),
        end,
        r.end,
        r.end - r.begin,
        r.steps,
    )


def _job_step_ms(ranks: list[_Rank]) -> float:
    """From the last rank's end of the step before to the last rank's end: on one clock; else the mean over ranks."""
    steps = {r.steps for r in ranks}
    longest = max((r.end - r.begin) / r.steps for r in ranks)
    begins, ends = [r.begin for r in ranks], [r.end for r in ranks]
    if len(steps) == 1 and max(begins) - min(begins) < longest and max(ends) - min(ends) < longest:
        return (max(ends) - max(begins)) / 1e3 / steps.pop()
    return float(np.mean([(r.end - r.begin) / r.steps for r in ranks])) / 1e3
