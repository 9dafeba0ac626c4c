"""The report of one simulated job: what report.json holds, built from the run and its composition."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from echo_hooks.compose.result import Breakdown, Composition, Timeline
from echo_hooks.errors import UsageError
from echo_hooks.graph.files import read_json
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import Run
from echo_hooks.report.activity import CommunicationRow, ComputeRow, communication_rows, compute_by_class
from echo_hooks.report.host_memory import host_memory, host_problem, host_text
from echo_hooks.report.quantities import bytes_text, ranks_text
from echo_hooks.report.utilisation import utilisation

if TYPE_CHECKING:
    from echo_hooks.hardware.cluster import Cluster

REPORT_FORMAT = 1
# What a finished simulation leaves in its run directory beside the traces.
TIMELINE_FILE, PERFETTO_FILE = "timeline.parquet", "timeline.perfetto.json.gz"
PAGE_FILE, REPORT_FILE = "report.html", "report.json"
NO_BAND = "no band is computed for the step time: it takes more simulations than one of this size leaves time for"
KINDS_OF_TRUTH = ("measured", "profiled", "modelled", "assumed")


@dataclass
class RoleReport:
    """One role. ``breakdown`` and ``communication`` are those of ``busiest_rank``, the role's rank with the most work.

    ``proven``: ranks that were traced and found equal; the rest of ``ranks`` is assumed equal, for the reason ``why``.
    ``compute``: kernel time by class of operation, of the same rank.
    ``extra_bytes``: device memory that no tensor holds, by name. ``fits``: peak_reserved_bytes and extra_bytes together
    are within ``capacity_bytes``. ``slowdown``: ms per step by which the "kernels" and the "communication" of
    ``busiest_rank`` take longer than each alone, because they run together or share links; the kernels' is within the
    breakdown's compute. ``host_peak_bytes``: what one rank's large CPU tensors take of its node's memory at most;
    ``host_pinned_bytes``: page-locked of it.
    """

    name: str
    ranks: list[int]
    traced_rank: int
    proven: list[int]
    why: str
    step_time_ms: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    extra_bytes: dict[str, int]
    capacity_bytes: int
    fits: bool
    held_at_peak: dict[str, int] = field(default_factory=dict)
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    critical: bool = False
    busiest_rank: int | None = None
    breakdown: dict[str, Any] | None = None
    communication: list[CommunicationRow] = field(default_factory=list)
    compute: list[ComputeRow] = field(default_factory=list)
    slowdown: dict[str, float] = field(default_factory=dict)
    host_peak_bytes: int = 0
    host_pinned_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.peak_reserved_bytes + sum(self.extra_bytes.values())


@dataclass
class Report:
    """The top level of report.json. Times in ms, None (null) where a number is not known.

    ``breakdown``: of the critical rank, parts that sum to its step. ``evidence``: share of the critical path (0 to 1)
    by kind of truth. ``assumptions``: ``kind``, ``value``, ``site``, ``count``, ``ranks`` (traced ranks it was seen
    on); what Echo has to say about its own numbers is there too, as kind "note". ``problems``: ``kind``, ``message``,
    ``ranks``, ``site``. ``timings``: seconds of real time. ``moe``: with --moe-skew its ``skew`` and the figures of a
    ``balanced`` load of experts (``step_time_ms``, ``peak_reserved_bytes``), the other end of the range. ``host``:
    the node whose ranks take most of its memory (`report.host_memory`), None where none is known to take any.
    """

    format: int
    step_time_ms: float | None
    step_time_p10_ms: float | None
    step_time_p90_ms: float | None
    world_size: int
    cluster: dict[str, Any]
    tokens_per_second: float | None
    model_flops_per_step: int | None
    mfu: float | None
    breakdown: dict[str, Any] | None
    roles: list[RoleReport]
    evidence: dict[str, float]
    assumptions: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    timings: dict[str, float]
    moe: dict[str, Any] | None = None
    host: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        """As `print_report` shows it, in plain text."""
        from echo_hooks.report.terminal import print_report  # it builds on this module

        out = io.StringIO()
        print_report(self, Console(file=out, width=80, force_terminal=False, color_system=None))
        return out.getvalue()

    @property
    def critical_role(self) -> RoleReport | None:
        return next((role for role in self.roles if role.critical), None)


def build_report(run: Run, composition: Composition, cluster: Cluster, *, timings: dict[str, float]) -> Report:
    """Put the run and its composition into one report. ``timings``: seconds spent, by "trace", "compose", "report"."""
    step_us = composition.step_time_us if composition.timelines and math.isfinite(composition.step_time_us) else None
    band = composition.band
    work = utilisation(run, cluster.accelerator, step_us)
    tokens = _tokens_per_step(run)
    roles = [_role_report(run, role, composition, cluster) for role in run.roles]
    critical = composition.timelines[composition.critical] if composition.timelines else None
    problems = [*composition.problems, *(_out_of_memory(role) for role in roles if not role.fits)]
    host = host_memory(run, cluster)
    no_room = host_problem(host)
    if no_room is not None:
        problems.append(no_room)
    return Report(
        format=REPORT_FORMAT,
        step_time_ms=None if step_us is None else step_us / 1e3,
        step_time_p10_ms=None if step_us is None or band is None else band.p10_us / 1e3,
        step_time_p90_ms=None if step_us is None or band is None else band.p90_us / 1e3,
        world_size=run.world_size,
        cluster=_cluster(cluster),
        tokens_per_second=tokens / (step_us * 1e-6) if tokens is not None and step_us else None,
        model_flops_per_step=work.flops_per_step or None,
        mfu=work.mfu,
        breakdown=_breakdown_ms(critical.breakdown) if critical else None,
        roles=roles,
        evidence={kind: float(composition.evidence.get(kind, 0.0)) for kind in KINDS_OF_TRUTH} if critical else {},
        assumptions=_assumptions(run) + _notes(run, composition, work.notes),
        problems=[asdict(problem) | {"ranks": list(problem.ranks)} for problem in problems],
        timings={
            "trace": sum(trace.trace_seconds for trace in run.traces.values()),
            "compose": composition.seconds,
            **timings,
        },
        moe=run.manifest["moe"] if isinstance(run.manifest.get("moe"), dict) else None,
        host=host,
    )


def _tokens_per_step(run: Run) -> int | None:
    """Of the whole job, where the launcher could tell."""
    tokens = run.manifest.get("tokens_per_step")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _cluster(cluster: Cluster) -> dict[str, Any]:
    accelerator = cluster.accelerator
    return {
        "name": cluster.name,
        "accelerator": accelerator.name,
        "product": accelerator.product,
        "nodes": cluster.nodes,
        "accelerators_per_node": cluster.accelerators_per_node,
        "memory_bytes": accelerator.memory_bytes,
    }


def _role_report(run: Run, role: Role, composition: Composition, cluster: Cluster) -> RoleReport:
    capacity = cluster.accelerator.memory_bytes
    memory = role.memory
    report = RoleReport(
        name=role.name,
        ranks=list(role.ranks),
        traced_rank=role.traced_rank,
        proven=list(role.proven),
        why=role.why,
        step_time_ms=None,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        extra_bytes=dict(memory.extra),
        capacity_bytes=capacity,
        fits=memory.peak_reserved_bytes + sum(memory.extra.values()) <= capacity,
        held_at_peak=dict(memory.held_at_peak),
        peak_by_phase=dict(memory.peak_by_phase),
        host_peak_bytes=memory.host_peak_bytes,
        host_pinned_bytes=memory.host_pinned_bytes,
    )
    timelines = [t for t in composition.timelines if t.role == role.name]
    if timelines:
        critical = composition.timelines[composition.critical]
        report.critical = critical.role == role.name
        busiest = critical if report.critical else max(timelines, key=_busy_us)
        trace = run.traces[role.traced_rank]
        report.step_time_ms = max(t.breakdown.step_us for t in timelines) / 1e3
        report.busiest_rank = busiest.representative
        report.breakdown = _breakdown_ms(busiest.breakdown)
        report.slowdown = _slowdown_ms(busiest, trace.steps)
        report.communication = communication_rows(busiest, trace.ops, run.groups, trace.steps)
        report.compute = compute_by_class(busiest, trace.ops, trace.steps)
    return report


def _busy_us(timeline: Timeline) -> float:
    return timeline.breakdown.compute_us + sum(timeline.breakdown.exposed_communication_us.values())


def _breakdown_ms(breakdown: Breakdown) -> dict[str, Any]:
    """The keys of report.json, in milliseconds; they sum to the rank's step."""
    exposed = breakdown.exposed_communication_us
    return {
        "compute": breakdown.compute_us / 1e3,
        "exposed_communication": {name: exposed[name] / 1e3 for name in sorted(exposed)},
        "bubble": breakdown.bubble_us / 1e3,
        "waiting": breakdown.waiting_us / 1e3,
        "host": breakdown.host_us / 1e3,
    }


