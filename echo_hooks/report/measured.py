"""What a measured run says of itself: the record of a real run, profiler traces, or a JSON object with its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from echo_hooks.errors import UsageError
from echo_hooks.graph.files import read_json
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.record import RecordedRank, is_record, read_record
from echo_hooks.report.measured_trace import MeasuredSteps, read_traces

_FORM = "give a JSON object with step_time_ms, the record of a real run, or traces of torch.profiler"


@dataclass(frozen=True)
class Measured:
    """``step_time_ms``: of the job, None where only memory is known. ``traced``: where the time of ranks went.
    ``parts``: of a JSON object, ms by category. Peaks by rank, in bytes; those of a JSON object have rank -1, the
    fullest. ``notes``: sentences about what was left out or assumed."""

    step_time_ms: float | None
    traced: list[MeasuredSteps] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    peak_allocated_bytes: dict[int, int] = field(default_factory=dict)
    peak_reserved_bytes: dict[int, int] = field(default_factory=dict)
    peak_host_bytes: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_measured(paths: list[Path], groups: GroupTable | None = None) -> Measured:
    """``paths``: record directories, directories of traces, traces (.json, .json.gz), or one JSON object with
    ``step_time_ms`` (or ``step_ms``) and, where known, ``breakdown`` (as in report.json) and ``ranks`` or ``roles``
    with ``peak_allocated_bytes`` and ``peak_reserved_bytes``. ``groups``: of the simulated run, whose names are used.

    Raises UsageError for anything else, in one sentence.
    """
    if len(paths) == 1 and paths[0].suffix == ".json" and not _looks_like_trace(paths[0]):
        return _numbers(paths[0])
    records: list[RecordedRank] = []
    traces: list[Path] = []
    for path in paths:
        if not path.is_dir():
            traces.append(path)
        elif is_record(path):
            found = read_record(path)
            records += found
            traces += [path / name for rank in found for name in rank.traces if (path / name).is_file()]
        else:
            inside = sorted(f for f in path.iterdir() if f.name.endswith((".json", ".json.gz")) and f.is_file())
            if not inside:
                raise UsageError(f"{path}: neither a record of a real run nor traces in it; {_FORM}")
            traces += inside
    return _together(records, traces, groups)


def _looks_like_trace(path: Path) -> bool:
    """Whether a JSON file begins as a profiler's trace does."""
    try:
        with path.open(errors="replace") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return '"traceEvents"' in head or '"schemaVersion"' in head or head.lstrip().startswith("[{")


def _together(records: list[RecordedRank], traces: list[Path], groups: GroupTable | None) -> Measured:
    steps = [rank.step_ms for rank in records if rank.step_ms is not None]
    notes = [f"rank {rank.rank}: {note}" for rank in records for note in rank.notes]
    if records and len(records) < records[0].world_size:
        notes.append(f"{len(records)} of {records[0].world_size} ranks left a record")
    traced: list[MeasuredSteps] = []
    step = max(steps) if steps else None
    if traces:
        try:
            traced, traced_step, told = read_traces(traces, lambda label, ranks: _name(groups, label, ranks))
        except UsageError as error:
            if not records:
                raise
            notes.append(f"no categories: {error}")
        else:
            notes += told
            if step is None:
                step = traced_step
            else:
                notes.append(
                    f"the step is the one without profiler; under it, it took {traced_step:.2f} ms, and the categories"
                    " are of that one"
                )
    if step is None and not any(rank.peak_allocated_bytes for rank in records):
        raise UsageError("the record holds neither a step nor a device's memory, so there is nothing to compare")
    return Measured(
        step_time_ms=step,
        traced=traced,
        peak_allocated_bytes=_peaks(records, "peak_allocated_bytes"),
        peak_reserved_bytes=_peaks(records, "peak_reserved_bytes"),
        peak_host_bytes=_peaks(records, "peak_host_bytes"),
        notes=notes,
    )


def _peaks(records: list[RecordedRank], name: str) -> dict[int, int]:
    return {rank.rank: getattr(rank, name) for rank in records if getattr(rank, name) is not None}


def _name(groups: GroupTable | None, label: str, ranks: tuple[int, ...]) -> str:
    """The run's name of a group: same ranks and description, else same ranks, else the trace's own label."""
    same = [group for group in groups or () if group.ranks == ranks]
    described = [group for group in same if group.desc == label]
    if described:
        return described[0].name
    if label == "default_pg" and same:
        return same[0].name
    return same[-1].name if same else label


# ---- a JSON object ----


def _numbers(path: Path) -> Measured:
    value = read_json(path)
    step = value.get("step_time_ms", value.get("step_ms"))
    if not _is_number(step) or step <= 0:
        raise UsageError(f"{path}: step_time_ms is {step!r}; {_FORM}")
    return Measured(
        step_time_ms=float(step),
        parts=_measured_parts(path, value.get("breakdown")),
        peak_allocated_bytes=_peak(value, "peak_allocated_bytes"),
        peak_reserved_bytes=_peak(value, "peak_reserved_bytes"),
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _measured_parts(path: Path, parts: Any) -> dict[str, float]:
    if parts is None:
        return {}
    if isinstance(parts, dict):
        exposed = parts.get("exposed_communication", {})
        groups = exposed if isinstance(exposed, dict) else {"": exposed}
        numbers = [v for k, v in parts.items() if k != "exposed_communication"] + list(groups.values())
        if all(_is_number(v) for v in numbers):
            return flat(parts)
    raise UsageError(f"{path}: breakdown should be an object with milliseconds by category")


def _peak(value: dict[str, Any], key: str) -> dict[int, int]:
    members = value.get("ranks") or value.get("roles")
    members = members if isinstance(members, list) else [value]
    sizes = [m[key] for m in members if isinstance(m, dict) and _is_number(m.get(key))]
    return {-1: int(max(sizes))} if sizes else {}


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
