"""One step's program from what the profiler saw of several, and from how long the host took without it."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from echo_hooks.graph import live
from echo_hooks.graph.kineto_events import Call, Events, Work
from echo_hooks.graph.kineto_program import Assembler
from echo_hooks.graph.live import LiveRecorder, Span
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import COLUMNS, Kind, Phase

BLOCKED = 20.0
"""A launch that takes so many times the median of its kind has waited for room in the device's queue."""

DISTURBED = 1.1
"""Host time of a step over that of the fastest from which the step is taken for disturbed."""

NO_WAIT_US = 30.0
"""An event synchronisation that returns within this has not waited: the call takes 1 to 5 us, the first of some 15."""
WAITING = 0.02
"""Share of a stretch of host time from which what the host waited for the device is too much to compare by it."""
LEAST_FREE = 0.1
"""Share of a step's host time that stretches without waiting must make up for the others to be judged by them."""

_COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)


@dataclass(frozen=True)
class Boundary:
    """The end of a step: how many spans and rows there were, and when."""

    span: int
    row: int
    at_ns: int


@dataclass
class MeasuredStep:
    """``rows``: the step between its marks. ``first_row``: where the step that they are the median of began in the
    recorder's program. ``spread``: (max - min) / median of the timed steps' wall times. ``profiled_ms``: mean wall time
    of the captured ones."""

    rows: list[tuple[Kind, dict[str, Any]]]
    first_row: int
    wall_ms: float
    spread: float
    profiled_ms: float
    notes: list[str] = field(default_factory=list)

    def append_to(self, recorder: LiveRecorder) -> None:
        """Add the rows behind all that the recorder holds."""
        for kind, values in self.rows:
            recorder.program.append(kind, **values)


