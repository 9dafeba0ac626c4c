"""A simulated step beside a measured one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.graph.files import read_json
from echo_hooks.report.report import Report
from echo_hooks.report.text import line, row, show, table


@dataclass(frozen=True)
class Measured:
    """What a measured run says of itself: ``parts`` in ms by category, as far as known; peaks of the fullest rank."""

    step_time_ms: float
    parts: dict[str, float] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity; None where a side does not know it."""

    name: str
    unit: str
    simulated: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Simulated over measured, minus one."""
        if self.simulated is None or not self.measured:
            return None
        return self.simulated / self.measured - 1


def read_measured(path: Path) -> Measured:
    """Read a JSON object with ``step_time_ms`` (or ``step_ms``) and, where known, ``breakdown`` (as in report.json) and
    ``ranks`` or ``roles`` with ``peak_allocated_bytes`` and ``peak_reserved_bytes``.

    Raises UsageError for anything else, NotImplementedError for a profiler trace.
    """
    if path.name.endswith((".gz", ".pt.trace.json")):
        raise NotImplementedError(f"{path}: comparing with a profiler trace is not built yet; {_FORM}")
    value = read_json(path)
    if "traceEvents" in value:
        raise NotImplementedError(f"{path}: comparing with a profiler trace is not built yet; {_FORM}")
    step = value.get("step_time_ms", value.get("step_ms"))
    if not _is_number(step) or step <= 0:
        raise UsageError(f"{path}: step_time_ms is {step!r}; {_FORM}")
    return Measured(
        step_time_ms=float(step),
        parts=_measured_parts(path, value.get("breakdown")),
        peak_allocated_bytes=_peak(value, "peak_allocated_bytes"),
        peak_reserved_bytes=_peak(value, "peak_reserved_bytes"),
    )


_FORM = "give a JSON object with step_time_ms, and breakdown as in report.json where it is known"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _measured_parts(path: Path, breakdown: Any) -> dict[str, float]:
    if breakdown is None:
        return {}
    if isinstance(breakdown, dict):
        exposed = breakdown.get("exposed_communication", {})
        groups = exposed if isinstance(exposed, dict) else {"": exposed}
        numbers = [v for k, v in breakdown.items() if k != "exposed_communication"] + list(groups.values())
        if all(_is_number(v) for v in numbers):
            return flat(breakdown)
    raise UsageError(f"{path}: breakdown should be an object with milliseconds by category")


def _peak(value: dict[str, Any], key: str) -> int | None:
    members = value.get("ranks") or value.get("roles")
    members = members if isinstance(members, list) else [value]
    sizes = [m[key] for m in members if isinstance(m, dict) and _is_number(m.get(key))]
    return int(max(sizes)) if sizes else None


def flat(breakdown: dict[str, Any]) -> dict[str, float]:
    """The breakdown of report.json as one level, exposed communication by group and in all."""
    parts: dict[str, float] = {}
    if "compute" in breakdown:
        parts["compute"] = breakdown["compute"]
    exposed = breakdown.get("exposed_communication")
    if isinstance(exposed, dict):
        parts["exposed communication"] = sum(exposed.values())
        parts |= {f"exposed {name}": exposed[name] for name in sorted(exposed)}
    elif exposed is not None:
        parts["exposed communication"] = exposed
    return parts | {name: breakdown[name] for name in ("bubble", "waiting", "host") if name in breakdown}


def compare(report: Report, measured: Measured) -> list[ComparisonRow]:
    """Row by row: the step, its categories where both say something or the simulation does, peak memory."""
    simulated = flat(report.breakdown) if report.breakdown else {}
    rows = [ComparisonRow("step time", "ms", report.step_time_ms, measured.step_time_ms)]
    names = dict.fromkeys([*simulated, *measured.parts])
    rows += [ComparisonRow(name, "ms", simulated.get(name), measured.parts.get(name)) for name in names]
    for name, size in (("allocated", measured.peak_allocated_bytes), ("reserved", measured.peak_reserved_bytes)):
        if size is not None and report.roles:
            highest = max(getattr(role, f"peak_{name}_bytes") for role in report.roles)
            rows.append(ComparisonRow(f"peak {name}", "GiB", highest / (1 << 30), size / (1 << 30)))
    return rows


def print_comparison(rows: list[ComparisonRow], console: Console) -> None:
    """The rows as a table, with the error of the simulation relative to the measurement."""
    cells = table("", "", "simulated", "measured", "difference", left=2)
    for entry in rows:
        values = ["-" if v is None else f"{v:.2f}" for v in (entry.simulated, entry.measured)]
        row(cells, entry.name, entry.unit, *values, "-" if entry.error is None else f"{100 * entry.error:+.1f} %")
    show(console, cells)
    if all(entry.measured is None for entry in rows[1:]):
        line(console, "the measured file states the step alone: where a difference comes from cannot be told")
