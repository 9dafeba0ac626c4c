"""What one trial's time stamps say: which kernels ran wholly beside the communication, and the other way round.

A trial runs two lanes on one device from a common start: kernels back to back in groups, calls back to back. Stamps
are taken between groups and between calls. Nothing here touches a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Stamps:
    """Microseconds since the common start: ``kernels`` (one more than groups), ``calls`` (one more than calls); empty
    for a lane that was not used. ``starved``: the host was still issuing when the device began, so that lanes may
    have gaps."""

    kernels: tuple[float, ...] = ()
    calls: tuple[float, ...] = ()
    starved: bool = False


def alone(stamps: Sequence[float], per_group: int = 1) -> float:
    """Mean time of one, the first group left out (it warms up, or waits for the other ranks); NaN for fewer than 2."""
    if len(stamps) < 3:
        return math.nan
    return (stamps[-1] - stamps[1]) / (len(stamps) - 2) / per_group


def covered_kernels(stamps: Stamps, per_group: int) -> tuple[float, int, int]:
    """(mean time of one kernel, kernels counted, kernels dropped) over the groups that lie wholly within the calls.

    The first call is not counted on: it waits for the other ranks.
    """
    if len(stamps.calls) < 3:
        return math.nan, 0, 0
    low, high = stamps.calls[1], stamps.calls[-1]
    spans = list(zip(stamps.kernels, stamps.kernels[1:]))
    kept = [end - begin for begin, end in spans if begin >= low and end <= high]
    mean = fmean(kept) / per_group if kept else math.nan
    return mean, len(kept) * per_group, (len(spans) - len(kept)) * per_group


def covered_calls(stamps: Stamps) -> tuple[int, int]:
    """Range of calls (from, to) that lie wholly within the kernels on this device; the first call is not counted."""
    if len(stamps.kernels) < 2:
        return 0, 0
    low, high = stamps.kernels[0], stamps.kernels[-1]
    inside = [i for i in range(1, len(stamps.calls) - 1) if stamps.calls[i] >= low and stamps.calls[i + 1] <= high]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def mean_of_calls(stamps: Stamps, first: int, stop: int) -> float:
    """Mean time of the calls [first, stop); NaN for none."""
    return (stamps.calls[stop] - stamps.calls[first]) / (stop - first) if stop > first else math.nan


def kernels_beside_waiting(stamps: Stamps, per_group: int, call_us: float) -> float:
    """Mean time of one kernel while the only call waited for its other member; NaN when it did not wait long enough.

    The call is taken to move data during its last 1.5 times ``call_us``.
    """
    if len(stamps.calls) != 2:
        return math.nan
    high = stamps.calls[-1] - 1.5 * call_us
    kept = [end - begin for begin, end in zip(stamps.kernels[1:], stamps.kernels[2:]) if end <= high]
    return fmean(kept) / per_group if kept else math.nan
