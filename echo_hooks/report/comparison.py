"""A simulated step beside a measured one, category by category, so that one sees which part is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from echo_hooks.compose.result import Breakdown
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.report.measured import Measured, flat
from echo_hooks.report.measured_trace import ATTENTION, COPIES, MATRIX, OTHER, SEND_RECV, MeasuredSteps
from echo_hooks.report.report import Report, RoleReport
from echo_hooks.report.text import heading, line, row, show, table

SHOWN_ROLES = 4


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity; None where a side does not know it. ``section``: "step", "compute", "communication", "memory"."""

    name: str
    unit: str
    simulated: float | None
    measured: float | None
    section: str = "step"

    @property
    def difference(self) -> float | None:
        """Simulated minus measured."""
        return None if self.simulated is None or self.measured is None else self.simulated - self.measured

    @property
    def error(self) -> float | None:
        """Simulated over measured, minus one."""
        return None if self.simulated is None or not self.measured else self.simulated / self.measured - 1


@dataclass(frozen=True)
class RoleComparison:
    """One role: the simulated numbers are of its busiest rank, the measured ones means over ``ranks``."""

    role: str
    ranks: list[int]
    rows: list[ComparisonRow]


@dataclass(frozen=True)
class Comparison:
    """``rows``: of the whole job. ``roles``: those of which a rank was traced. ``notes``: a sentence each."""

    rows: list[ComparisonRow]
    roles: list[RoleComparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [_as_dict(entry) for entry in self.rows],
            "roles": [
                {"role": r.role, "ranks": r.ranks, "rows": [_as_dict(entry) for entry in r.rows]} for r in self.roles
            ],
            "notes": self.notes,
        }


def _as_dict(entry: ComparisonRow) -> dict[str, Any]:
    return asdict(entry) | {"difference": entry.difference, "error": entry.error}


def compare(report: Report, measured: Measured) -> Comparison:
    """The step, its categories where both say something or the simulation does, peak memory."""
    rows = [ComparisonRow("step time", "ms", report.step_time_ms, measured.step_time_ms)]
    if not measured.traced:
        simulated = flat(report.breakdown) if report.breakdown else {}
        names = dict.fromkeys([*simulated, *measured.parts])
        rows += [ComparisonRow(name, "ms", simulated.get(name), measured.parts.get(name)) for name in names]
    rows += _memory_rows(report.roles, measured)
    roles = [_role(role, measured) for role in report.roles if any(m.rank in role.ranks for m in measured.traced)]
    notes = list(measured.notes)
    strangers = [m.rank for m in measured.traced if not any(m.rank in role.ranks for role in report.roles)]
    if strangers:
        notes.append(f"ranks {rank_ranges(strangers)} were measured, but are none of the run's {report.world_size}")
    return Comparison(rows, roles, notes)


# ---- one role ----


def _role(role: RoleReport, measured: Measured) -> RoleComparison:
    ranks = [m for m in measured.traced if m.rank in role.ranks]
    rows = [ComparisonRow("step time", "ms", role.step_time_ms, _mean([m.step_ms for m in ranks]))]
    simulated = flat(role.breakdown) if role.breakdown else {}
    flats = [_flat_ms(m.parts) for m in ranks]
    names = dict.fromkeys([*simulated, *(name for parts in flats for name in parts)])
    rows += [
        ComparisonRow(name, "ms", simulated.get(name), _mean([parts.get(name, 0.0) for parts in flats]))
        for name in names
    ]
    return RoleComparison(
        role.name, [m.rank for m in ranks], [*rows, *_compute_rows(role, ranks), *_calls(role, ranks)]
    )


def _flat_ms(parts: Breakdown) -> dict[str, float]:
    exposed = {name or "(unnamed group)": us / 1e3 for name, us in parts.exposed_communication_us.items()}
    return flat(
        {
            "compute": parts.compute_us / 1e3,
            "exposed_communication": exposed,
            "bubble": parts.bubble_us / 1e3,
            "waiting": parts.waiting_us / 1e3,
            "host": parts.host_us / 1e3,
        }
    )


_CLASSES = {
    "matrix product": MATRIX,
    "attention": ATTENTION,
    "copies to and from the device": COPIES,
}


def _compute_rows(role: RoleReport, ranks: list[MeasuredSteps]) -> list[ComparisonRow]:
    simulated: dict[str, float] = dict.fromkeys((MATRIX, ATTENTION, OTHER, COPIES), 0.0)
    for entry in role.compute:
        simulated[_CLASSES.get(entry.name, OTHER)] += entry.time_ms
    return [
        ComparisonRow(
            name,
            "ms",
            time if role.compute else None,
            _mean([m.classes.get(name, 0.0) for m in ranks]),
            "compute",
        )
        for name, time in simulated.items()
    ]


