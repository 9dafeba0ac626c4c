"""echo-sim's commands on the network model alone: network, and its comparison with logs; calibrate."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.graph.problems import parse_rank_ranges
from echo_hooks.hardware.cluster import Cluster, load_cluster
from echo_hooks.hardware.units import parse_quantity
from echo_hooks.network.calibration import (
    Calibration,
    Key,
    load_calibration,
    shipped_calibration,
    write_calibration,
)
from echo_hooks.network.describe import describe
from echo_hooks.network.fit import MULTIPLIERS, Fit, fit
from echo_hooks.network.measured import Compared, compare, mean_errors
from echo_hooks.network.measurements import read_measurements
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.nccl_tables import DEFAULT_VERSION
from echo_hooks.network.sweeps import Sweep
from echo_hooks.report.quantities import bytes_text, decimal_text, duration_text, percent_text
from echo_hooks.report.sweep_plot import write_sweep_plot
from echo_hooks.report.text import heading, line, row, show, table

_MOST_POINTS_SHOWN = 80


def network(arguments: argparse.Namespace) -> int:
    """`echo-sim network`."""
    cluster = load_cluster(arguments.cluster)
    calibration = load_calibration(arguments.calibration) if arguments.calibration else None
    if arguments.compare:
        return _compare(arguments, cluster, calibration)
    missing = [f"--{name}" for name in ("collective", "ranks", "bytes") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} missing: say what to estimate, or --compare LOG what to check")
    if arguments.plot:
        raise UsageError(f"--plot {arguments.plot}: shows a comparison; give --compare LOG too")
    ranks = _ranks(arguments.ranks, cluster)
    size = int(parse_quantity(arguments.bytes, "bytes"))
    model = CommunicationModel(
        cluster,
        nccl_version=arguments.nccl_version or DEFAULT_VERSION,
        environment=library_variables(),
        calibration=calibration,
    )
    answer = describe(model, arguments.collective, ranks, size, dtype=arguments.dtype)
    if arguments.json:
        print(json.dumps({"cluster": cluster.name, **answer}, indent=1, allow_nan=False))
    else:
        _print_cost(answer, cluster, Console())
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    """`echo-sim calibrate LOG... -o FILE`."""
    cluster = load_cluster(arguments.cluster)
    sweeps, tables = _measurements(arguments, arguments.logs)
    if not sweeps:
        raise UsageError(f"{', '.join(map(str, arguments.logs))}: tuning tables, but no measured times to fit")
    fitted = fit(
        sweeps,
        cluster,
        nccl_version=arguments.nccl_version or "",
        name=arguments.output.stem,
        prior=_prior(arguments.prior, cluster),
        tables=tables,
    )
    write_calibration(fitted.calibration, arguments.output, "Made by echo-sim calibrate.")
    _print_fit(fitted, sweeps, cluster, arguments.output, Console())
    return 0


def library_variables() -> dict[str, str]:
    """The NCCL_* and HCCL_* variables of this shell: they steer the library's choices here as they do in the job."""
    return {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "HCCL_"))}


def _ranks(text: str, cluster: Cluster) -> tuple[int, ...]:
    try:
        ranks = parse_rank_ranges(text)
    except ValueError as error:
        raise UsageError(f"--ranks {text}: {error}") from None
    if max(ranks) >= cluster.world_size:
        raise UsageError(f"--ranks {text}: {cluster.name} has ranks 0 to {cluster.world_size - 1}")
    return ranks


def _measurements(arguments: argparse.Namespace, paths: Sequence[Path]):
    """Sweeps and tuning tables of ``paths``, with what the command line says and the files do not."""
    ranks = arguments.ranks if arguments.ranks is None else _count("--ranks", arguments.ranks)
    nodes = arguments.on_nodes if arguments.on_nodes is None else _count("--on-nodes", arguments.on_nodes)
    return read_measurements(paths, collective=arguments.collective, ranks=ranks, nodes=nodes)


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) < 9):
        raise UsageError(f"{option} {text}: how many the log was made on, a whole number from 1, is needed")
    return int(text)


def _prior(text: str, cluster: Cluster) -> Calibration | None:
    if text == "stock":
        return None
    return shipped_calibration(cluster.accelerator.name) if text == "shipped" else load_calibration(text)


# ---- what was fitted ----


