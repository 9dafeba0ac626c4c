"""From a traced run to its answer: durations, communication, composition, report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_hooks.compose import Variability, compose
from echo_hooks.compose.result import Composition
from echo_hooks.device_memory import CONTEXT_SOURCE, add_extra_memory
from echo_hooks.errors import UsageError
from echo_hooks.graph.replicas import tokens_per_step
from echo_hooks.graph.rundir import Run
from echo_hooks.graph.tallies import missing_parts
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.calibration import Calibration
from echo_hooks.network.model import CommunicationModel
from echo_hooks.overlap.slowdowns import Slowdowns, choose
from echo_hooks.report.quantities import ranks_text
from echo_hooks.report.report import Report, build_report
from echo_hooks.timing import Pricing, fill_durations, load_pricing
from echo_hooks.timing.fill import host_bytes, slowdown_of_products
from echo_hooks.timing.host import HOST_BANDWIDTH_BYTES_PER_S, add_communication_calls, settle_host_times
from echo_hooks.timing.pricing import recorded_host_speed
from echo_hooks.timing.sources import host_slowness, notes, shares_of_guesses, slow_hosts

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
    calibration: Calibration | None = None,
    timing: str = "auto",
    profiles: Sequence[Path] = (),
    host_speed: float | None = None,
    overlap: str | None = None,
    pricing: Pricing | None = None,
) -> Analysis:
    """Compose ``run`` on ``cluster`` (of at least its world size) and report on it.

    ``timing``: where the time of a local operation is from: "profile" (measured databases, ``profiles`` before the
    shipped one, then the model), "model", "auto" (as "profile"); ``pricing`` stands for both; a run whose operations
    were executed keeps what was measured. ``slow_ranks``: factor on the kernel times by rank. ``jitter``: sigma of the
    noise of single kernels; ``seed``: of the step time's band. ``calibration``: of the network, instead of the one that
    comes with the accelerator. ``host_speed``: how many times as fast as the tracing machine's the target's processor
    runs the script's host code; left out, that of the host on which the accelerator's database was recorded, where
    there is one and nothing was executed. ``overlap``: a file of a slowdown model, or "none"; left out, the one that
    comes with the accelerator, else the formula.

    Communication that does not fit together, set-up and warm-up included, gives a report with problems and no times.
    Raises UsageError for a run without measured steps whose communication shows no reason, and for one whose operations
    were executed on another kind of accelerator than the cluster's.
    """
    began = time.perf_counter()
    variability = Variability(seed=seed, jitter=jitter, most_records=None if jitter > 0.0 else BAND_RECORDS)
    model = network_of(run, cluster, calibration)
    add_extra_memory(run, cluster.accelerator, model)
    executed = _executed(run, cluster)
    pricing = None if executed else pricing or load_pricing(cluster.accelerator, timing, profiles)
    slowdowns = choose(overlap, cluster.accelerator)
    recorded = recorded_host_speed(cluster.accelerator)
    factor = 1.0 if executed else host_slowness(list(run.traces.values()), recorded)
    factor = factor if host_speed is None else host_speed
    composition = _compose(run, cluster, pricing, model, folded, slow_ranks, slowdowns, variability, factor)
    if not composition.timelines and not composition.problems:
        raise UsageError(f"{run.path}: the run holds no measured step, so there is nothing to time")
    composed = time.perf_counter()
    timings = {
        "trace": sum(trace.trace_seconds for trace in run.traces.values()),
        "compose": composed - began,
        "report": 0.0,
    }
    traces = list(run.traces.values())
    tokens, counted = tokens_per_step(run)
    run.manifest["tokens_per_step"] = tokens
    composition.problems = [*composition.problems, *missing_parts(run.groups, run.roles, run.traces)]
    report = build_report(run, composition, cluster, timings=timings)
    report.assumptions.extend(_note("note", sentence) for sentence in _slowed(slow_ranks))
    report.assumptions.append(_note("note", CONTEXT_SOURCE))
    if factor != 1.0:
        report.assumptions.append(_note("note", _host_note(factor, asked=host_speed is not None, cluster=cluster)))
    report.assumptions.append(_note("note", f"tokens per second: {counted}"))
    if run.world_size > 1:
        report.assumptions.extend(_note("note", sentence) for sentence in _network_sources(model))
        report.assumptions.extend(_note("note", sentence) for sentence in _overlap(report, slowdowns))
    report.assumptions.extend(_note("note", sentence) for sentence in _host_work(run, cluster))
    said = (
        ["every kernel was measured on this machine's GPU", *slow_hosts(traces, recorded)]
        if pricing is None
        else notes(traces, pricing, _versions(run))
    )
    report.assumptions.extend(_note("note", sentence) for sentence in said)
    report.assumptions.extend(
        _note("op priced by its bytes alone", f"{name}, {share:.2%} of the time in kernels")
        for name, share in shares_of_guesses(traces).items()
    )
    report.timings["report"] = time.perf_counter() - composed
    return Analysis(composition, report)


def _executed(run: Run, cluster: Cluster) -> bool:
    """Whether the run's operations were executed, on the cluster's kind of accelerator."""
    if run.manifest.get("timing") != "execute":
        return False
    ran_on, target = run.manifest.get("executed_on"), cluster.accelerator.product
    if ran_on != target:
        raise UsageError(
            f"{run.path}: its operations were executed on {ran_on or 'a device that the manifest does not name'}, whose"
            f" times say nothing about {target}: trace the script with --timing profile for that cluster"
        )
    return True


def _compose(
    run: Run,
    cluster: Cluster,
    pricing: Pricing | None,
    model: CommunicationModel,
    folded: bool,
    slow_ranks: Mapping[int, float] | None,
    slowdowns: Slowdowns | None,
    variability: Variability,
    host_speed: float,
) -> Composition:
    """``pricing``: None where every operation was measured."""
    traces = list(run.traces.values())
    if pricing is not None:
        settle_host_times(traces)
    for trace in traces:
        trace.program.columns["host_us"] = trace.program.host_us / host_speed
        add_communication_calls(trace)

    def composed(step_us: float = 0.0, *, whole: bool = True) -> Composition:
        if pricing is not None:
            for trace in traces:
                fill_durations(trace, pricing, cluster.accelerators_per_node, step_us)
        return compose(
            run.world_size,
            run.groups,
            run.roles,
            run.traces,
            model,
            folded=folded,
            accelerators_per_node=cluster.accelerators_per_node,
            host_launch_us=0.0 if pricing is None else cluster.accelerator.host_launch_us,
            slow_ranks=slow_ranks,
            overlap=slowdowns,
            variability=variability if whole else None,
            slack=whole,
        )

    if pricing is None or all(slowdown_of_products(trace, pricing) == 1.0 for trace in traces):
        return composed()
    # The clock depends on how much of the step the device works: waits for others are only known once all is composed.
    first = composed(whole=False)
    return composed(first.step_time_us if first.timelines else 0.0)


def _host_note(factor: float, *, asked: bool, cluster: Cluster) -> str:
    if asked:
        return f"as asked for, host code runs {factor:g} times as fast as here"
    return (
        f"host code is taken to run {factor:.2f} times as fast as here: so much faster were Python and torch's"
        f" dispatcher on the host on which the profile of {cluster.accelerator.name} was recorded (--host-speed 1: as"
        " here)"
    )


def _versions(run: Run) -> dict[str, str]:
    versions = run.manifest.get("versions")
    return {str(name): str(v) for name, v in versions.items()} if isinstance(versions, dict) else {}


def _network_sources(model: CommunicationModel) -> list[str]:
    """Where the times of communication come from, and what a reader of them should know."""
    calibration = model.calibration
    return [f"communication calibrated by {calibration.name}: {calibration.source}"] * bool(
        calibration.scalings
    ) + list(model.notes)


def _overlap(report: Report, slowdowns: Slowdowns | None) -> list[str]:
    """Whether what runs together slows down, by what model, and how much came of it."""
    role = report.critical_role
    if slowdowns is None:
        return ["kernels and communication that run together do not slow each other down here, as asked for"]
    if role is None or not any(role.slowdown.values()):
        return []
    return [
        f"kernels and communication that run together slow each other down, {slowdowns.note}: per step"
        f" {role.slowdown['kernels']:.3g} ms of kernels, {role.slowdown['communication']:.3g} ms of communication on"
        " the critical rank"
    ]


def _host_work(run: Run, cluster: Cluster) -> list[str]:
    most = max((host_bytes(trace) / max(trace.steps, 1) for trace in run.traces.values()), default=0)
    if not most:
        return []
    node = cluster.accelerators_per_node
    return [
        f"the host's own work on large tensors (an optimizer on the CPU, say) moves {most / 1e9:.3g} GB a step and"
        f" rank; assumed: {HOST_BANDWIDTH_BYTES_PER_S / 1e9:.0f} GB/s for the {node} rank(s) of a node together"
    ]


def network_of(run: Run, cluster: Cluster, calibration: Calibration | None = None) -> CommunicationModel:
    """The library that the run's ranks communicate with, under the run's environment."""
    return CommunicationModel(cluster, environment=run.manifest.get("nccl_environment", {}), calibration=calibration)


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
