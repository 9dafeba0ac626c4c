"""From a traced run to its answer: durations, communication, composition, report."""

from __future__ import annotations

import time
from dataclasses import dataclass

from echo_hooks.compose import compose
from echo_hooks.compose.result import Composition
from echo_hooks.graph.rundir import Run
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.model import CommunicationModel
from echo_hooks.report.report import Report, build_report
from echo_hooks.timing import fill_durations
from echo_hooks.timing.host import settle_host_times


@dataclass(frozen=True)
class Analysis:
    composition: Composition
    report: Report


def analyse(run: Run, cluster: Cluster, *, folded: bool = True) -> Analysis:
    """Compose ``run`` on ``cluster`` (of at least its world size) and report on it."""
    began = time.perf_counter()
    settle_host_times(list(run.traces.values()))
    unpriced = sorted({name for trace in run.traces.values() for name in fill_durations(trace, cluster.accelerator)})
    network = CommunicationModel(cluster, environment=run.manifest.get("nccl_environment", {}))
    composition = compose(
        run.world_size,
        run.groups,
        run.roles,
        run.traces,
        network,
        folded=folded,
        accelerators_per_node=cluster.accelerators_per_node,
        host_launch_us=cluster.accelerator.host_launch_us,
    )
    composed = time.perf_counter()
    timings = {
        "trace": sum(trace.trace_seconds for trace in run.traces.values()),
        "compose": composed - began,
        "report": 0.0,
    }
    report = build_report(run, composition, cluster, timings=timings)
    for name in unpriced:
        report.assumptions.append({"kind": "op priced by its bytes alone", "value": name, "site": "", "count": 1})
    report.timings["report"] = time.perf_counter() - composed
    return Analysis(composition, report)