def _print_fit(fitted: Fit, sweeps: list[Sweep], cluster: Cluster, path: Path, console: Console) -> None:
    calibration = fitted.calibration
    version = f"NCCL {calibration.nccl_version}" if calibration.nccl_version else "of an NCCL that the logs do not name"
    counted = f"{len(fitted.rows)} points of {len(sweeps)} sweep{'s' * (len(sweeps) != 1)}"
    line(console, f"{path}: {counted}, {version}, on {cluster.name}")
    for key in sorted(key for key in calibration.support if any(r.key[:3] == key[:3] for r in fitted.rows)):
        support, scaling = calibration.support[key], calibration.scalings[key]
        known = ", ".join(f"{_short(m)} {getattr(scaling, m):.2f}" for m in MULTIPLIERS if m in support.identified)
        rest = ", ".join(_short(m) for m in MULTIPLIERS if m not in support.identified)
        line(console, f"{_named(key)}: {support.points} points, off by {percent_text(support.error)}")
        line(console, f"    fitted: {known or 'nothing'}" + (f"; at the prior: {rest}" if rest else ""))
    heading(console, "mean error on what was fitted")
    _print_errors(compare_fitted(fitted, sweeps, cluster), console)
    for sentence in _remarks(fitted, sweeps, cluster):
        line(console, sentence)


def compare_fitted(fitted: Fit, sweeps: Sequence[Sweep], cluster: Cluster) -> list[Compared]:
    """The fit's own sweeps against it."""
    return compare(sweeps, cluster, fitted.calibration, nccl_version=fitted.calibration.nccl_version)


def _remarks(fitted: Fit, sweeps: list[Sweep], cluster: Cluster) -> list[str]:
    remarks = []
    if not fitted.calibration.nccl_version:
        remarks.append(f"the logs do not say which NCCL they are of: NCCL {DEFAULT_VERSION}'s choices were assumed")
    if fitted.calibration.tables:
        sizes = ", ".join(f"{t.ranks} ranks on {t.nodes} nodes" for t in fitted.calibration.tables)
        remarks.append(f"what runs is taken from the library's own table for {sizes}")
    if fitted.unused:
        remarks.append(f"left out: {fitted.unused} points whose time is that of the host's launches")
    remarks += [f"too few points to fit, at its prior: {_named(key)}" for key in fitted.too_few]
    for sweep in sweeps:
        if sweep.ranks < 2:
            remarks.append(f"left out: {sweep.where}: of one rank, which moves nothing")
        if sweep.rejected:
            where = f", the first in line {sweep.first_rejected}" if sweep.first_rejected else ""
            remarks.append(
                f"left out: {sweep.rejected} unreadable row{'s' * (sweep.rejected != 1)} of {sweep.source}{where}"
            )
        wrong = sweep.accelerator and not _is_of(sweep.accelerator, cluster)
        if wrong and sweep is sweeps[0]:
            remarks.append(
                f"mind: {sweep.where}: is of {sweep.accelerator}, {cluster.name} has {cluster.accelerator.name}"
            )
    nodes = max(sweep.nodes for sweep in sweeps)
    if cluster.nodes > 1 and nodes == 1:
        remarks.append("nothing was measured between nodes: that part stays at its prior")
    return list(dict.fromkeys(remarks))


def _is_of(device: str, cluster: Cluster) -> bool:
    """Whether a device's name, as a log has it, may be the cluster's accelerator."""
    ours = f"{cluster.accelerator.name} {cluster.accelerator.product}".lower()
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    models = [w for w in words if any(c.isdigit() for c in w) and any(c.isalpha() for c in w) and w[0].isalpha()]
    return not models or any(model in ours for model in models)


def _named(key: Key) -> str:
    scope, algorithm, protocol, collective = key
    where = "in a node" if scope == "node" else "between nodes"
    return f"{algorithm} {protocol} {where}" + (f", {collective}" if collective else "")


def _short(multiplier: str) -> str:
    return multiplier.removesuffix("_us").replace("_", "-")


# ---- measured beside predicted ----