def _calls(role: RoleReport, ranks: list[MeasuredSteps]) -> list[ComparisonRow]:
    """Moving and waiting of each operation of each group. Sends and receives are one row, as NCCL runs them in one
    kernel: of the simulated two the longer."""
    simulated: dict[tuple[str, str], tuple[float, float, float]] = {}
    for entry in role.communication:
        key = (entry.group, SEND_RECV if entry.operation in ("send", "recv") else entry.operation)
        before = simulated.get(key, (0.0, 0.0, 0.0))
        values = (entry.calls, entry.time_ms, entry.waiting_ms)
        join = max if key[1] == SEND_RECV else float.__add__
        simulated[key] = tuple(join(float(a), float(b)) for a, b in zip(before, values))  # type: ignore[assignment]
    keys = dict.fromkeys([*simulated, *(key for m in ranks for key in m.communication)])
    rows = []
    for group, operation in sorted(keys):
        label = f"{operation} {group}".rstrip()
        found = [m.communication.get((group, operation)) for m in ranks]
        ours = simulated.get((group, operation), (0.0, 0.0, 0.0))
        theirs = [
            _mean([0.0 if f is None else getattr(f, name) for f in found])
            for name in ("calls", "time_ms", "waiting_ms")
        ]
        for place, (what, unit) in enumerate((("calls", ""), ("moving", "ms"), ("waiting", "ms"))):
            rows.append(ComparisonRow(f"{label}, {what}", unit, ours[place], theirs[place], "communication"))
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- memory ----


def _memory_rows(roles: list[RoleReport], measured: Measured) -> list[ComparisonRow]:
    """Of the fullest rank, and with several roles of each that was measured."""
    rows = []
    for name in ("allocated", "reserved"):
        sizes: dict[int, int] = getattr(measured, f"peak_{name}_bytes")
        if not sizes or not roles:
            continue
        highest = max(getattr(role, f"peak_{name}_bytes") for role in roles)
        rows.append(_gib(f"peak {name}", highest, max(sizes.values())))
        for role in roles if len(roles) > 1 else []:
            own = [size for rank, size in sizes.items() if rank in role.ranks]
            if own:
                rows.append(_gib(f"peak {name}, {role.name}", getattr(role, f"peak_{name}_bytes"), max(own)))
    return rows


def _gib(name: str, simulated: int, measured: int) -> ComparisonRow:
    return ComparisonRow(name, "GiB", simulated / (1 << 30), measured / (1 << 30), "memory")


# ---- in print ----


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The rows as tables, with the difference in the row's unit and relative to the measurement."""
    _print_rows(comparison.rows, console)
    for role in comparison.roles[:SHOWN_ROLES]:
        ranks = (
            f"measured rank {role.ranks[0]}" if len(role.ranks) == 1 else f"measured ranks {rank_ranges(role.ranks)}"
        )
        heading(console, f"One step of {role.role} ({ranks})")
        _print_rows(role.rows, console)
    if len(comparison.roles) > SHOWN_ROLES:
        line(console, f"{len(comparison.roles) - SHOWN_ROLES} more roles with --json")
    known = [entry for entry in comparison.rows[1:] if entry.section != "memory" and entry.measured is not None]
    if not comparison.roles and not known:
        line(console, "the measured side states the step alone: where a difference comes from cannot be told")
    for note in comparison.notes:
        line(console, f"note: {note}")


def _print_rows(rows: list[ComparisonRow], console: Console) -> None:
    cells = table("", "", "simulated", "measured", "difference", "", left=2)
    for entry in _worth_printing(rows):
        values = ["-" if v is None else f"{v:.2f}" for v in (entry.simulated, entry.measured)]
        gap = "-" if entry.difference is None else f"{entry.difference:+.2f}"
        row(cells, entry.name, entry.unit, *values, gap, "-" if entry.error is None else f"{100 * entry.error:+.1f} %")
    show(console, cells)


def _worth_printing(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Without groups and operations that take no time on either side."""
    busy = {
        _subject(entry)
        for entry in rows
        if entry.unit != "" and max(entry.simulated or 0, entry.measured or 0) >= 0.005
    }
    return [
        entry
        for entry in rows
        if _subject(entry) in busy or not (entry.section == "communication" or entry.name.startswith("exposed "))
    ]


def _subject(entry: ComparisonRow) -> str:
    return entry.name.rpartition(", ")[0] or entry.name
