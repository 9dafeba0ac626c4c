"""What a real run left of itself: one file a rank, and where asked for a profiler's trace a rank.

    ranks/NNNNN.json   step times, peak memory, versions, device        traces/rankNNNNN.json.gz

Written by launchers/echo_launch/recording.py inside the ranks of a real run; read here for comparison.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from echo_hooks.errors import UsageError
from echo_hooks.graph.files import read_json

FORMAT = 1
MAX_RANKS = 1 << 20
SETTLING_STEPS = 5
"""At most so many steps at the start, and never more than a quarter, are left out of the median: caches fill."""


@dataclass(frozen=True)
class RecordedRank:
    """One rank. ``step_times_ms``: the last steps in order. ``steps``: how many there were in all.

    ``clock``: "device" (events on the stream in use) or "host". Peaks are None where the rank used no device;
    ``peak_host_bytes`` is the process's largest resident size. ``ended``: the script's process came to its own end.
    """

    rank: int
    world_size: int
    step_times_ms: list[float]
    steps: int = 0
    clock: str = "host"
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_host_bytes: int | None = None
    device: str = ""
    script: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    traces: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def step_ms(self) -> float | None:
        """Median step; None when no step was seen."""
        times = self.step_times_ms
        settled = times[min(SETTLING_STEPS, len(times) // 4) :]
        return statistics.median(settled) if settled else None


def rank_file(directory: Path, rank: int) -> Path:
    """Where ``rank`` writes what it has seen."""
    return directory / "ranks" / f"{rank:05d}.json"


def trace_file(directory: Path, rank: int) -> Path:
    """Where ``rank`` writes its profiler's trace."""
    return directory / "traces" / f"rank{rank:05d}.json.gz"


def is_record(directory: Path) -> bool:
    """Whether a directory holds the record of a real run."""
    return any((directory / "ranks").glob("[0-9]*.json"))


def read_record(directory: Path) -> list[RecordedRank]:
    """All ranks of a record in order; UsageError when there is none, or when a file is damaged."""
    files = sorted((directory / "ranks").glob("[0-9]*.json"))
    if not files:
        raise UsageError(f"{directory}: no ranks/NNNNN.json in it, so this is no record of a run")
    return sorted((_rank(path) for path in files[:MAX_RANKS]), key=lambda r: r.rank)


def _rank(path: Path) -> RecordedRank:
    value = read_json(path)
    if value.get("format") != FORMAT:
        raise UsageError(f"{path}: format {value.get('format')!r}, this Echo reads {FORMAT}")
    times = value.get("step_times_ms")
    if not isinstance(times, list) or not all(_number(t) and t >= 0 for t in times):
        raise UsageError(f"{path}: step_times_ms should be a list of milliseconds")
    rank, world_size = value.get("rank"), value.get("world_size")
    if not (_whole(rank) and _whole(world_size) and rank < world_size):
        raise UsageError(f"{path}: rank {rank!r} of {world_size!r} is no rank of a job")
    versions = value.get("versions")
    return RecordedRank(
        rank=rank,
        world_size=world_size,
        step_times_ms=[float(t) for t in times],
        steps=value["steps"] if _whole(value.get("steps")) else len(times),
        clock=str(value.get("clock", "host")),
        device=str(value.get("device", "")),
        script=str(value.get("script", "")),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        ended=value.get("ended") is True,
        peak_allocated_bytes=_size(value.get("peak_allocated_bytes")),
        peak_reserved_bytes=_size(value.get("peak_reserved_bytes")),
        peak_host_bytes=_size(value.get("peak_host_bytes")),
        traces=_texts(value.get("traces")),
        notes=_texts(value.get("notes")),
    )


def _size(value: Any) -> int | None:
    return value if _whole(value) else None


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