class StepReader:
    """Reads steps of one rank. ``base_ns``: what the events' times are counted from. ``overhead_us``: of Echo's own
    around a span, where no clock of ours stands."""

    def __init__(
        self,
        recorder: LiveRecorder,
        events: Events,
        probes: list[tuple[int, int, int]],
        boundaries: list[Boundary],
        base_ns: int,
        overhead_us: float = 0.0,
    ):
        self.recorder = recorder
        self.base_ns = base_ns
        self.overhead_us = overhead_us
        self.boundaries = boundaries
        self.calls = events.calls
        self.call_starts = [call.start_us for call in events.calls]
        self.launched = events.launched
        self.streams = self._streams(events, probes)
        self.table = recorder.program.program()

    def read(self, timed: range, captured: range) -> MeasuredStep:
        """``timed``: steps without the profiler; ``captured``: those under it. Step i ends at boundary i; a captured
        one is named by the boundary at which it begins."""
        walls = [self._wall_ms(i) for i in timed]
        wall = statistics.median(walls)
        spread = (max(walls) - min(walls)) / wall if wall else 0.0
        scales = _Scales([self._segments(self.boundaries[i - 1], self.boundaries[i]) for i in timed])
        steps = [self._step(self.boundaries[i], self.boundaries[i + 1], scales) for i in captured]
        rows, notes = _median(steps)
        notes.insert(0, f"rank {self.recorder.rank}: its own steps took {wall:.1f} ms here, spread {spread:.0%}")
        begin = (Kind.MARK, {"op": self.recorder.ops.add(OpSignature("step_begin")), "seq": 0})
        end = (Kind.MARK, {"op": self.recorder.ops.add(OpSignature("step_end")), "seq": 0})
        first = self.boundaries[captured[-1]].row
        last = captured[-1] + 1
        profiled = (self.boundaries[last].at_ns - self.boundaries[captured[0]].at_ns) / 1e6 / len(captured)
        return MeasuredStep([begin, *rows, end], first, wall, spread, profiled, notes)

    def _wall_ms(self, i: int) -> float:
        return (self.boundaries[i].at_ns - self.boundaries[i - 1].at_ns) / 1e6

    def _spans(self, begin: Boundary, end: Boundary) -> list[Span]:
        return self.recorder.spans[begin.span : end.span]

    def _segments(self, begin: Boundary, end: Boundary) -> list[tuple[str, float]]:
        """(what it follows, host microseconds) between Echo's spans of one step."""
        at, tag = begin.at_ns, ""
        segments = []
        for span in self._spans(begin, end):
            segments.append((tag, max(0.0, (span.begin_ns - at) / 1e3 - self.overhead_us)))
            at, tag = span.end_ns, span.tag
        segments.append((tag, max(0.0, (end.at_ns - at) / 1e3)))
        return segments

    def _waits_us(self, begin: Boundary, end: Boundary, calls: list[Call]) -> list[float]:
        """How long the host waited for the device in each stretch between Echo's spans."""
        usual = _usual(calls)
        edges = [self.us(begin.at_ns), *(self.us(span.end_ns) for span in self._spans(begin, end))]
        waits = [0.0] * len(edges)
        for call in calls:
            took = call.end_us - call.start_us
            works = self.launched.get(call.args["correlation"], ())
            if (
                "Synchronize" in call.name
                or (works and Assembler.copies_for_the_host(call, works[-1]))
                or (works and took > BLOCKED * usual[call.name])
            ):
                waits[bisect_right(edges, call.start_us) - 1] += took
        return waits

    def us(self, ns: int) -> float:
        """A time of time.time_ns() on the events' clock."""
        return (ns - self.base_ns) / 1e3

    def _streams(self, events: Events, probes: list[tuple[int, int, int]]) -> dict[int, int]:
        """The profiler's stream numbers to the program's: known from the probes, else a new one each."""
        found: dict[int, int] = {}
        for begin_ns, end_ns, number in probes:
            for call in events.calls:
                if self.us(begin_ns) - 1 <= call.start_us <= self.us(end_ns) + 1:
                    for work in events.launched.get(call.args["correlation"], ()):
                        found.setdefault(work.stream, number)
        for works in events.launched.values():
            for work in works:
                if work.stream not in found:
                    found[work.stream] = self.recorder.program.new_stream(f"device stream {work.stream}")
        return found

    def _step(self, begin: Boundary, end: Boundary, scales: _Scales) -> list[tuple[Kind, dict[str, Any]]]:
        spans = self._spans(begin, end)
        begin_us, end_us = self.us(begin.at_ns), self.us(end.at_ns)
        first, last = bisect_right(self.call_starts, begin_us), bisect_right(self.call_starts, end_us)
        segments = self._segments(begin, end)
        factors = scales.factors(segments, self._waits_us(begin, end, self.calls[first:last]))
        assembler = _Live(self, spans, factors)
        assembler.precede(self.calls[:first])
        return assembler.step(begin_us, end_us, self.calls[first:last])


class _Scales:
    """How much of the profiled host time is the script's own: from the same stretches without the profiler.

    Steps that something else on the machine disturbed are left out: those that took the host more than DISTURBED times
    what the fastest took.
    """

    def __init__(self, timed: list[list[tuple[str, float]]]):
        alike = [step for step in timed if [tag for tag, _ in step] == [tag for tag, _ in timed[-1]]]
        took = [sum(us for tag, us in step if tag != live.SYNC) for step in alike]
        kept = [step for step, us in zip(alike, took) if us <= DISTURBED * min(took)]
        self.tags = [tag for tag, _ in timed[-1]]
        self.true = [statistics.median(column) for column in zip(*[[us for _, us in step] for step in kept])]

    def factors(self, profiled: list[tuple[str, float]], waits_us: list[float]) -> list[float]:
        """One per stretch. ``waits_us``: what the host waited for the device there, under the profiler.

        Without the profiler nobody knows what of a stretch was waiting: those with more than WAITING of it get the
        ratio of the others, as all do where the steps do not match.
        """
        free = [
            i
            for i, ((tag, us), wait) in enumerate(zip(profiled, waits_us))
            if tag != live.SYNC and wait <= WAITING * us
        ]
        matching = [tag for tag, _ in profiled] == self.tags
        if not matching or sum(profiled[i][1] for i in free) < LEAST_FREE * sum(us for _, us in profiled):
            free = [i for i, (tag, _) in enumerate(profiled) if tag != live.SYNC]
        total = sum(profiled[i][1] for i in free)
        places = free if matching else [i for i, tag in enumerate(self.tags) if tag != live.SYNC]
        overall = min(1.0, sum(self.true[i] for i in places) / total) if total else 1.0
        factors = [overall] * len(profiled)
        for i in free if matching else ():
            if profiled[i][1] > 0:
                factors[i] = min(1.0, self.true[i] / profiled[i][1])
        return factors


