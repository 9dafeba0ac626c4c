"""Filling a traced rank's durations: each distinct op is priced once, then spread over the records that use it."""

from __future__ import annotations

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.graph.program import Evidence, Kind
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.clock import host_step_us, slowdown
from echo_hooks.timing.host import HOST_BANDWIDTH_BYTES_PER_S
from echo_hooks.timing.pricing import Pricing, is_product


def fill_durations(
    trace: RankTrace, pricing: Pricing | Accelerator, ranks_per_node: int = 1, step_us: float = 0.0
) -> list[str]:
    """Set ``duration_us`` and ``evidence`` of every COMPUTE and COPY record of the trace's program, in place.

    So too of HOST records with an op: its bytes, at the rank's share of its node's memory bandwidth (ASSUMED).

    ``pricing``: an accelerator for its roofline alone. ``step_us``: what a step takes, waits included, on which the
    device's clock depends; left out, the least that it can. Returns the names of the ops whose duration is a guess, in
    order of first use: ops that the registry does not know, and products in a dtype that the device lacks. Their
    evidence is ASSUMED, that of the others PROFILED or MODELLED.
    Raises UsageError for a record without an op, which no tracer writes.
    """
    program = trace.program
    local = np.flatnonzero((program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY))
    ops = program.op[local]
    if ops.size and ops.min() < 0:
        raise UsageError(f"rank {trace.rank}: record {local[ops.argmin()]} is device work without an op")
    if isinstance(pricing, Accelerator):
        pricing = Pricing(pricing)
    used = np.unique(ops)
    slower = slowdown_of_products(trace, pricing, step_us)
    durations = np.full(len(trace.ops), np.nan)
    evidence = np.full(len(trace.ops), Evidence.NONE, dtype=np.uint8)
    guessed: list[str] = []
    for op in used:
        signature = trace.ops[op]
        found = pricing.price(signature)
        durations[op] = found.duration_us * (slower if found.slows else 1.0)
        evidence[op] = found.evidence
        if found.evidence == Evidence.ASSUMED and signature.name not in guessed:
            guessed.append(signature.name)
    program.columns["duration_us"][local] = durations[ops]
    program.columns["evidence"][local] = evidence[ops]
    on_host = np.flatnonzero((program.kind == Kind.HOST) & (program.op >= 0))
    per_us = HOST_BANDWIDTH_BYTES_PER_S / max(ranks_per_node, 1) / 1e6
    program.columns["duration_us"][on_host] = program.bytes[on_host] / per_us
    program.columns["evidence"][on_host] = Evidence.ASSUMED
    return guessed


def slowdown_of_products(trace: RankTrace, pricing: Pricing, step_us: float = 0.0) -> float:
    """Factor on products (timing.clock) by what the rank's kernels take on a rested device in a step of ``step_us``,
    or in the least that a step can take."""
    program = trace.program
    used, count = np.unique(
        program.op[(program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY)], return_counts=True
    )
    pricing.prepare(trace.ops[op] for op in used)
    times = np.array([pricing.price(trace.ops[op]).duration_us for op in used]) * count
    products_us = float(times[np.array([is_product(trace.ops[op]) for op in used], bool)].sum())
    busy_us = float(times.sum())
    least_us = host_step_us(program, pricing.accelerator.host_launch_us)
    return slowdown(products_us, busy_us - products_us, max(least_us, step_us * trace.steps))


def host_bytes(trace: RankTrace) -> int:
    """Bytes that the host's own work on large tensors moves in the trace's program."""
    program = trace.program
    return int(program.bytes[(program.kind == Kind.HOST) & (program.op >= 0)].sum())
