"""What the report says about where the times of local operations are from, by share of the time in kernels."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from echo_hooks.graph.program import Evidence, Kind
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.timing.pricing import Pricing

SLOW = 2.0
"""Slowness of a host from which it is told. Between a script's steps, its data in the caches, the loops read 1.4 to
1.8 times what they read alone on the same kind of machine."""


def notes(traces: Sequence[RankTrace], pricing: Pricing | None, versions: Mapping[str, str]) -> list[str]:
    """Sentences for the report; ``pricing``: None where all was executed. ``versions``: the run's own, by package."""
    if pricing is None:
        return []
    spent = _time_by(traces, lambda trace, op: _source(trace, op, pricing))
    total = sum(spent.values())
    if not total:
        return []
    parts = ", ".join(f"{time / total:.1%} {source}" for source, time in spent.items())
    said = [f"time in kernels: {parts}", *pricing.notes]
    errors = pricing.model.errors if pricing.model is not None else {}
    if (learned := spent.get("modelled (learned model)", 0.0)) and errors:
        typical = float(np.median(list(errors.values())))
        model = pricing.model.accelerator if pricing.model is not None else ""
        elsewhere = "" if model == pricing.accelerator.name else f", transferred from {model} by the peaks of both"
        said.append(
            f"learned model: {learned / total:.1%} of the time in kernels; on shapes withheld from it, half of the "
            f"classes of operations err by less than {typical:.0%} on average{elsewhere}"
        )
    for torch, cuda, cudnn in sorted(pricing.versions):
        measured = f"torch {torch}, CUDA {cuda}, cuDNN {cudnn}"
        here = versions.get("torch", "")
        other = here and here.partition("+")[0] != torch.partition("+")[0]
        said.append(f"operations measured with {measured}" + (f"; this run's torch is {here}" if other else ""))
    return said


def slow_hosts(traces: Sequence[RankTrace], reference: Mapping[str, float]) -> list[str]:
    """What the report says where the host was slower, while ranks were measured, than the one that ``reference`` is of:
    a neighbour on the machine, another processor. Both in microseconds by loop (capture.host_speed)."""
    slowest = max(traces, key=lambda trace: _slowness(trace.host_speed, reference), default=None)
    if slowest is None or _slowness(slowest.host_speed, reference) < SLOW:
        return []
    times = _slowness(slowest.host_speed, reference)
    loops = ", ".join(
        f"{name.removesuffix('_us')} {us:.2g} against {reference[name]:.2g} us"
        for name, us in slowest.host_speed.items()
        if name in reference
    )
    return [
        f"while rank {slowest.rank} was measured, this machine's host was {times:.1f} times as slow as the one that the"
        f" accelerator's profile was recorded on ({loops}): what the host bounds comes out longer than there; measure"
        f" again when the machine is quieter, or see what --host-speed {times:.1f} gives"
    ]


def host_slowness(traces: Sequence[RankTrace], reference: Mapping[str, float]) -> float:
    """How many times as slow as ``reference``'s the host was on which ranks were traced: the median over the ranks of
    the geometric mean of what host time is made of, Python and torch's dispatcher; 1 where it was not measured."""
    loops = ("python_us", "dispatch_us")
    found = [
        math.sqrt(math.prod(trace.host_speed[name] / reference[name] for name in loops))
        for trace in traces
        if all(trace.host_speed.get(name, 0.0) > 0.0 and reference.get(name, 0.0) > 0.0 for name in loops)
    ]
    return statistics.median(found) if found else 1.0


def _slowness(measured: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """Median over the loops that both know; 1 for none."""
    ratios = [us / reference[name] for name, us in measured.items() if reference.get(name, 0.0) > 0.0]
    return statistics.median(ratios) if ratios else 1.0


def shares_of_guesses(traces: Sequence[RankTrace]) -> dict[str, float]:
    """Names of the operations that no model knows, with their share of the time in kernels, largest first."""
    spent = _time_by(traces, lambda trace, op: trace.ops[op].name, Evidence.ASSUMED)
    total = sum(_time_by(traces, lambda trace, op: "all").values())
    return {name: time / total for name, time in spent.items()} if total else {}


def _source(trace: RankTrace, op: int, pricing: Pricing) -> str:
    price = pricing.price(trace.ops[op])
    return f"{price.evidence.name.lower()} ({price.source})"


def _time_by(
    traces: Sequence[RankTrace], name: Callable[[RankTrace, int], str], evidence: Evidence | None = None
) -> dict[str, float]:
    """Microseconds in kernels (of that evidence) by name, largest first."""
    spent: dict[str, float] = defaultdict(float)
    for trace in traces:
        program = trace.program
        chosen = (program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY)
        if evidence is not None:
            chosen &= program.evidence == evidence
        times = np.bincount(program.op[chosen], np.nan_to_num(program.duration_us[chosen]), minlength=len(trace.ops))
        for op in np.flatnonzero(times).tolist():
            spent[name(trace, op)] += float(times[op])
    return dict(sorted(spent.items(), key=lambda item: (-item[1], item[0])))
