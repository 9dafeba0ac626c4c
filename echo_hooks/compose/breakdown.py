"""Where the microseconds of a step went: one sweep over the intervals of a rank."""

from __future__ import annotations

import numpy as np
from numba import njit

from echo_hooks.compose.result import Breakdown
from echo_hooks.graph.program import Kind


def breakdown(
    kind: np.ndarray,
    name_of: np.ndarray,
    names: list[str],
    start: np.ndarray,
    ready: np.ndarray,
    end: np.ndarray,
    until_us: float,
    period_us: float,
    steps: int,
) -> Breakdown:
    """Attribute the period that ends at ``until_us``; ``name_of``: index into ``names`` per record, -1 for none.

    What ran before the period began is work of the next repetition in the steady state, so it is moved on by one
    period. Exposed communication of several names at once counts for the one that began to move first.
    """
    if period_us <= 0.0:
        return Breakdown(0.0, 0.0, dict.fromkeys(names, 0.0), 0.0, 0.0, 0.0, dict.fromkeys(names, 0.0))
    local = (kind == Kind.COMPUTE) | (kind == Kind.COPY)
    one_sided = (kind == Kind.SEND) | (kind == Kind.RECV)
    moving = (one_sided | (kind == Kind.COLLECTIVE)) & ~np.isnan(end)
    bubble, waiting = len(names) + 1, len(names) + 2
    intervals = [
        (start[local], end[local], np.zeros(int(local.sum()), np.int64)),
        (ready[moving], end[moving], name_of[moving] + 1),
        (start[moving], ready[moving], np.where(one_sided[moving], bubble, waiting)),
    ]
    begin, finish, label = (np.concatenate(columns) for columns in zip(*intervals))
    begin, finish, label = _wrapped(begin, finish, label, until_us, period_us)
    order = np.argsort(np.concatenate([begin, finish]), kind="stable")
    exposed, union = _sweep(
        begin, finish, order, label.astype(np.int64), until_us - period_us, until_us, len(names) + 4
    )
    return Breakdown(
        step_us=period_us / steps,
        compute_us=float(exposed[0]) / steps,
        exposed_communication_us={n: float(exposed[i + 1]) / steps for i, n in enumerate(names)},
        bubble_us=float(exposed[bubble]) / steps,
        waiting_us=float(exposed[waiting]) / steps,
        host_us=float(exposed[len(names) + 3]) / steps,
        communication_us={n: float(union[i + 1]) / steps for i, n in enumerate(names)},
    )


def _wrapped(begin, finish, label, until: float, period: float):
    """Intervals cut to the period, what lies before it moved on by whole periods."""
    pieces = []
    while len(begin):
        inside = finish > until - period
        pieces.append((np.maximum(begin[inside], until - period), finish[inside], label[inside]))
        before = begin < until - period
        begin, label = begin[before] + period, label[before]
        finish = np.minimum(finish[before] + period, until)
    columns = [np.concatenate(c) for c in zip(*pieces)] if pieces else [begin, finish, label]
    real = columns[1] > columns[0]
    return [c[real] for c in columns]


@njit(cache=True)
def _sweep(begin, finish, order, label, low: float, high: float, labels: int):
    """Time per label where it is the lowest active one (communication labels, 1 to labels-4, count as one rank and
    go to the earliest begun), the last label taking what is left; and the union of each label's intervals. ``order``:
    of all begins and, behind them, all ends."""
    n = len(begin)
    active = np.zeros(labels, np.int64)
    since = np.zeros(labels)
    exposed = np.zeros(labels)
    union = np.zeros(labels)
    now = low
    for i in range(2 * n + 1):
        t = high
        if i < 2 * n:
            t = begin[order[i]] if order[i] < n else finish[order[i] - n]
        if t > now:
            chosen = labels - 1
            if active[0] > 0:
                chosen = 0
            else:
                for x in range(1, labels - 3):
                    if active[x] > 0 and (chosen == labels - 1 or since[x] < since[chosen]):
                        chosen = x
                if chosen == labels - 1:
                    if active[labels - 3] > 0:
                        chosen = labels - 3
                    elif active[labels - 2] > 0:
                        chosen = labels - 2
            exposed[chosen] += t - now
            for x in range(labels - 1):
                if active[x] > 0:
                    union[x] += t - now
            now = t
        if i < 2 * n:
            j = order[i]
            x = label[j if j < n else j - n]
            if j < n:
                if active[x] == 0:
                    since[x] = t
                active[x] += 1
            else:
                active[x] -= 1
    return exposed, union
