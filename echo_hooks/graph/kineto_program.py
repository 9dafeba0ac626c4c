"""Records from what a profiler saw: launches with their works, waits, host syncs, on one measured host clock.

The common part of an imported trace file (`graph.kineto`) and of a live capture (`capture.measured_steps`).
"""

from __future__ import annotations

from typing import Any

from echo_hooks.graph.kineto_events import Call, Work
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import Evidence, Kind

MAX_LAUNCH_GAP_US = 20.0
"""An idle time of the device before an operation, up to this, is its launch's and counts as the operation's."""


class Assembler:
    """Rows (kind, values) in the order in which the host issued them.

    ``streams``: the profiler's stream numbers to the program's. Waits whose event nobody named are taken to be for the
    last work, issued before them on each other stream, that had ended when the waiting stream went on: an order that
    the measurement itself kept. ``inferred`` counts them.
    """

    def __init__(self, ops: OpTable, streams: dict[int, int], first_event: int = 0):
        self.ops = ops
        self.streams = streams
        self.rows: list[tuple[Kind, dict[str, Any]]] = []
        self.issued: dict[int, list[Work]] = {number: [] for number in streams.values()}
        self.clock = 0.0  # measured host time up to which records account for
        self.inferred = 0
        self._first_event = first_event
        self._awaited: dict[tuple[int, int], int] = {}  # (waiting stream, other stream) -> place waited for
        self._event_of: dict[int, int] = {}  # record -> number of the event behind it

    def row(self, kind: Kind, at_us: float, **values: Any) -> int:
        """A record issued at ``at_us``; the host time since the one before goes with it."""
        self.rows.append((kind, {"host_us": self.host_us(max(0.0, at_us - self.clock)), **values}))
        self.clock = max(self.clock, at_us)
        return len(self.rows) - 1

    def host_us(self, measured_us: float) -> float:
        """Host time of a record for what the profiled run took."""
        return measured_us

    def timed(self, call: Call, work: Work, waits: bool) -> tuple[int, float, dict[str, Any]]:
        """(stream, time of issue, duration and evidence) of a work; rows of the waits before it are added."""
        stream = self.streams[work.stream]
        at = min(call.end_us, work.start_us)  # a kernel may begin before the call that launches it returns
        ready = max(at, self.issued[stream][-1].end_us if self.issued[stream] else at)
        if waits:
            ready = max(ready, self._wait(stream, work, at))
        gap = min(max(0.0, work.start_us - ready), MAX_LAUNCH_GAP_US)
        duration = work.end_us - work.start_us + gap
        return stream, at, {"stream": stream, "duration_us": duration, "evidence": Evidence.MEASURED}

    def local(self, work: Work, at: float, values: dict[str, Any]) -> None:
        """A kernel or copy of the rank's own."""
        size = work.args.get("bytes")
        values["bytes"] = size if isinstance(size, int) and 0 <= size < 1 << 62 else 0
        self.row(work.kind, at, op=self.ops.add(OpSignature(work.name)), **values)

    def _wait(self, stream: int, work: Work, at: float) -> float:
        """Records before ``work`` that its stream waits for what had ended on others; the end of the last."""
        latest = 0.0
        for other, issued in self.issued.items():
            if other == stream:
                continue
            place = last_ended(issued, work.start_us)
            while place >= 0 and issued[place].record < 0:  # not part of the program
                place -= 1
            if place > self._awaited.get((stream, other), -1):
                self._awaited[stream, other] = place
                self.inferred += 1
                latest = max(latest, issued[place].end_us)
                event = self._event_behind(issued[place].record)
                self.row(Kind.WAIT_EVENT, min(at, self.clock), stream=stream, event=event)
        return latest

    def _event_behind(self, record: int) -> int:
        return self._event_of.setdefault(record, self._first_event + len(self._event_of))

    def sync(self, call: Call, at_us: float, streams: list[int], stream: int = -1) -> None:
        """The host waits for all issued on ``streams``; what the call takes beyond that is host time after it."""
        self.row(Kind.SYNC, at_us, stream=stream)
        ends = [self.issued[s][-1].end_us for s in streams if self.issued.get(s)]
        self.clock = min(max([self.clock, *ends]), max(self.clock, call.end_us))

    @staticmethod
    def copies_for_the_host(call: Call, work: Work) -> bool:
        """Whether the call returned only when the copy was done (CUDA runtime API, "API synchronization behavior")."""
        to_pageable = "DtoH" in work.name and "Pageable" in work.name
        return call.name.startswith("cudaMemcpy") and ("Async" not in call.name or to_pageable)

    def sync_with_event(self, call: Call) -> None:
        """For the last work that had ended when the call returned."""
        places = {stream: last_ended(issued, call.end_us) for stream, issued in self.issued.items()}
        ended = [
            self.issued[s][place] for s, place in places.items() if place >= 0 and self.issued[s][place].record >= 0
        ]
        if ended:
            work = max(ended, key=lambda w: w.end_us)
            self.inferred += 1
            self.row(Kind.SYNC, call.start_us, event=self._event_behind(work.record))
            self.clock = max(self.clock, work.end_us)

    def with_events(self) -> list[tuple[Kind, dict[str, Any]]]:
        """The records, with an event recorded behind each that something waits for."""
        rows: list[tuple[Kind, dict[str, Any]]] = []
        for record, row in enumerate(self.rows):
            rows.append(row)
            if record in self._event_of:
                stream = row[1]["stream"]
                rows.append((Kind.RECORD_EVENT, {"stream": stream, "event": self._event_of[record]}))
        return rows


def last_ended(issued: list[Work], time_us: float) -> int:
    """Place of the last work of a stream that had ended by ``time_us``; -1 for none."""
    place = len(issued) - 1
    while place >= 0 and issued[place].end_us > time_us:
        place -= 1
    return place
