"""How operations that run together share links: max-min fairly, as long-lived flows do.

Each operation would run at speed 1 alone. It runs at a speed x in (0, 1]: all its loads slow down together, because a
collective moves in lockstep. Speeds rise together until a resource is full; the operations on it stay there, the
others rise on (progressive filling; Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit


def max_min_rates(loads: Sequence[Sequence[tuple[int, float]]], capacities: Sequence[float]) -> list[float]:
    """Speed of each operation, 1 being its speed alone.

    ``loads``: per operation (resource, bytes per us it would move there at speed 1), that is ``Cost.loads`` over
    ``duration_us - latency_us``. ``capacities``: bytes per us by resource. An operation without loads runs at 1.
    """
    start = np.zeros(len(loads) + 1, np.int64)
    np.cumsum([len(load) for load in loads], out=start[1:])
    resource = np.array([r for load in loads for r, _ in load], np.int64)
    demand = np.array([d for load in loads for _, d in load], np.float64)
    return fill(start, resource, demand, np.asarray(capacities, np.float64)).tolist()


@njit(cache=True)
def fill(start: np.ndarray, resource: np.ndarray, demand: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The same on arrays, callable from compiled code: operation i has entries start[i]:start[i + 1] of ``resource``
    (int64) and ``demand`` (float64, bytes per us). Returns float64 speeds."""
    count = len(start) - 1
    rate = np.ones(count)
    rising = np.ones(count, np.bool_)
    left = capacity.copy()
    want = np.empty(len(capacity))
    while rising.any():
        want[:] = 0.0
        for i in range(count):
            if rising[i]:
                for k in range(start[i], start[i + 1]):
                    want[resource[k]] += demand[k]
        level = 1.0
        for r in range(len(capacity)):
            if want[r] > 0.0:
                level = min(level, max(left[r], 0.0) / want[r])
        for i in range(count):
            stops = rising[i] and level >= 1.0
            if rising[i] and not stops:
                for k in range(start[i], start[i + 1]):
                    r = resource[k]
                    if demand[k] > 0.0 and left[r] <= level * want[r] * (1.0 + 1e-12):
                        stops = True
            if stops:
                rate[i] = level
        # Only now: those that stop together must all be seen against the same rest.
        for i in range(count):
            if rising[i] and (level >= 1.0 or rate[i] < 1.0):
                rising[i] = False
                for k in range(start[i], start[i + 1]):
                    left[resource[k]] -= level * demand[k]
    return rate
