"""What is measured of a kernel and a call, trial by trial; devices and other ranks are behind two small interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from echo_hooks.overlap.collection.trials import (
    Stamps,
    alone,
    covered_calls,
    covered_kernels,
    kernels_beside_waiting,
)

WINDOW_US = 2000.0
"""Least length of the calls' lane. Long kernels and calls make it longer: 4 kernels fit, and 5 calls. The kernels'
lane is longer by KERNEL_LANE, because calls are slowed more than kernels."""

KERNEL_LANE = 1.4

GROUP_US = 60.0
"""Short kernels are stamped in groups of about so long."""

MOST_GROUPS, MOST_CALLS = 240, 160
MOST_GATE_US = 40_000.0


class Trials(Protocol):
    """A device that runs trials; see ``CudaTrials``."""

    issue_us: tuple[float, float]

    def repeated(self, call: Callable[[], Any], per_group: int) -> Any: ...

    def trial(
        self,
        kernel: Any,
        groups: int,
        call: Callable[[], Any] | None,
        calls: int,
        *,
        gate_us: float,
        kernels_after_us: float = 0.0,
        calls_after_us: float = 0.0,
    ) -> Stamps: ...


class Ranks(Protocol):
    """The ranks that measure together. ``largest`` answers, on every rank, the largest of all ranks' values place by
    place, and lets all go on together."""

    rank: int
    size: int

    def largest(self, values: tuple[float, ...]) -> tuple[float, ...]: ...

    def together(self) -> None: ...

    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Timed:
    """A kernel ready for trials: ``us`` alone, agreed between the ranks, ``per_group`` of them between two stamps."""

    repeated: Any
    us: float
    per_group: int


@dataclass(frozen=True)
class Measured:
    """One repeat of a pair on one rank. ``first``/``stop``: calls wholly within the kernels on this rank. ``calls``:
    their stamps. ``kept``/``dropped``: kernels wholly beside the calls, and not."""

    base_us: float
    overlap_us: float
    call_base_us: float
    calls: tuple[float, ...]
    first: int
    stop: int
    kept: int
    dropped: int
    starved: bool


def time_kernel(trials: Trials, ranks: Ranks, call: Callable[[], Any]) -> Timed:
    """Warm up a kernel and find how many make a group."""
    single = trials.repeated(call, 1)
    trials.trial(single, 4, None, 0, gate_us=1000.0)
    us = alone(trials.trial(single, 12, None, 0, gate_us=1500.0).kernels)
    (us,) = ranks.largest((us,))
    per_group = max(1, min(16, round(GROUP_US / us)))
    repeated = single if per_group == 1 else trials.repeated(call, per_group)
    trials.trial(repeated, 3, None, 0, gate_us=1000.0)  # what the host needs for a group
    return Timed(repeated, us, per_group)


def time_call(trials: Trials, ranks: Ranks, call: Callable[[], Any]) -> float:
    """Warm up a call; its time alone, in microseconds."""
    ranks.together()
    trials.trial(None, 0, call, 3, gate_us=1000.0)
    ranks.together()
    (us,) = ranks.largest((alone(trials.trial(None, 0, call, 6, gate_us=1000.0).calls),))
    return us


def measure_pair(
    trials: Trials, ranks: Ranks, kernel: Timed, call: Callable[[], Any], call_us: float, repeats: int
) -> Iterator[Measured]:
    """Per repeat: the kernel alone, the call alone, both together, in turn, so that clocks and heat are alike."""
    window = max(WINDOW_US, 4 * kernel.us, 5 * call_us)
    calls = max(4, min(MOST_CALLS, math.ceil(window / call_us) + 2))
    groups = max(4, min(MOST_GROUPS, math.ceil(KERNEL_LANE * window / (kernel.us * kernel.per_group)) + 2))
    few_groups = max(4, min(groups, math.ceil(WINDOW_US / 2 / (kernel.us * kernel.per_group)) + 2))
    few_calls = max(4, min(calls, math.ceil(WINDOW_US / 2 / call_us) + 2))
    for _ in range(repeats):
        a_group, a_call = ranks.largest(trials.issue_us)

        def gate(groups: int, calls: int, a_group: float = a_group, a_call: float = a_call) -> float:
            return min(MOST_GATE_US, 200.0 + 1.3 * (groups * a_group + calls * a_call))

        kernels_alone = trials.trial(kernel.repeated, few_groups, None, 0, gate_us=gate(few_groups, 0))
        ranks.together()
        calls_alone = trials.trial(None, 0, call, few_calls, gate_us=gate(0, few_calls))
        ranks.together()
        both = trials.trial(kernel.repeated, groups, call, calls, gate_us=gate(groups, calls))
        overlap_us, kept, dropped = covered_kernels(both, kernel.per_group)
        first, stop = covered_calls(both)
        yield Measured(
            alone(kernels_alone.kernels, kernel.per_group),
            overlap_us,
            alone(calls_alone.calls),
            both.calls,
            first,
            stop,
            kept,
            dropped,
            kernels_alone.starved or calls_alone.starved or both.starved,
        )


def measure_waiting(
    trials: Trials, ranks: Ranks, kernel: Timed, call: Callable[[], Any], call_us: float
) -> tuple[float, float]:
    """(kernel alone, kernel beside a call that waits for its other member), on this rank."""
    found = math.nan
    groups = max(4, min(60, math.ceil(WINDOW_US / 2 / (kernel.us * kernel.per_group))))
    late_us = 1500.0 + 2.5 * groups * kernel.us * kernel.per_group + 2 * call_us
    base = trials.trial(kernel.repeated, groups, None, 0, gate_us=1000.0)
    for holder in range(ranks.size):
        ranks.together()
        if holder == ranks.rank:
            stamps = trials.trial(kernel.repeated, groups, call, 1, gate_us=1000.0, kernels_after_us=200.0)
            found = kernels_beside_waiting(stamps, kernel.per_group, call_us)
        else:
            trials.trial(None, 0, call, 1, gate_us=1000.0, calls_after_us=late_us)
    return alone(base.kernels, kernel.per_group), found