class _Live(Assembler):
    """One captured step."""

    def __init__(self, reader: StepReader, spans: list[Span], factors: list[float]):
        recorder = reader.recorder
        super().__init__(recorder.ops, reader.streams, recorder._next_event)
        self.reader = reader
        self.spans = spans
        self.factors = factors
        self.factor = factors[0] if factors else 1.0
        self.phase = Phase.FORWARD
        self._pending_us = 0.0  # host time that no record has taken yet
        self._override = -1
        self._backwards = 0
        self._sync_event = -1

    def host_us(self, measured_us: float) -> float:
        pending, self._pending_us = self._pending_us, 0.0
        return pending + measured_us * self.factor

    def _advance(self, to_us: float) -> None:
        """Host time up to ``to_us``, for the next record."""
        self._pending_us += max(0.0, to_us - self.clock) * self.factor
        self.clock = max(self.clock, to_us)

    def row(self, kind: Kind, at_us: float, **values: Any) -> int:
        return super().row(kind, at_us, **{"phase": self.phase, **values})

    def precede(self, calls: list[Call]) -> None:
        """What was launched before the step may still run in it: waits for the device wait for that too."""
        last: dict[int, Work] = {}
        for call in calls:
            for work in self.reader.launched.get(call.args["correlation"], ()):
                last[self.streams[work.stream]] = work
        for stream, work in last.items():
            self.issued[stream].append(replace(work, record=-1))

    def step(self, begin: float, end: float, calls: list[Call]) -> list[tuple[Kind, dict[str, Any]]]:
        self.clock = begin
        usual = _usual(calls)
        at = 0
        waiting: set[str] = set()
        last_stream: dict[str, int] = {}
        for i, span in enumerate(self.spans):
            span_begin, span_end = self.reader.us(span.begin_ns), self.reader.us(span.end_ns)
            while at < len(calls) and calls[at].start_us < span_begin:
                self._call(calls[at], usual, waiting, last_stream)
                at += 1
            while at < len(calls) and calls[at].start_us < span_end:
                self._own(calls[at])  # whatever thread: one works at a time
                at += 1
            self._advance(span_begin)
            self._enter(span, span_begin, waiting)
            self.clock = max(self.clock, span_end)
            self.factor = self.factors[i + 1] if i + 1 < len(self.factors) else 1.0
            if span.tag == live.SYNC:
                self.factor = 1.0
        for call in calls[at:]:
            self._call(call, usual, waiting, last_stream)
        self.row(Kind.HOST, end)
        return self.with_events()

    def _call(self, call: Call, usual: dict[str, float], waiting: set[str], last_stream: dict[str, int]) -> None:
        works = self.reader.launched.get(call.args["correlation"], ())
        took = call.end_us - call.start_us
        if works:
            if took > BLOCKED * usual.get(call.name, took):  # it has waited for room in the queue
                self.clock = max(self.clock, call.end_us - usual[call.name])
            for work in works:
                self._launch(call, work, call.thread in waiting)
                waiting.discard(call.thread)
            last_stream[call.thread] = self._placed(works[-1])
            if self.copies_for_the_host(call, works[-1]):
                stream = last_stream[call.thread]
                self.sync(call, self.clock, [stream], stream=stream)
        elif call.name == "cudaStreamWaitEvent":
            waiting.add(call.thread)
        elif call.name == "cudaDeviceSynchronize":
            self.sync(call, call.start_us, list(self.issued))
        elif call.name == "cudaEventSynchronize":
            self._synchronize_event(call)
        elif call.name == "cudaStreamSynchronize":
            stream = last_stream.get(call.thread, 0)
            self.sync(call, call.start_us, [stream], stream=stream)

    def _placed(self, work: Work) -> int:
        return self.streams[work.stream] if self._override < 0 else self._override

    def _launch(self, call: Call, work: Work, waits: bool) -> None:
        stream, at, values = self.timed(call, work, waits)
        real, values["stream"] = stream, self._placed(work)
        self.local(work, at, values)
        work.record = len(self.rows) - 1
        self.issued[real].append(work)

    def _own(self, call: Call) -> None:
        """A call of Echo's own (filling what a collective leaves): its works are no part of the program."""
        for work in self.reader.launched.get(call.args["correlation"], ()):
            work.record = -1
            self.issued[self.streams[work.stream]].append(work)

    def _synchronize_event(self, call: Call) -> None:
        if self._sync_event < 0:
            if call.end_us - call.start_us > NO_WAIT_US:  # else the event, whichever it was, had completed before
                self.sync_with_event(call)
            return
        self.row(Kind.SYNC, call.start_us, event=self._sync_event)
        ends = [issued[-1].end_us for issued in self.issued.values() if issued]
        self.clock = max(self.clock, min(max(ends, default=call.start_us), call.end_us))

    def _enter(self, span: Span, at_us: float, waiting: set[str]) -> None:
        """What Echo's code recorded, and what begins or ends here."""
        table = self.reader.table
        for record in range(span.first, span.last):
            kind = Kind(int(table.kind[record]))
            if kind == Kind.WAIT_EVENT:
                waiting.clear()  # this is the wait that the call before asked for
            values = {name: table.columns[name][record].item() for name in COLUMNS if name != "kind"}
            del values["host_us"], values["thread"], values["phase"]
            self.row(kind, at_us, **values)
        if span.tag == live.BACKWARD:
            self._backwards += 1
        elif span.tag == live.BACKWARD_END:
            self._backwards = max(0, self._backwards - 1)
        if span.tag == live.OPTIMIZER:
            self.phase = Phase.OPTIMIZER
        elif span.tag == live.ON_STREAM:
            self._override = span.number
        elif span.tag in (live.BACKWARD, live.BACKWARD_END, live.OPTIMIZER_END):
            self.phase = Phase.BACKWARD if self._backwards else Phase.FORWARD
        self._sync_event = span.number if span.tag == live.SYNC else -1


