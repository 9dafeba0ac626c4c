"""FLOPs of a step over all ranks, and how much of the accelerators' peak that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from echo_hooks.graph.program import Kind, Phase
from echo_hooks.graph.rundir import RankTrace, Run

if TYPE_CHECKING:
    from echo_hooks.hardware.accelerator import Accelerator

_RECOMPUTATION_RATIO = 2.6
"""Backward over forward FLOPs beyond which the backward pass must hold recomputed forward work: a matrix product has
two gradients of its own size (2.0), attention without a stored score matrix five products against two (2.5)."""


@dataclass(frozen=True)
class Utilisation:
    """``flops_per_step``: over all ranks, as executed. ``dtype``: the one that most FLOPs use ("" when there are none).

    ``peak_flops``: dense peak of one accelerator for that dtype, FLOP/s, None when its file has none. ``mfu``: 0 to 1,
    None when it cannot be said. ``notes``: how to read the numbers, a sentence each.
    """

    flops_per_step: int
    dtype: str
    peak_flops: float | None
    mfu: float | None
    notes: list[str]


def utilisation(run: Run, accelerator: Accelerator, step_time_us: float | None) -> Utilisation:
    """Add up the FLOPs that the op signatures state, for every rank of every role."""
    by_dtype: dict[str, int] = {}
    by_phase: dict[int, int] = {}
    for role in run.roles:
        trace = run.traces[role.traced_rank]
        for (dtype, phase), flops in flops_of_trace(trace).items():
            over_ranks = flops * len(role.ranks) // max(1, trace.steps)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + over_ranks
            by_phase[phase] = by_phase.get(phase, 0) + over_ranks
    total = sum(by_dtype.values())
    if total == 0:
        return Utilisation(0, "", None, None, ["no operation with known FLOPs was traced, so there is no MFU"])
    dtype = max(sorted(by_dtype), key=lambda name: by_dtype[name])
    peak = accelerator.peak_flops.get(dtype)
    notes = _notes(dtype, by_dtype[dtype] / total, peak, accelerator.name, by_phase)
    mfu = None
    if peak and step_time_us:
        mfu = total / (step_time_us * 1e-6 * run.world_size * peak)
    return Utilisation(total, dtype, peak, mfu, notes)


def flops_of_trace(trace: RankTrace) -> dict[tuple[str, int], int]:
    """FLOPs of all traced steps of one rank, by (dtype, phase)."""
    program = trace.program
    compute = (program.kind == Kind.COMPUTE) & (program.op >= 0)
    sums: dict[tuple[str, int], int] = {}
    for phase in Phase:
        ops, calls = np.unique(program.op[compute & (program.phase == phase)], return_counts=True)
        for op, count in zip(ops.tolist(), calls.tolist()):
            signature = trace.ops[op]
            if signature.flops:
                key = (_compute_dtype(signature), int(phase))
                sums[key] = sums.get(key, 0) + signature.flops * count
    return sums


def _compute_dtype(signature) -> str:
    """The dtype that names the peak: that of the first floating input, all float8 formats as one."""
    for meta in signature.inputs:
        if meta.dtype.startswith("float8"):
            return "float8"
        if meta.dtype.startswith(("float", "bfloat", "complex")) or meta.dtype == "int8":
            return meta.dtype
    return signature.inputs[0].dtype if signature.inputs else "unknown"


def _notes(dtype: str, share: float, peak: float | None, accelerator: str, by_phase: dict[int, int]) -> list[str]:
    if peak is None:
        notes = [f"no MFU: {accelerator} states no peak for {dtype}"]
    else:
        others = (
            "" if share > 0.999 else f" ({100 * share:.0f} % of the FLOPs are {dtype}; the rest counts against it too)"
        )
        notes = [f"MFU is against the dense {dtype} peak of {peak / 1e12:.4g} TFLOP/s of {accelerator}{others}"]
    forward, backward = by_phase.get(Phase.FORWARD, 0), by_phase.get(Phase.BACKWARD, 0)
    sentence = "model_flops_per_step counts the FLOPs executed (matrix products, attention, convolutions)"
    if forward and backward > _RECOMPUTATION_RATIO * forward:
        sentence += (
            f"; backward has {backward / forward:.1f} times the FLOPs of forward, so recomputed activations are in it"
            " and mfu is a hardware utilisation (HFU)"
        )
    else:
        sentence += "; recomputed activations, if any, are in it"
    return [*notes, sentence]
