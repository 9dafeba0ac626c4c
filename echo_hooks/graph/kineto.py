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
from echo_hooks.graph.kineto_program import Assembler
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import Kind, ProgramBuilder
from echo_hooks.graph.rundir import RankTrace

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
DTYPES = {
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


class _Importer(Assembler):
    def __init__(self, path: Path, rank: int, events: Events):
        numbers = sorted({work.stream for works in events.launched.values() for work in works})
        super().__init__(OpTable(), {number: i for i, number in enumerate(numbers)})
        self._path, self._rank, self._events = path, rank, events
        self._groups = GroupTable()
        self._group_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self._builder = ProgramBuilder()
        self._builder.streams = [f"stream {number}" for number in numbers]
        self._seq: dict[int, int] = defaultdict(int)
        self._batch = 0

    def program(self, begin: float, end: float, steps: int) -> MeasuredRank:
        self.clock = begin
        self.row(Kind.MARK, begin, op=self.ops.add(OpSignature("step_begin")), seq=0)
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
                last_stream[thread] = self.streams[works[-1].stream]
                if self.copies_for_the_host(call, works[-1]):
                    self.sync(call, self.clock, [last_stream[thread]], stream=last_stream[thread])
            elif call.name == "record_param_comms":
                if str(call.args.get("Collective name")).startswith(("send", "recv")):
                    parts[thread].append(call)
            elif call.name == "cudaStreamWaitEvent":
                waiting.add(thread)
            elif call.name == "cudaDeviceSynchronize":
                self.sync(call, call.start_us, list(self.issued))
            elif call.name == "cudaEventSynchronize":
                self.sync_with_event(call)
            elif call.name == "cudaStreamSynchronize":  # of the stream in use, as the trace does not say
                stream = last_stream.get(thread, 0)
                self.sync(call, call.start_us, [stream], stream=stream)
        self.row(Kind.MARK, end, op=self.ops.add(OpSignature("step_end")), seq=steps - 1)
        for kind, values in self.with_events():
            self._builder.append(kind, **values)
        program = self._builder.program()
        trace = RankTrace(
            rank=self._rank,
            program=program,
            prologue=program.slice(0, 0),
            ops=self.ops.signatures,
            groups=self._groups,
            memory_events={},
            steps=steps,
        )
        return MeasuredRank(trace, begin, end, self.inferred)

    def _launch(self, call: Call, work: Work, waits: bool, parts: dict[str, list[Call]]) -> None:
        stream, at, values = self.timed(call, work, waits)
        if work.kind == Kind.COMPUTE and work.name.startswith("nccl"):
            self._communicate(call, work, at, values, parts)
        else:
            self.local(work, at, values)
        work.record = len(self.rows) - 1
        self.issued[stream].append(work)

    def _communicate(
        self, call: Call, work: Work, at: float, values: dict[str, Any], parts: dict[str, list[Call]]
    ) -> None:
        name = str(work.args.get("Collective name", ""))
        if name in COLLECTIVES:
            group, ranks = self._group(work.args)
            payload = self._payload(work.args)
            op = self.ops.add(OpSignature(COLLECTIVES[name]))
            root = work.args.get("Root Rank")
            if isinstance(root, int) and 0 <= root < len(ranks):
                values["peer"] = ranks[root]
            self.row(Kind.COLLECTIVE, at, op=op, group=group, seq=self._seq[group], **payload, **values)
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
            op = self.ops.add(OpSignature("send" if sends else "recv"))
            kind = Kind.SEND if sends else Kind.RECV
            payload = self._payload(part.args)
            self.row(kind, at, op=op, group=group, peer=ranks[place], batch=batch, **payload, **values)

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
        if text not in DTYPES or len(counts) < len(given):
            raise UsageError(f"{self._path}: communication of {given} elements of type {text[:30]!r} is not known")
        dtype, size = DTYPES[text]
        return {"bytes": max(counts) * size, "dtype": self._builder.string(dtype)}
