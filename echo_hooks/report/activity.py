"""Tables drawn from one timeline: communication by group and operation, compute by class and by module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echo_hooks.compose.result import Timeline
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind
from echo_hooks.network.sweeps import bus_factor
from echo_hooks.report.op_names import crosses, op_class

COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
COMPUTE = (Kind.COMPUTE, Kind.COPY)


@dataclass(frozen=True)
class CommunicationRow:
    """All calls of one operation on the groups of one name, in one step of one rank (mean of the traced steps).

    ``bytes``: payload over all calls (convention of nccl-tests: the larger of the send and receive buffers).
    ``time_ms``: union of the intervals in which data moves. ``waiting_ms``: union of those in which the call waits for
    its last member. ``exposed_ms``: the part of ``time_ms`` in which no kernel or copy of the rank's own runs; the rest
    of ``time_ms`` is hidden. ``busbw_bytes_per_s``: bytes over time with the bus factor of nccl-tests, None where
    nothing or no time is counted.
    """

    group: str
    size: int
    operation: str
    calls: float
    bytes: int
    time_ms: float
    waiting_ms: float
    exposed_ms: float
    busbw_bytes_per_s: float | None


@dataclass(frozen=True)
class ComputeRow:
    """Kernels (and copies) of one kind in one step: ``time_ms`` adds up their durations, ``calls`` counts them."""

    name: str
    calls: float
    time_ms: float


def communication_rows(
    timeline: Timeline, ops: list[OpSignature], groups: GroupTable, steps: int
) -> list[CommunicationRow]:
    """Rows in order of falling time. ``ops`` and ``groups`` are the tables that the timeline's program indexes, and
    ``steps`` is how many steps it holds."""
    program = timeline.program
    ran = np.isin(program.kind, COMMUNICATION) & np.isfinite(timeline.start_us) & np.isfinite(timeline.end_us)
    busy = _busy_intervals(timeline, timeline.breakdown.step_us * steps)
    keys: dict[tuple[str, int, str], list[int]] = {}
    for record in np.flatnonzero(ran).tolist():
        group = groups[program.group[record]] if program.group[record] >= 0 else None
        key = (group.name if group else "", group.size if group else 2, operation_name(timeline, record, ops))
        keys.setdefault(key, []).append(record)
    rows = []
    for (group_name, size, operation), records in keys.items():
        start, end = timeline.start_us[records], timeline.end_us[records]
        ready = np.clip(np.nan_to_num(timeline.ready_us[records], nan=-np.inf), start, end)
        moving = union(ready, end)
        time_us, payload = length(moving), int(program.bytes[records].sum())
        rows.append(
            CommunicationRow(
                group=group_name,
                size=size,
                operation=operation,
                calls=len(records) / steps,
                bytes=payload // steps,
                time_ms=time_us / 1e3 / steps,
                waiting_ms=length(union(start, ready)) / 1e3 / steps,
                exposed_ms=max(0.0, time_us - overlap(moving, busy)) / 1e3 / steps,
                busbw_bytes_per_s=payload * bus_factor(operation, size) / (time_us * 1e-6)
                if payload and time_us
                else None,
            )
        )
    return sorted(rows, key=lambda row: (-row.time_ms, row.group, row.operation, row.size))


def operation_name(timeline: Timeline, record: int, ops: list[OpSignature]) -> str:
    """The record's op, or its kind where it has none."""
    op = int(timeline.program.op[record])
    return ops[op].name if op >= 0 else Kind(int(timeline.program.kind[record])).name.lower()


# ---- compute ----


def compute_by_class(timeline: Timeline, ops: list[OpSignature], steps: int) -> list[ComputeRow]:
    """Kernel time per step by class of operation, longest first."""
    return _compute_rows(timeline, steps, lambda record: _class_of(timeline, record, ops))


def compute_by_module(timeline: Timeline, steps: int) -> list[ComputeRow]:
    """Kernel time per step by module, longest first."""
    program = timeline.program
    labels = [module_label(text) for text in program.strings]
    return _compute_rows(timeline, steps, lambda record: labels[program.module[record]])


def module_label(path: str) -> str:
    """Equal layers count as one: "layers.3.mlp" and "layers.7.mlp" are both "layers.*.mlp"."""
    return re.sub(r"\b\d+\b", "*", path) or "(no module)"


def _class_of(timeline: Timeline, record: int, ops: list[OpSignature]) -> str:
    name = operation_name(timeline, record, ops)
    if timeline.program.kind[record] == Kind.COPY and crosses(name):
        return "copies to and from the device"
    return op_class(name)


def _compute_rows(timeline: Timeline, steps: int, label: Callable[[int], str]) -> list[ComputeRow]:
    sums: dict[str, list[float]] = {}
    duration_us = timeline.end_us - timeline.start_us
    ran = np.isin(timeline.program.kind, COMPUTE) & np.isfinite(duration_us)
    for record in np.flatnonzero(ran).tolist():
        entry = sums.setdefault(label(record), [0, 0.0])
        entry[0] += 1
        entry[1] += float(duration_us[record])
    rows = [ComputeRow(name, calls / steps, us / 1e3 / steps) for name, (calls, us) in sums.items()]
    return sorted(rows, key=lambda row: (-row.time_ms, row.name))


# ---- intervals: arrays of shape [n, 2], sorted, disjoint, in microseconds ----


def _busy_intervals(timeline: Timeline, period_us: float) -> np.ndarray:
    """When a kernel or copy of the rank's own runs, those of the repetition before and after included: what is left
    over from a step may run beside the next one's kernels."""
    ran = np.isin(timeline.program.kind, COMPUTE) & np.isfinite(timeline.start_us) & np.isfinite(timeline.end_us)
    shift = np.array([-period_us, 0.0, period_us])[:, None]
    return union((timeline.start_us[ran] + shift).ravel(), (timeline.end_us[ran] + shift).ravel())


def union(start_us: np.ndarray, end_us: np.ndarray) -> np.ndarray:
    """Disjoint intervals [n, 2] that cover the same time as [start, end)."""
    order = np.argsort(start_us, kind="stable")
    start, end = np.asarray(start_us, float)[order], np.asarray(end_us, float)[order]
    if not len(start):
        return np.zeros((0, 2))
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(start) - 1]])
    return np.stack([start[first], reach[last]], axis=1)


def length(intervals: np.ndarray) -> float:
    """Sum of the lengths of intervals [n, 2]."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Length of the time that both cover: |a| + |b| - |a or b|."""
    both = np.concatenate([a, b])
    return max(0.0, length(a) + length(b) - length(union(both[:, 0], both[:, 1])))
