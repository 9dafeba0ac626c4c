"""A measured step as a rank program: import of the traces that torch.profiler (Kineto) writes in Chrome's format.

What a trace holds: host calls with their threads, kernels and copies with their streams, tied to the call that launched
them, NCCL kernels with their collective. What it mostly lacks: which event a stream or the host waits for (CUPTI
reports that only with ``enable_cuda_sync_events``). A wait is therefore taken to be for the last work, issued before
it on each other stream, that had ended when the waiting stream went on: an order that the measurement itself kept.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.kineto_events import Call, Events, Work, measured_span, read_events
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import Evidence, Kind, ProgramBuilder
from echo_hooks.graph.rundir import RankTrace

MAX_LAUNCH_GAP_US = 20.0
"""An idle time of the device before an operation, up to this, is its launch's and counts as the operation's."""


# torch.profiler's names to Echo's (RECORD_PARAM_COMMS in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
# Names of c10::ScalarType to torch's, with bytes per element.
_DTYPES = {
    "Float": ("float32", 4),
    "BFloat16": ("bfloat16", 2),
    "Half": ("float16", 2),
    "Double": ("float64", 8),
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Bool": ("bool", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
}


@dataclass(frozen=True)
class MeasuredRank:
    """``trace``: the measured steps as a program; each kernel, copy and call has its measured duration (a call's holds
    its wait for the others: take the least over the ranks). ``begin_us``, ``end_us``: the end of the step before
    the first and of the last, on the trace's clock. ``inferred_waits``: waits whose event the trace did not name."""

    trace: RankTrace
    begin_us: float
    end_us: float
    inferred_waits: int

    @property
    def step_us(self) -> float:
        """What one step took."""
        return (self.end_us - self.begin_us) / self.trace.steps


def read_kineto(path: Path, rank: int) -> MeasuredRank:
    """The steps of ``rank`` in ``path`` (.json or .json.gz), from the first step's end to the last one's.

    A step ends with the first device synchronisation behind ``Optimizer.step``, or with ``ProfilerStep``; a trace of
    one step counts from its beginning. Raises UsageError for a file that is no such trace or holds no step.
    """
    events = read_events(path)
    begin, end, steps = measured_span(path, events)
    return _Importer(path, rank, events).program(begin, end, steps)


