"""Host times made steady: equal moments of a step, on all traced ranks, get their common median."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from echo_hooks.graph.program import HOST_STREAM, Kind, Program
from echo_hooks.graph.rundir import RankTrace

COMMUNICATION_CALL_US = 28.0
"""Host time of a communication call below Python: back to back, calls of torch.distributed with small payloads take 35
to 45 us on an H200's host (NCCL 2.28.9, torch 2.11), of which about 10 are Python's own."""
HOST_BANDWIDTH_BYTES_PER_S = 307e9
"""What the ranks of a node together read and write in host memory. Assumed: half of what two sockets with eight
channels of DDR5-4800 have (2 x 8 x 4.8 GT/s x 8 bytes = 614 GB/s, Intel Xeon Platinum 8480C, as in a DGX H100)."""

MIN_OCCURRENCES = 4
"""Moments seen less often keep their own measurement: a median of three still follows one disturbance."""

_NUMBER = re.compile(r"\d+")


def settle_host_times(traces: list[RankTrace]) -> None:
    """Replace ``host_us`` in place by the median over records that stand for the same moment.

    Two records are the same moment when they and their predecessors are the same operation in the same phase and in
    modules whose paths differ in numbers only (layer 3 and layer 7). A single measurement on a busy machine carries
    what the machine did besides; many ranks, micro-batches and warm-up steps (but for the first, which sets things up)
    pass through the same code, and the median of them is what the code costs. It also gives ranks that do the same the
    same host time.
    """
    codes: dict[Any, int] = {}
    warm = [_warm_steps(trace) for trace in traces]
    keys = [_moments(trace, trace.program, codes) for trace in traces]
    if not keys or not sum(map(len, keys)):
        return
    keys += [_moments(trace, steps, codes) for trace, steps in zip(traces, warm)]
    moment, inverse = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    host = np.concatenate([program.host_us for program in (*(trace.program for trace in traces), *warm)])
    order = np.lexsort((host, inverse))
    count = np.bincount(inverse, minlength=len(moment))
    first = np.cumsum(count) - count
    low, high = host[order[first + (count - 1) // 2]], host[order[first + count // 2]]
    settled = np.where(count[inverse] >= MIN_OCCURRENCES, ((low + high) / 2)[inverse], host)
    start = 0
    for trace in traces:
        stop = start + len(trace.program)
        trace.program.columns["host_us"] = settled[start:stop]
        start = stop


def add_communication_calls(trace: RankTrace) -> None:
    """Add to ``host_us`` in place what issuing each call on a device costs, as the virtual world answered it; the calls
    of a batch are issued as one."""
    program = trace.program
    calls = np.isin(program.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) & (program.stream != HOST_STREAM)
    first = np.ones(len(program), bool)
    batched = np.flatnonzero(program.batch >= 0)
    first[batched] = False
    first[batched[np.unique(program.batch[batched], return_index=True)[1]]] = True
    program.columns["host_us"] = program.host_us + np.where(calls & first, COMMUNICATION_CALL_US, 0.0)


def _warm_steps(trace: RankTrace) -> Program:
    """What the rank issued between the end of its first step and the first measured one."""
    first = trace.step_ends[0] if trace.step_ends else len(trace.prologue)
    return trace.prologue.slice(min(first, len(trace.prologue)), len(trace.prologue))


def _moments(trace: RankTrace, program: Program, codes: dict[Any, int]) -> np.ndarray:
    """[records, 4] of a part of the trace: own operation, the one before (-1 for none), phase, module."""

    def code(thing: Any) -> int:
        return codes.setdefault(thing, len(codes))

    of_op = np.array([code(op) for op in trace.ops] + [code(None)], np.int64)  # the last serves op == -1
    of_module = np.array([code(_NUMBER.sub("#", text)) for text in program.strings], np.int64)
    operation = of_op[program.op] * 16 + program.kind
    before = np.concatenate([[-1], operation[:-1]]) if len(operation) else operation
    return np.stack([operation, before, program.phase, of_module[program.module]], axis=1).astype(np.int64)
