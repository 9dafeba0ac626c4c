"""Who holds what at the peak of each phase, from the memory events of a traced rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console

from echo_hooks.graph.memory import HOLDERS
from echo_hooks.graph.program import Phase
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.report.activity import module_label
from echo_hooks.report.quantities import bytes_text, ranks_text
from echo_hooks.report.text import heading, line, row, show, table

TOP_MODULES = 10


@dataclass(frozen=True)
class PhasePeak:
    """The moment in the measured steps at which tensors hold most in ``phase``: bytes by holder and by module."""

    phase: str
    bytes: int
    holders: dict[str, int]
    modules: dict[str, int]


def phase_peaks(trace: RankTrace) -> list[PhasePeak]:
    """One per phase that allocates, in the order of Phase; what lived before the steps is held by all of them."""
    events = trace.memory_events
    order = np.argsort(events["record"], kind="stable")
    bytes_, storage, phase = (events[name][order] for name in ("bytes", "storage", "phase"))
    holder, module = (_of_allocation(events[name][order], storage) for name in ("holder", "module"))
    total = np.cumsum(bytes_)
    inside = events["record"][order] > 0
    peaks = []
    for number in Phase:
        during = np.flatnonzero((phase == number) & inside & (bytes_ > 0))
        if len(during):
            peak = during[np.argmax(total[during])]
            upto = slice(0, int(peak) + 1)
            holders = _sums(holder[upto], bytes_[upto], lambda h: HOLDERS[h] if h < len(HOLDERS) else "other")
            modules = _sums(module[upto], bytes_[upto], lambda m: _module(trace, m))
            peaks.append(PhasePeak(number.name.lower(), int(total[peak]), holders, modules))
    return peaks


def _of_allocation(values: np.ndarray, storage: np.ndarray) -> np.ndarray:
    """Each event's label, that of its storage's first event: a free counts for whoever allocated."""
    _, first, inverse = np.unique(storage, return_index=True, return_inverse=True)
    return values[first][inverse]


def _sums(keys: np.ndarray, sizes: np.ndarray, name) -> dict[str, int]:
    """Bytes by name, the largest first; names that hold nothing are left out."""
    found, inverse = np.unique(keys, return_inverse=True)
    totals = np.zeros(len(found), np.int64)
    np.add.at(totals, inverse, sizes)
    sums: dict[str, int] = {}
    for key, size in zip(found.tolist(), totals.tolist()):
        sums[name(key)] = sums.get(name(key), 0) + size
    return dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda item: (-item[1], item[0])))


def _module(trace: RankTrace, index: int) -> str:
    strings = trace.program.strings
    return module_label(strings[index] if 0 <= index < len(strings) else "")


def print_memory(role: Role, trace: RankTrace, console: Console) -> None:
    """One role's peak: what the allocator reserves, then who holds it in each phase of the measured steps."""
    memory = role.memory
    heading(console, f"{role.name} ({ranks_text(role.ranks)}, traced {role.traced_rank})")
    extra = sum(memory.extra.values())
    line(console, f"peak allocated {bytes_text(memory.peak_allocated_bytes)}, whole run")
    line(console, f"peak reserved  {bytes_text(memory.peak_reserved_bytes)}, whole run (allocator modelled)")
    names = ", ".join(f"{name} {bytes_text(size)}" for name, size in sorted(memory.extra.items()) if size)
    line(console, f"extra          {bytes_text(extra)}" + (f": {names}" if names else ""))
    if memory.host_peak_bytes:
        pinned = f", {bytes_text(memory.host_pinned_bytes)} of it page-locked" if memory.host_pinned_bytes else ""
        line(console, f"host           {bytes_text(memory.host_peak_bytes)} in CPU tensors at their peak{pinned}")
    peaks = phase_peaks(trace)
    if not peaks:
        line(console, "no memory event was recorded in the measured steps")
        return
    holders = list(dict.fromkeys(name for peak in peaks for name in peak.holders))
    rows = table("held at the peak of", *(peak.phase for peak in peaks))
    for name in [*holders, "all tensors"]:
        sizes = [peak.bytes if name == "all tensors" else peak.holders.get(name, 0) for peak in peaks]
        row(rows, name, *(bytes_text(size) for size in sizes))
    show(console, rows)
    highest = max(peaks, key=lambda peak: peak.bytes)
    rows = table(f"allocated in module, at the peak of {highest.phase}", "bytes", "%")
    for name, size in list(highest.modules.items())[:TOP_MODULES]:
        row(rows, name, bytes_text(size), f"{100 * size / highest.bytes:.1f}")
    show(console, rows)
    if len(highest.modules) > TOP_MODULES:
        line(console, f"{len(highest.modules) - TOP_MODULES} more modules")
