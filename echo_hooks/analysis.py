"""From a traced run to its answer: durations, communication, composition, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_hooks.compose import Variability, compose
from echo_hooks.compose.result import Composition
from echo_hooks.device_memory import CONTEXT_SOURCE, add_extra_memory
from echo_hooks.errors import UsageError
from echo_hooks.graph.replicas import tokens_per_step
from echo_hooks.graph.rundir import Run
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.model import CommunicationModel
from echo_hooks.report.quantities import ranks_text
from echo_hooks.report.report import Report, build_report
from echo_hooks.timing import fill_durations
from echo_hooks.timing.host import settle_host_times

BAND_RECORDS = 16_000_000
"""Records simulated for a band that nobody asked for: a few seconds. With jitter asked for there is no limit."""


@dataclass(frozen=True)
class Analysis:
    """The simulated step and the report made from it."""

    composition: Composition
    report: Report


def analyse(
    run: Run,
    cluster: Cluster,
    *,
    folded: bool = True,
    slow_ranks: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Analysis:
    """Compose ``run`` on ``cluster`` (of at least its world size) and report on it.

    ``slow_ranks``: factor on the kernel times by rank. ``jitter``: sigma of the noise of single kernels; ``seed``: of
    the step time's band.

    Communication that does not fit together, set-up and warm-up included, gives a report with problems and no times.
    Raises UsageError for a run without measured steps whose communication shows no reason.
    """
    began = time.perf_counter()
    variability = Variability(seed=seed, jitter=jitter, most_records=None if jitter > 0.0 else BAND_RECORDS)
    composition, unpriced = _compose(run, cluster, folded, slow_ranks, variability)
    if not composition.timelines and not composition.problems:
        raise UsageError(f"{run.path}: the run holds no measured step, so there is nothing to time")
    composed = time.perf_counter()
    timings = {
        "trace": sum(trace.trace_seconds for trace in run.traces.values()),
        "compose": composed - began,
        "report": 0.0,
    }
    tokens, counted = tokens_per_step(run)
    run.manifest["tokens_per_step"] = tokens
    report = build_report(run, composition, cluster, timings=timings)
    report.assumptions.extend(_note("note", sentence) for sentence in _slowed(slow_ranks))
    report.assumptions.append(_note("note", CONTEXT_SOURCE))
    report.assumptions.append(_note("note", f"tokens per second: {counted}"))
    report.assumptions.extend(_note("op priced by its bytes alone", name) for name in unpriced)
    report.timings["report"] = time.perf_counter() - composed
    return Analysis(composition, report)


def _compose(
    run: Run, cluster: Cluster, folded: bool, slow_ranks: Mapping[int, float] | None, variability: Variability
) -> tuple[Composition, list[str]]:
    """The composition, and the names of ops whose duration is a guess."""
    traces = list(run.traces.values())
    settle_host_times(traces)
    unpriced = sorted({name for trace in traces for name in fill_durations(trace, cluster.accelerator)})
    network = network_of(run, cluster)
    add_extra_memory(run, cluster.accelerator, network)
    composition = compose(
        run.world_size,
        run.groups,
        run.roles,
        run.traces,
        network,
        folded=folded,
        accelerators_per_node=cluster.accelerators_per_node,
        host_launch_us=cluster.accelerator.host_launch_us,
        slow_ranks=slow_ranks,
        variability=variability,
        slack=True,
    )
    return composition, unpriced


def network_of(run: Run, cluster: Cluster) -> CommunicationModel:
    """The library that the run's ranks communicate with, under the run's environment."""
    return CommunicationModel(cluster, environment=run.manifest.get("nccl_environment", {}))


def _slowed(slow_ranks: Mapping[int, float] | None) -> list[str]:
    by_factor: dict[float, list[int]] = {}
    for rank, factor in sorted((slow_ranks or {}).items()):
        by_factor.setdefault(factor, []).append(rank)
    return [
        f"as asked for, kernels take {factor:g} times as long on {ranks_text(ranks)}"
        for factor, ranks in sorted(by_factor.items())
    ]


def _note(kind: str, value: str) -> dict[str, Any]:
    return {"kind": kind, "value": value, "site": "", "count": 1, "ranks": []}
