"""Durations that never fall with more nodes.

NCCL's choices may get better with more nodes, by its mistakes; a plan must not win by that. So a group takes at least as
long as the same ranks would on fewer nodes: for each number of ranks that a node could hold instead of its own
(``fuller``), on as many nodes as its ranks then fill, and on any fewer. Since each of those is a running maximum over
numbers of nodes, durations rise

- with the nodes, at as many ranks on each, and
- with the nodes, at as many ranks in all.

Numbers of nodes are those of ``COUNTS``, and straight in between: a group on 20 nodes takes the mean of 16 and 24.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from echo_hooks.network.curves import Steps

# Powers of two, and halfway between them.
COUNTS = (1, *(count << k for k in range(32) for count in (2, 3)))
_ALL_PER_NODE = 8


def fuller(per_node: int, full: int) -> list[int]:
    """Ranks per node, from ``per_node`` on, that groups are compared at: all up to 8, then powers of two and ``full``
    (a whole node)."""
    return [g for g in range(per_node, full + 1) if g <= _ALL_PER_NODE or g in (per_node, full) or g & (g - 1) == 0]


def over_nodes(
    ranks: int, nodes: int, per_node: int, others: Sequence[int], own: Steps, on: Callable[[int, int], Steps]
) -> np.ndarray:
    """Durations over sizes of ``ranks`` on ``nodes`` nodes, ``per_node`` on the fullest, nowhere below fewer nodes.

    ``others``: ranks per node to compare with (``fuller``, perhaps fewer). ``own``: of the group as it lies; ``on``: of
    a group on so many nodes with so many ranks on each. Where a node holds fewer ranks than another, or the number of
    nodes is one of ``COUNTS``, ``own`` counts as it is.
    """
    duration = own.bounded if ranks != nodes * per_node or nodes in COUNTS else np.zeros(own.first.shape)
    for g in others:
        count = ranks // g
        if not count:
            break
        at = bisect_right(COUNTS, count) - 1
        low = [on(k, g) for k in COUNTS[: at + 1] if k * g > 1]
        if count == COUNTS[at]:
            duration = np.maximum.reduce([duration, *_above(duration, low)])
            continue
        share = (count - COUNTS[at]) / (COUNTS[at + 1] - COUNTS[at])
        high = on(COUNTS[at + 1], g)
        most = np.maximum.reduce([step.first for step in low])
        if (_between(most, np.maximum(most, high.first), share) > duration).any():
            below = np.maximum.reduce([low[-1].bounded, *_above(low[-1].bounded, low[:-1])])
            duration = np.maximum(duration, _between(below, np.maximum(below, high.bounded), share))
    return duration


def _above(duration: np.ndarray, steps: Sequence[Steps]) -> Iterator[np.ndarray]:
    """Of those that can lie above ``duration`` somewhere; ``bounded`` costs much more than ``first``, and is below."""
    for step in steps[::-1]:
        if (step.first > duration).any():
            duration = np.maximum(duration, step.bounded)
            yield step.bounded


def _between(low: np.ndarray, high: np.ndarray, share: float) -> np.ndarray:
    return low + share * (high - low)