def _slowdown_ms(timeline: Timeline, steps: int) -> dict[str, float]:
    """Time taken beyond the time alone, summed over kernels and over communication, a step."""
    kind = timeline.program.kind
    began = np.where(np.isnan(timeline.ready_us), timeline.start_us, timeline.ready_us)
    with np.errstate(invalid="ignore"):
        longer = np.nan_to_num((timeline.end_us - began) * (1.0 - 1.0 / timeline.slowdown))
    local = (kind == Kind.COMPUTE) | (kind == Kind.COPY)
    calls = (kind == Kind.COLLECTIVE) | (kind == Kind.SEND) | (kind == Kind.RECV)
    return {
        "kernels": float(longer[local].sum()) / steps / 1e3,
        "communication": float(longer[calls].sum()) / steps / 1e3,
    }


def _out_of_memory(role: RoleReport) -> Problem:
    extra = ", ".join(f"{name} {bytes_text(size)}" for name, size in sorted(role.extra_bytes.items()) if size)
    held = sorted(role.held_at_peak.items(), key=lambda item: (-item[1], item[0]))
    message = (
        f"{role.name} ({ranks_text(role.ranks)}) needs {bytes_text(role.needed_bytes)}"
        f" of {bytes_text(role.capacity_bytes)}: {bytes_text(role.peak_reserved_bytes)} reserved by the allocator"
        f"{f', {extra}' if extra else ''}"
    )
    if held and held[0][1]:
        message += f"; most at the peak is held by {held[0][0]} ({bytes_text(held[0][1])})"
    if role.peak_by_phase:
        message += f"; the peak is in {max(sorted(role.peak_by_phase), key=lambda p: role.peak_by_phase[p])}"
    return Problem("out_of_memory", message, tuple(role.ranks))