def _compare(arguments: argparse.Namespace, cluster: Cluster, calibration: Calibration | None) -> int:
    sweeps, tables = _measurements(arguments, arguments.compare)
    if not sweeps:
        raise UsageError(f"{', '.join(map(str, arguments.compare))}: tuning tables, but no measured times to compare")
    # A log is of one run with its own variables, which it may name; this shell's are those of another job.
    compared = compare(sweeps, cluster, calibration, nccl_version=arguments.nccl_version or "", printed=tables)
    if not compared:
        raise UsageError(f"{sweeps[0].where}: of one rank, which moves nothing: there is nothing to compare")
    if arguments.plot:
        write_sweep_plot(compared, cluster.name, arguments.plot)
    if arguments.json:
        points = [
            {
                "source": c.sweep.source, "collective": c.sweep.collective, "ranks": c.sweep.ranks,
                "nodes": c.sweep.nodes, "clock": c.sweep.clock, "bytes": c.bytes, "measured_us": c.measured_us,
                "predicted_us": c.predicted_us, "error": c.error,
            }
            for c in compared
        ]  # fmt: skip
        content = {"cluster": cluster.name, "mean_errors": mean_errors(compared), "points": points}
        print(json.dumps(content, indent=1, allow_nan=False))
        return 0
    console = Console()
    if len(compared) <= _MOST_POINTS_SHOWN:
        _print_points(compared, console)
        line(console)
    _print_errors(compared, console)
    if len(compared) > _MOST_POINTS_SHOWN:
        line(console, f"{len(compared)} points; --json has each, --plot FILE.html shows them")
    return 0


def _print_points(compared: Sequence[Compared], console: Console) -> None:
    cells = table("sweep", "bytes", "measured", "predicted", "off by")
    last = None
    for c in compared:
        name = c.sweep.label if c.sweep is not last else ""
        measured, predicted = duration_text(c.measured_us / 1e3), duration_text(c.predicted_us / 1e3)
        row(cells, name, bytes_text(c.bytes), measured, predicted, f"{100 * c.error:+.1f} %")
        last = c.sweep
    show(console, cells)


def _print_errors(compared: Sequence[Compared], console: Console) -> None:
    """Mean absolute errors by sweep and over all, by range of sizes."""
    cells = table("sweep", "points", "all", "< 64 KiB", "< 1 MiB", "above")
    by_sweep: dict[int, list[Compared]] = {}
    for c in compared:
        by_sweep.setdefault(id(c.sweep), []).append(c)
    for points in by_sweep.values():
        _error_row(cells, points[0].sweep.label, points)
    if len(by_sweep) > 1:
        _error_row(cells, "together", compared)
    show(console, cells)


def _error_row(cells, name: str, compared: Sequence[Compared]) -> None:
    errors = mean_errors(compared).values()
    row(cells, name, str(len(compared)), *("-" if e is None else f"{100 * e:.1f} %" for e in errors))


# ---- one collective ----


def _print_cost(answer: dict[str, Any], cluster: Cluster, console: Console) -> None:
    placement, count = answer["placement"], len(answer["ranks"])
    line(console, f"{answer['collective']} of {bytes_text(answer['bytes'])} ({answer['dtype']}), {count} ranks on")
    line(console, f"{placement['nodes']} node{'s' if placement['nodes'] != 1 else ''} of {cluster.name}")
    rows = table("", "", left=2)
    rows.show_header = False
    by = f"{answer['algorithm']}, {answer['protocol']}, {answer['channels']} channels"
    low, high = (duration_text(answer[f"duration_{p}_us"] / 1e3) for p in ("p10", "p90"))
    row(rows, "time", f"{duration_text(answer['duration_us'] / 1e3)} ({answer['evidence']}; {low} to {high})")
    row(rows, "of it latency", duration_text(answer["latency_us"] / 1e3))
    row(rows, "algbw", decimal_text(answer["algorithm_bandwidth_gb_per_s"] * 1e9, "B/s"))
    row(rows, "busbw", decimal_text(answer["bus_bandwidth_gb_per_s"] * 1e9, "B/s"))
    library = "HCCL" if cluster.accelerator.vendor == "huawei" else f"NCCL {answer['nccl_version']}"
    row(rows, "by", f"{by} ({library})")
    calibration = answer["calibration"]
    row(rows, "calibration", f"{calibration['name']}, {calibration['points']} points of what runs here")
    show(console, rows)
    for note in answer["notes"]:
        line(console, f"note: {note}")
    if answer["resources"]:
        heading(console, f"fullest links ({len(answer['resources'])} of {answer['resources_in_all']})")
        links = table("link", "moves", "capacity", "busy")
        for link in answer["resources"]:
            capacity = decimal_text(link["capacity_gb_per_s"] * 1e9, "B/s")
            row(links, link["name"], bytes_text(link["bytes"]), capacity, percent_text(link["busy_share"]))
        show(console, links)
