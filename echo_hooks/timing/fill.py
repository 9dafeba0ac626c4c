"""Filling a traced rank's durations: each distinct op is priced once, then spread over the records that use it."""

from __future__ import annotations

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.graph.program import Evidence, Kind
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.host import HOST_BANDWIDTH_BYTES_PER_S
from echo_hooks.timing.roofline import estimate


def fill_durations(trace: RankTrace, accelerator: Accelerator, ranks_per_node: int = 1) -> list[str]:
    """Set ``duration_us`` and ``evidence`` of every COMPUTE and COPY record of the trace's program, in place.

    So too of HOST records with an op: its bytes, at the rank's share of its node's memory bandwidth (ASSUMED).

    Returns the names of the ops whose duration is a guess, in order of first use: ops that the registry does not
    know, and products in a dtype that the device lacks. Their evidence is ASSUMED, that of the others MODELLED.
    Raises UsageError for a record without an op, which no tracer writes.
    """
    program = trace.program
    local = np.flatnonzero((program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY))
    ops = program.op[local]
    if ops.size and ops.min() < 0:
        raise UsageError(f"rank {trace.rank}: record {local[ops.argmin()]} is device work without an op")
    durations = np.full(len(trace.ops), np.nan)
    evidence = np.full(len(trace.ops), Evidence.NONE, dtype=np.uint8)
    guessed: list[str] = []
    for op in np.unique(ops):
        signature = trace.ops[op]
        found = estimate(signature, accelerator)
        durations[op] = found.duration_us
        evidence[op] = Evidence.MODELLED if found.known else Evidence.ASSUMED
        if not found.known and signature.name not in guessed:
            guessed.append(signature.name)
    program.columns["duration_us"][local] = durations[ops]
    program.columns["evidence"][local] = evidence[ops]
    on_host = np.flatnonzero((program.kind == Kind.HOST) & (program.op >= 0))
    per_us = HOST_BANDWIDTH_BYTES_PER_S / max(ranks_per_node, 1) / 1e6
    program.columns["duration_us"][on_host] = program.bytes[on_host] / per_us
    program.columns["evidence"][on_host] = Evidence.ASSUMED
    return guessed


def host_bytes(trace: RankTrace) -> int:
    """Bytes that the host's own work on large tensors moves in the trace's program."""
    program = trace.program
    return int(program.bytes[(program.kind == Kind.HOST) & (program.op >= 0)].sum())
