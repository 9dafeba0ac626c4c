"""echo-sim's commands on a run directory: report, trace, memory, compose, compare."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from echo_hooks.device_memory import add_extra_memory
from echo_hooks.errors import UsageError
from echo_hooks.graph.files import atomic_write
from echo_hooks.graph.problems import BROKEN_PLAN
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import Run, read_groups, read_run
from echo_hooks.hardware.cluster import Cluster, load_cluster
from echo_hooks.network.calibration import load_calibration
from echo_hooks.overlap.slowdowns import checked
from echo_hooks.report.comparison import compare as compare_with
from echo_hooks.report.comparison import print_comparison
from echo_hooks.report.files import write_files
from echo_hooks.report.host_memory import host_memory, host_text
from echo_hooks.report.measured import read_measured
from echo_hooks.report.memory import print_memory
from echo_hooks.report.perfetto import write_perfetto
from echo_hooks.report.quantities import bytes_text, duration_text, percent_text
from echo_hooks.report.report import PERFETTO_FILE, REPORT_FILE, Report, read_report
from echo_hooks.report.terminal import print_report
from echo_hooks.report.text import line, row, show, table
from echo_launch.timing import parse_profiles
from echo_launch.variations import parse_host_speed, parse_jitter, parse_slow

if TYPE_CHECKING:
    from echo_hooks.analysis import Analysis


def report(arguments: argparse.Namespace) -> int:
    """`echo-sim report RUN`."""
    found = _report_of(arguments.run)
    if arguments.json:
        print(found.to_json(), end="")
    else:
        print_report(found, Console(), directory=arguments.run)
    return exit_status(found)


def trace(arguments: argparse.Namespace) -> int:
    """`echo-sim trace RUN -o FILE`."""
    saved = arguments.run / PERFETTO_FILE
    zipped = arguments.output.suffix == ".gz"
    if arguments.cluster is None and saved.is_file():
        try:
            data = saved.read_bytes()
            atomic_write(arguments.output, data if zipped else gzip.decompress(data))
        except (EOFError, gzip.BadGzipFile) as error:
            raise UsageError(f"{saved}: damaged ({error})") from None
    else:
        run = read_run(arguments.run)
        write_perfetto(arguments.output, run, _analyse(run, _cluster(run, arguments.cluster)).composition)
    print(f"{arguments.output}: open it at https://ui.perfetto.dev")
    return 0


def memory(arguments: argparse.Namespace) -> int:
    """`echo-sim memory RUN`."""
    from echo_hooks.analysis import network_of

    run = read_run(arguments.run)
    if run.manifest.get("cluster"):
        cluster = _cluster(run, None)
        add_extra_memory(run, cluster.accelerator, network_of(run, cluster))
        host = host_memory(run, cluster)
    else:
        host = None
    console = Console()
    for role in _roles(run, arguments.role):
        print_memory(role, run.traces[role.traced_rank], console)
    if host is not None:
        line(console, host_text(host))
    return 0


def compose(arguments: argparse.Namespace) -> int:
    """`echo-sim compose RUN --cluster ...`; 3 when the plan works on none of the clusters."""
    clusters = arguments.cluster
    if arguments.output is not None and len(clusters) > 1:
        raise UsageError(f"-o {arguments.output}: one directory holds one cluster's report; {len(clusters)} were given")
    jitter, host_speed = parse_jitter(arguments.jitter), parse_host_speed(arguments.host_speed)
    if arguments.seed < 0:
        raise UsageError(f"--seed {arguments.seed}: a whole number from 0 is needed")
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
    profiles = parse_profiles(arguments.timing, arguments.profiles)
    overlap = checked(arguments.overlap)
    reports = []
    for text in clusters:
        run = read_run(arguments.run)  # anew for each: durations are filled in place
        described = _cluster(run, text)
        slow = parse_slow(arguments.slow_node, arguments.slow_rank, run.world_size, described.accelerators_per_node)
        analysis = _analyse(
            run,
            described,
            folded=not arguments.unfolded,
            slow_ranks=slow,
            jitter=jitter,
            seed=arguments.seed,
            host_speed=host_speed,
            calibration=calibration,
            timing=arguments.timing,
            profiles=profiles,
            overlap=overlap,
        )
        reports.append(analysis.report)
        if arguments.output is not None:
            write_files(arguments.output, run, analysis.composition, analysis.report)
    if arguments.json:
        dicts = [r.to_dict() for r in reports]
        print(json.dumps(dicts if len(dicts) > 1 else dicts[0], indent=1, allow_nan=False))
    elif len(reports) == 1:
        print_report(reports[0], Console(), directory=arguments.output)
    else:
        _print_side_by_side(reports, Console())
    return min(exit_status(r) for r in reports)  # one cluster that works is an answer


def compare(arguments: argparse.Namespace) -> int:
    """`echo-sim compare RUN MEASURED...`."""
    found = _report_of(arguments.run)
    comparison = compare_with(found, read_measured(arguments.measured, read_groups(arguments.run)))
    if arguments.json:
        print(json.dumps(comparison.to_dict(), indent=1, allow_nan=False))
    else:
        print_comparison(comparison, Console())
    return 0


def exit_status(report: Report) -> int:
    """3 when the report says that the plan does not work."""
    return 3 if any(problem["kind"] in BROKEN_PLAN for problem in report.problems) else 0


def _report_of(directory: Path) -> Report:
    """The saved report, or one composed now for the cluster that the run was made for."""
    if (directory / REPORT_FILE).is_file():
        return read_report(directory / REPORT_FILE)
    run = read_run(directory)
    return _analyse(run, _cluster(run, None)).report


def _cluster(run: Run, text: str | None) -> Cluster:
    """The cluster named by ``text``, else the one that the run was made for; UsageError when the run does not fit."""
    name = text if text is not None else run.manifest.get("cluster")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{run.path}/manifest.json names no cluster; say one: echo-sim compose RUN --cluster ...")
    described = load_cluster(name)
    if described.world_size < run.world_size:
        raise UsageError(f"cluster {name} has {described.world_size} accelerators, the run has {run.world_size} ranks")
    return described


def _analyse(run: Run, cluster: Cluster, **options: Any) -> Analysis:
    from echo_hooks.analysis import analyse  # late: the engine's compiled parts take a second to load

    return analyse(run, cluster, **options)


def _roles(run: Run, wanted: str | None) -> list[Role]:
    if wanted is None:
        return run.roles
    found = [role for role in run.roles if role.name == wanted]
    if not found and wanted.isdecimal():
        found = [role for role in run.roles if int(wanted) in role.ranks]
    if not found:
        names = ", ".join(repr(role.name) for role in run.roles)
        raise UsageError(f"--role {wanted}: no such role or rank; roles: {names}; ranks: 0 to {run.world_size - 1}")
    return found


def _print_side_by_side(reports: list[Report], console: Console) -> None:
    cells = table("cluster", "step time", "compute", "exposed", "MFU", "tokens/s", "memory", left=1)
    for r in reports:
        parts = r.breakdown or {}
        exposed = sum(parts["exposed_communication"].values()) if parts else None
        row(
            cells,
            r.cluster["name"],
            duration_text(r.step_time_ms),
            duration_text(parts.get("compute")),
            duration_text(exposed),
            "-" if r.mfu is None else percent_text(r.mfu),
            "-" if r.tokens_per_second is None else f"{r.tokens_per_second:.0f}",
            bytes_text(max((role.needed_bytes for role in r.roles), default=0)) if exit_status(r) == 0 else "see below",
        )
    show(console, cells)
    line(console, "simulated; compute and exposed communication are those of the critical rank, memory of the fullest")
    for r in reports:
        if r.step_time_p10_ms is not None and r.step_time_p90_ms is not None:
            band = f"{duration_text(r.step_time_p10_ms)} to {duration_text(r.step_time_p90_ms)}"
            line(console, f"{r.cluster['name']}: P10 to P90 of the step time {band}")
        for problem in r.problems[:1]:
            more = f" (and {len(r.problems) - 1} more)" if len(r.problems) > 1 else ""
            line(console, f"{r.cluster['name']}: {problem['kind']}: {problem['message']}{more}")
