"""The report as text: what a person reads at the end of a simulation. Plain lines where the output is no terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo_hooks.graph.problems import BROKEN_PLAN, rank_ranges
from echo_hooks.report.host_memory import host_text
from echo_hooks.report.quantities import bytes_text, decimal_text, decimals_for, duration_text, percent_text
from echo_hooks.report.report import PAGE_FILE, PERFETTO_FILE, Report, RoleReport
from echo_hooks.report.text import heading, line, row, show, table

TOP_ASSUMPTIONS = 10
TOP_COMMUNICATION = 15
ROLES_A_TABLE = 3
MAX_ROLES = 6
TOP_PROBLEMS = 10


def print_report(report: Report, console: Console, *, directory: Path | None = None) -> None:
    """Print the report, problems first. ``directory``: the run directory, named with its files at the end."""
    _print_problems(report, console)
    _print_headline(report, console)
    if report.breakdown:
        _print_breakdown(report, console)
        _print_communication(report, console)
    _print_memory(report, console)
    _print_assumptions(report, console)
    _print_end(report, console, directory)


# ---- headline ----


def _print_problems(report: Report, console: Console) -> None:
    for problem in report.problems[:TOP_PROBLEMS]:
        fatal = problem["kind"] in BROKEN_PLAN
        where = f" [{problem['site']}]" if problem["site"] else ""
        line(console, f"{problem['kind'].upper()}: {problem['message']}{where}", "bold red" if fatal else "yellow")
    if len(report.problems) > TOP_PROBLEMS:
        line(console, f"{len(report.problems) - TOP_PROBLEMS} more problems in report.json")
    if report.problems:
        line(console)


def _print_headline(report: Report, console: Console) -> None:
    for name, text in headline(report):
        line(console, f"{name:<11} {text}")


def headline(report: Report) -> list[tuple[str, str]]:
    """The first lines of every form of the report: (name, text)."""
    return [
        ("step time", _step_time(report)),
        ("cluster", _cluster(report)),
        ("ranks", _ranks(report)),
        ("throughput", _throughput(report)),
        ("FLOPs", _flops(report)),
        ("evidence", _evidence(report)),
    ]


def _step_time(report: Report) -> str:
    if report.step_time_ms is None:
        return "none: the plan does not get through a step"
    if report.step_time_p10_ms is None or report.step_time_p90_ms is None:
        return f"{duration_text(report.step_time_ms)}  (simulated; no band is computed)"
    band = f"{duration_text(report.step_time_p10_ms)} to {duration_text(report.step_time_p90_ms)}"
    return f"{duration_text(report.step_time_ms)}  (simulated; P10 to P90 {band}, see notes)"


def _cluster(report: Report) -> str:
    cluster = report.cluster
    what = f"{cluster['nodes']} x {cluster['accelerators_per_node']} {cluster['product']}"
    return f"{cluster['name']}  ({what}, {bytes_text(cluster['memory_bytes'])} each)"


def _throughput(report: Report) -> str:
    if report.tokens_per_second is None:
        return "tokens per second unknown"
    each = decimal_text(report.tokens_per_second / report.world_size, "tokens/s")
    return f"{decimal_text(report.tokens_per_second, 'tokens/s')}, {each} per accelerator"


def _ranks(report: Report) -> str:
    traced = {role.traced_rank for role in report.roles}
    proven = {rank for role in report.roles for rank in role.proven} - traced
    assumed = {rank for role in report.roles for rank in role.ranks} - traced - proven
    text = f"{report.world_size} in {len(report.roles)} role{'s' if len(report.roles) != 1 else ''};"
    text += f" traced {rank_ranges(traced)}"
    if proven:
        text += f"; traced and proven equal {rank_ranges(proven)}"
    if assumed:
        text += f"; assumed equal {len(assumed)}"
    return text


def _flops(report: Report) -> str:
    if not report.model_flops_per_step:
        return "none counted"
    text = f"{decimal_text(report.model_flops_per_step, 'FLOP')} a step over all ranks"
    return f"{text}, MFU {percent_text(report.mfu)}" if report.mfu is not None else text


def _evidence(report: Report) -> str:
    parts = [f"{kind} {percent_text(share)}" for kind, share in report.evidence.items() if share > 0]
    return f"{', '.join(parts)} of the critical path" if parts else "none: nothing was composed"


# ---- where the time goes ----


def _print_breakdown(report: Report, console: Console) -> None:
    roles = [role for role in report.roles if role.breakdown]
    shown = select_roles(roles)
    for first in range(0, len(shown), ROLES_A_TABLE):
        chunk = shown[first : first + ROLES_A_TABLE]
        heading(console, "Where one step goes, in ms" + (" (continued)" if first else ""))
        cells = table("", *(column for role in chunk for column in (_role_header(role), "%")))
        slowed = [role.slowdown.get("kernels", 0.0) for role in chunk]
        _breakdown_rows(cells, [role.breakdown for role in chunk if role.breakdown], slowed, report.step_time_ms)
        show(console, cells)
    if len(shown) < len(roles):
        line(console, f"{len(roles) - len(shown)} more roles in report.json")
    line(console, "*: the critical rank; exposed: data moves and nothing computes; bubble: a send or recv")
    line(console, "waits for its partner; waiting: a collective waits for its last member; host: the device is idle")


def _role_header(role: RoleReport) -> str:
    name = textwrap.shorten(role.name, 36, placeholder="...") or role.name[:36]
    rank = f"rank {role.busiest_rank}" + ("*" if role.critical else "")
    return "\n".join([*textwrap.wrap(name, 12), rank])


def _breakdown_rows(cells: Table, parts: list[dict[str, Any]], slowed: list[float], step_ms: float | None) -> None:
    """``slowed``: what kernels lose to communication beside them, a part of compute and so in no sum."""
    decimals = decimals_for(step_ms)
    groups = sorted({name for part in parts for name in part["exposed_communication"]})
    rows = [("compute", [p["compute"] for p in parts])]
    rows += [(f"exposed {name}", [p["exposed_communication"].get(name, 0.0) for p in parts]) for name in groups]
    rows += [
        ("bubble", [p["bubble"] for p in parts]),
        ("waiting", [p["waiting"] for p in parts]),
        ("host", [p["host"] for p in parts]),
    ]
    totals = [sum(values[i] for _, values in rows) for i in range(len(parts))]
    if any(slowed):
        rows.insert(1, ("of it slowdown", slowed))
    for label, values in [*rows, ("step", totals)]:
        numbers: list[str] = []
        for value, total in zip(values, totals):
            numbers += [f"{value:.{decimals}f}", f"{100 * value / total:.1f}" if total else "-"]
        row(cells, label, *numbers, style="bold" if label == "step" else "")


def select_roles(roles: list[RoleReport], most: int = MAX_ROLES) -> list[RoleReport]:
    """At most ``most`` of them, in order: first, last, critical, the fullest, then evenly between."""
    if len(roles) <= most:
        return roles
    wanted = [0, len(roles) - 1, *(i for i, role in enumerate(roles) if role.critical)]
    wanted.append(max(range(len(roles)), key=lambda i: roles[i].needed_bytes))
    wanted += [round(i * (len(roles) - 1) / (most - 1)) for i in range(most)]
    return [roles[i] for i in sorted(list(dict.fromkeys(wanted))[:most])]


def _print_communication(report: Report, console: Console) -> None:
    role = report.critical_role
    if role is None or not role.communication:
        return
    heading(console, f"Communication of rank {role.busiest_rank} in one step (modelled)")
    cells = table("group (size)", "operation", "calls", "payload", "ms", "exposed", "waiting", "busbw", left=2)
    decimals = decimals_for(report.step_time_ms)
    for entry in role.communication[:TOP_COMMUNICATION]:
        busbw = "-" if entry.busbw_bytes_per_s is None else f"{entry.busbw_bytes_per_s / 1e9:.1f}"
        row(
            cells,
            f"{entry.group} ({entry.size})",
            entry.operation,
            f"{entry.calls:g}",
            bytes_text(entry.bytes),
            *(f"{value:.{decimals}f}" for value in (entry.time_ms, entry.exposed_ms, entry.waiting_ms)),
            busbw,
        )
    show(console, cells)
    if len(role.communication) > TOP_COMMUNICATION:
        line(console, f"{len(role.communication) - TOP_COMMUNICATION} more rows in report.json")
    line(console, "ms: data moves (rows may overlap); exposed: of that, not under compute; waiting: for the last")
    line(console, "member; payload as nccl-tests counts it, over all calls; busbw in GB/s")


# ---- memory ----


def _print_memory(report: Report, console: Console) -> None:
    heading(console, "Peak memory per rank in GiB (allocator and extra modelled)")
    cells = table("role", "ranks", "allocated", "reserved", "extra", "needed", "", left=2)
    for role in select_roles(report.roles):
        row(
            cells,
            role.name,
            rank_ranges(role.ranks),
            _gib(role.peak_allocated_bytes),
            _gib(role.peak_reserved_bytes),
            _gib(sum(role.extra_bytes.values())),
            _gib(role.needed_bytes),
            "fits" if role.fits else "OUT",
            style="" if role.fits else "bold red",
        )
    show(console, cells)
    line(console, f"capacity {bytes_text(report.cluster['memory_bytes'])}; needed = reserved + extra")
    if report.roles:
        fullest = max(report.roles, key=lambda role: role.needed_bytes)
        held = [f"{name} {bytes_text(size)}" for name, size in _largest(fullest.held_at_peak)]
        extra = [f"{name} {bytes_text(size)}" for name, size in _largest(fullest.extra_bytes)]
        if held:
            line(console, f"at the peak of {fullest.name}: {', '.join(held)}")
        if extra:
            line(console, f"extra: {', '.join(extra)}")
    if report.host is not None:
        line(console, host_text(report.host))


def _largest(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: (-item[1], item[0]))


# ---- what it rests on ----


def _print_assumptions(report: Report, console: Console) -> None:
    made_up = [a for a in report.assumptions if a["kind"] != "note"]
    notes = [a for a in report.assumptions if a["kind"] == "note"]
    if made_up:
        heading(console, f"Assumed values: {sum(int(a['count']) for a in made_up)}")
        for a in made_up[:TOP_ASSUMPTIONS]:
            line(console, f"  {a['count']} x {a['kind']} = {a['value']}" + (f"  at {a['site']}" if a["site"] else ""))
        if len(made_up) > TOP_ASSUMPTIONS:
            line(console, f"  {len(made_up) - TOP_ASSUMPTIONS} more in report.json")
    if notes:
        heading(console, "Notes")
        for note in notes:
            line(console, f"  {note['value']}")


def _print_end(report: Report, console: Console, directory: Path | None) -> None:
    line(console)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings.items())
    line(console, f"spent: {spent}")
    if directory is not None:
        line(console, f"run:   {directory}")
        if (directory / PERFETTO_FILE).exists():
            line(console, f"trace: {directory / PERFETTO_FILE}  (open it at https://ui.perfetto.dev)")
        if (directory / PAGE_FILE).exists():
            line(console, f"page:  {directory / PAGE_FILE}  (open it in a browser; it needs no network)")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"