def _assumptions(run: Run) -> list[dict[str, Any]]:
    """Made-up values of all traced ranks, the most frequent first."""
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for rank in sorted(run.traces):
        for a in run.traces[rank].assumptions:
            empty = {"kind": a.kind, "value": a.value, "site": a.site, "count": 0, "ranks": []}
            entry = merged.setdefault((a.kind, a.value, a.site), empty)
            entry["count"] += a.count
            entry["ranks"].append(rank)
    return sorted(merged.values(), key=lambda a: (-a["count"], a["kind"], a["site"], a["value"]))


def _notes(run: Run, composition: Composition, flops_notes: list[str]) -> list[dict[str, Any]]:
    """What the report has to say about its own numbers, one sentence each."""
    sentences: dict[str, list[int]] = {}
    assumed = sorted(rank for role in run.roles for rank in set(role.ranks) - set(role.proven) - {role.traced_rank})
    if assumed:
        sentences[f"not traced, but assumed to run their role's program: {ranks_text(assumed)}"] = []
    if not any(role.memory.extra for role in run.roles):
        sentences["needed memory leaves out context, communicators and library workspaces: no estimate was made"] = []
    if composition.timelines:
        band = composition.band
        sentences[band.basis if band is not None and band.basis else NO_BAND] = []
        for sentence in [*composition.notes, *flops_notes]:
            sentences[sentence] = []
    declared = run.manifest.get("assumptions")
    for item in declared if isinstance(declared, list) else []:
        sentences[item if isinstance(item, str) else json.dumps(item, sort_keys=True)] = []
    for rank in sorted(run.traces):
        for sentence in run.traces[rank].notes:
            sentences.setdefault(sentence, []).append(rank)
    return [{"kind": "note", "value": s, "site": "", "count": 1, "ranks": ranks} for s, ranks in sentences.items()]


# ---- reading a saved report ----


def read_report(path: Path) -> Report:
    """Read report.json back; UsageError when it is missing, damaged, or of another format."""
    value = read_json(path)
    if value.get("format") != REPORT_FORMAT:
        raise UsageError(f"{path}: format {value.get('format')!r}, this Echo reads {REPORT_FORMAT}")
    try:
        roles = [
            RoleReport(
                **{
                    **role,
                    "communication": [CommunicationRow(**row) for row in role["communication"]],
                    "compute": [ComputeRow(**row) for row in role.get("compute", [])],
                }
            )
            for role in value["roles"]
        ]
        value.setdefault("host", None)  # reports of before it was known have none
        report = Report(**{f.name: value[f.name] for f in fields(Report)} | {"roles": roles})
        _check(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not a report of Echo ({error!r})") from None
    return report


_NUMBER = (int, float)
_OPTIONAL = ("step_time_ms", "step_time_p10_ms", "step_time_p90_ms", "tokens_per_second", "model_flops_per_step", "mfu")


def _check(report: Report) -> None:
    """TypeError or KeyError where a value is not what printing it relies on."""
    for name in _OPTIONAL:
        if getattr(report, name) is not None and not isinstance(getattr(report, name), _NUMBER):
            raise TypeError(f"{name} is no number")
    for part in (report.breakdown, *(role.breakdown for role in report.roles)):
        if part is not None:
            numbers = [part[k] for k in ("compute", "bubble", "waiting", "host")]
            numbers += part["exposed_communication"].values()
            if not all(isinstance(n, _NUMBER) for n in numbers):
                raise TypeError("a part of the breakdown is no number")
    for role in report.roles:
        if not all(isinstance(n, int) for n in (role.needed_bytes, role.peak_allocated_bytes, role.capacity_bytes)):
            raise TypeError("a memory size is no whole number")
    if report.host is not None:
        host_text(report.host)
    for assumption in report.assumptions:
        _ = assumption["kind"], assumption["value"], assumption["site"], int(assumption["count"])
    for problem in report.problems:
        _ = problem["kind"], problem["message"], problem["ranks"], problem["site"]
    _ = [float(share) for share in report.evidence.values()], [float(s) for s in report.timings.values()]
    _ = report.cluster["name"], report.cluster["product"], int(report.cluster["memory_bytes"])