def _usual(calls: list[Call]) -> dict[str, float]:
    """Median duration by name."""
    took: dict[str, list[float]] = {}
    for call in calls:
        took.setdefault(call.name, []).append(call.end_us - call.start_us)
    return {name: statistics.median(values) for name, values in took.items()}


def _median(steps: list[list[tuple[Kind, dict[str, Any]]]]) -> tuple[list[tuple[Kind, dict[str, Any]]], list[str]]:
    """The last step's rows with the median host time and duration of those that did the same, and what to note."""
    last = steps[-1]
    key = [_what(row) for row in last]
    equal = [step for step in steps if [_what(row) for row in step] == key]
    notes = []
    if len(equal) < len(steps):
        talk = [[_what(row) for row in step if row[0] in _COMMUNICATION] for step in steps]
        what = "communication" if any(t != talk[-1] for t in talk) else "kernels"
        notes.append(
            f"the {what} of the captured steps still changed from step to step: only the last "
            f"{'one counts' if len(equal) == 1 else f'{len(equal)} equal ones count'} (more --warmup-steps may help)"
        )
    if len(equal) == 1:
        return last, notes
    rows = []
    for same in zip(*equal):
        kind, values = same[-1]
        values = {**values, "host_us": statistics.median(row[1].get("host_us", 0.0) for row in same)}
        if "duration_us" in values and values["duration_us"] == values["duration_us"]:
            values["duration_us"] = statistics.median(row[1]["duration_us"] for row in same)
        rows.append((kind, values))
    return rows, notes


def _what(row: tuple[Kind, dict[str, Any]]) -> tuple:
    kind, values = row
    return (kind, *(values.get(name, -1) for name in ("op", "stream", "group", "bytes", "peer", "phase")))


def counted(rows: list[tuple[Kind, dict[str, Any]]]) -> Counter:
    """Records by kind."""
    return Counter(kind for kind, _ in rows)