class _Importer:
    def __init__(self, path: Path, rank: int, events: Events):
        self._path, self._rank, self._events = path, rank, events
        self._groups = GroupTable()
        self._group_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ops = OpTable()
        self._rows: list[tuple[Kind, dict[str, Any]]] = []
        self._builder = ProgramBuilder()
        streams = sorted({work.stream for works in events.launched.values() for work in works})
        self._stream = {number: i for i, number in enumerate(streams)}
        self._builder.streams = [f"stream {number}" for number in streams]
        self._issued: list[list[Work]] = [[] for _ in streams]
        self._clock = 0.0  # measured host time up to which records account for
        self._seq: dict[int, int] = defaultdict(int)
        self._batch = 0
        self._awaited: dict[tuple[int, int], int] = {}  # (waiting stream, other stream) -> place waited for
        self._event_of: dict[int, int] = {}  # record -> number of the event behind it
        self._inferred = 0

    def program(self, begin: float, end: float, steps: int) -> MeasuredRank:
        self._clock = begin
        self._row(Kind.MARK, begin, op=self._ops.add(OpSignature("step_begin")), seq=0)
        waiting: set[str] = set()  # threads whose next launch is on a stream that waits
        parts: dict[str, list[Call]] = defaultdict(list)
        last_stream: dict[str, int] = {}
        for call in self._events.calls:
            if call.end_us <= begin or call.start_us >= end:
                continue
            thread = call.thread
            works = self._events.launched.get(call.args.get("correlation", -1), ())
            if works:
                for work in works:
                    self._launch(call, work, thread in waiting, parts)
                    waiting.discard(thread)
                last_stream[thread] = self._stream[works[-1].stream]
                if call.name.startswith("cudaMemcpy") and works[-1].end_us <= call.end_us:
                    self._sync(call, self._clock, [last_stream[thread]], stream=last_stream[thread])
            elif call.name == "record_param_comms":
                if str(call.args.get("Collective name")).startswith(("send", "recv")):
                    parts[thread].append(call)
            elif call.name == "cudaStreamWaitEvent":
                waiting.add(thread)
            elif call.name == "cudaDeviceSynchronize":
                self._sync(call, call.start_us, list(range(len(self._issued))))
            elif call.name == "cudaEventSynchronize":
                self._sync_with_event(call)
            elif call.name == "cudaStreamSynchronize":  # of the stream in use, as the trace does not say
                stream = last_stream.get(thread, 0)
                self._sync(call, call.start_us, [stream], stream=stream)
        self._row(Kind.MARK, end, op=self._ops.add(OpSignature("step_end")), seq=steps - 1)
        for kind, values in self._with_events():
            self._builder.append(kind, **values)
        program = self._builder.program()
        trace = RankTrace(
            rank=self._rank,
            program=program,
            prologue=program.slice(0, 0),
            ops=self._ops.signatures,
            groups=self._groups,
            memory_events={},
            steps=steps,
        )
        return MeasuredRank(trace, begin, end, self._inferred)

    def _row(self, kind: Kind, at_us: float, **values: Any) -> int:
        """A record issued at ``at_us``; the host time since the one before goes with it."""
        self._rows.append((kind, {"host_us": max(0.0, at_us - self._clock), **values}))
        self._clock = max(self._clock, at_us)
        return len(self._rows) - 1

    def _launch(self, call: Call, work: Work, waits: bool, parts: dict[str, list[Call]]) -> None:
        stream = self._stream[work.stream]
        at = min(call.end_us, work.start_us)  # a kernel may begin before the call that launches it returns
        ready = max(at, self._issued[stream][-1].end_us if self._issued[stream] else at)
        if waits:
            ready = max(ready, self._wait(stream, work, at))
        gap = min(max(0.0, work.start_us - ready), MAX_LAUNCH_GAP_US)
        values = {"stream": stream, "duration_us": work.end_us - work.start_us + gap, "evidence": Evidence.MEASURED}
        if work.kind == Kind.COMPUTE and work.name.startswith("nccl"):
            self._communicate(call, work, at, values, parts)
        else:
            size = work.args.get("bytes")
            values["bytes"] = size if isinstance(size, int) and 0 <= size < 1 << 62 else 0
            self._row(work.kind, at, op=self._ops.add(OpSignature(work.name)), **values)
        work.record = len(self._rows) - 1
        self._issued[stream].append(work)

    def _wait(self, stream: int, work: Work, at: float) -> float:
        """Records before ``work`` that its stream waits for what had ended on others; the end of the last."""
        latest = 0.0
        for other, issued in enumerate(self._issued):
            if other == stream:
                continue
            place = _last_ended(issued, work.start_us)
            if place > self._awaited.get((stream, other), -1):
                self._awaited[stream, other] = place
                self._inferred += 1
                latest = max(latest, issued[place].end_us)
                event = self._event_behind(issued[place].record)
                self._row(Kind.WAIT_EVENT, min(at, self._clock), stream=stream, event=event)
        return latest

    def _event_behind(self, record: int) -> int:
        return self._event_of.setdefault(record, len(self._event_of))

    def _sync(self, call: Call, at_us: float, streams: list[int], stream: int = -1) -> None:
        """The host waits for all issued on ``streams``; what the call takes beyond that is host time after it."""
        self._row(Kind.SYNC, at_us, stream=stream)
        ends = [self._issued[s][-1].end_us for s in streams if self._issued[s]]
        self._clock = min(max([self._clock, *ends]), max(self._clock, call.end_us))

    def _sync_with_event(self, call: Call) -> None:
        """For the last work that had ended when the call returned."""
        places = [_last_ended(issued, call.end_us) for issued in self._issued]
        ended = [issued[place] for issued, place in zip(self._issued, places) if place >= 0]
        if ended:
            work = max(ended, key=lambda w: w.end_us)
            self._inferred += 1
            self._row(Kind.SYNC, call.start_us, event=self._event_behind(work.record))
            self._clock = max(self._clock, work.end_us)

    def _communicate(
        self, call: Call, work: Work, at: float, values: dict[str, Any], parts: dict[str, list[Call]]
    ) -> None:
        name = str(work.args.get("Collective name", ""))
        if name in COLLECTIVES:
            group, ranks = self._group(work.args)
            payload = self._payload(work.args)
            op = self._ops.add(OpSignature(COLLECTIVES[name]))
            root = work.args.get("Root Rank")
            if isinstance(root, int) and 0 <= root < len(ranks):
                values["peer"] = ranks[root]
            self._row(Kind.COLLECTIVE, at, op=op, group=group, seq=self._seq[group], **payload, **values)
            self._seq[group] += 1
            return
        described, parts[call.thread] = parts[call.thread], []
        if not described:
            raise UsageError(
                f"{self._path}: NCCL kernel {work.name[:60]!r} without a description of its communication;"
                " profile with torch 2.4 or later and CPU activities"
            )
        batch = self._batch if len(described) > 1 else -1
        self._batch += 1
        for part in described:
            sends = str(part.args["Collective name"]).startswith("send")
            group, ranks = self._group(part.args)
            place = part.args.get("Dst Rank" if sends else "Src Rank")
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(ranks):
                raise UsageError(f"{self._path}: a send or recv names place {place!r} of a group of {len(ranks)}")
            op = self._ops.add(OpSignature("send" if sends else "recv"))
            kind = Kind.SEND if sends else Kind.RECV
            payload = self._payload(part.args)
            self._row(kind, at, op=op, group=group, peer=ranks[place], batch=batch, **payload, **values)

    def _group(self, args: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
        name, text = str(args.get("Process Group Name", "")), str(args.get("Process Group Ranks", ""))
        try:
            ranks = tuple(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            ranks = ()
        if self._rank not in ranks or not all(type(r) is int and r >= 0 for r in ranks) or len(set(ranks)) < len(ranks):
            raise UsageError(
                f"{self._path}: process group {name!r} has ranks {text[:60]!r}: a whole list with rank"
                f" {self._rank} is needed"
            )
        if (name, ranks) not in self._group_of:
            label = str(args.get("Process Group Description") or f"group {name}")
            made = self._groups.add(ranks, name=label, site=f"process group {name}", desc=label)
            self._group_of[name, ranks] = made.index
        return self._group_of[name, ranks], ranks

    def _payload(self, args: dict[str, Any]) -> dict[str, int]:
        """``bytes`` and ``dtype`` of a call."""
        text = str(args.get("dtype", ""))
        given = [args.get("In msg nelems"), args.get("Out msg nelems")]
        counts = [n for n in given if isinstance(n, int) and 0 <= n < 1 << 48]
        if text not in _DTYPES or len(counts) < len(given):
            raise UsageError(f"{self._path}: communication of {given} elements of type {text[:30]!r} is not known")
        dtype, size = _DTYPES[text]
        return {"bytes": max(counts) * size, "dtype": self._builder.string(dtype)}

    def _with_events(self) -> list[tuple[Kind, dict[str, Any]]]:
        """The records, with an event recorded behind each that something waits for."""
        rows: list[tuple[Kind, dict[str, Any]]] = []
        for record, row in enumerate(self._rows):
            rows.append(row)
            if record in self._event_of:
                stream = row[1]["stream"]
                rows.append((Kind.RECORD_EVENT, {"stream": stream, "event": self._event_of[record]}))
        return rows


def _last_ended(issued: list[Work], time_us: float) -> int:
    """Place of the last work of a stream that had ended by ``time_us``; -1 for none."""
    place = len(issued) - 1
    while place >= 0 and issued[place].end_us > time_us:
        place -= 1
    return place
