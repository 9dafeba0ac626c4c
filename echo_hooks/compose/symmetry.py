"""Which untraced rank is like which traced one: a small decision tree over the ranks' places in their groups.

Traced ranks of a class with equal programs make one leaf. Where programs differ, the class is cut in two at the place
on one axis that separates the kinds of program best, and each half is looked at again. What the tree leaves open (a
gap between two traced places that differ, a leaf known from one rank only) is what is worth tracing next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Axis:
    """A numbering of the ranks. ``places``: by global rank, -1 where the rank has none."""

    name: str
    places: np.ndarray


@dataclass(frozen=True)
class Tree:
    """A leaf (``axis`` is None), or a cut: ranks at places from ``high`` on belong to ``above``, others to ``below``.

    ``ranks``: all ranks it speaks for. ``traced``: those with a known program. Places between ``low`` and ``high`` are
    open: the traced rank at ``low`` and the one at ``high`` differ.
    """

    ranks: tuple[int, ...]
    traced: tuple[int, ...]
    axis: Axis | None = None
    low: int = 0
    high: int = 0
    below: Tree | None = None
    above: Tree | None = None

    def leaves(self) -> Iterator[Tree]:
        if self.below is None or self.above is None:
            yield self
            return
        yield from self.below.leaves()
        yield from self.above.leaves()

    def cuts(self) -> Iterator[Tree]:
        if self.below is None or self.above is None:
            return
        yield self
        yield from self.below.cuts()
        yield from self.above.cuts()


def grow(ranks: Sequence[int], signatures: Mapping[int, bytes], axes: Sequence[Axis]) -> Tree:
    """The tree of a class of ``ranks`` of which those in ``signatures`` (at least one) are traced.

    ``axes`` in order of preference, the last of them with a different place for every rank. Where every rank is traced
    nothing is left to say, and the tree is one leaf.
    """
    traced = tuple(sorted(signatures))
    if len(set(signatures.values())) <= 1 or len(traced) == len(ranks):
        return Tree(tuple(ranks), traced)
    axis, low, high = _best_cut(signatures, axes)
    places = axis.places
    halves = []
    for upper in (False, True):
        part = [rank for rank in ranks if (places[rank] >= high) == upper]
        halves.append(grow(part, {r: s for r, s in signatures.items() if (places[r] >= high) == upper}, axes))
    return Tree(tuple(ranks), traced, axis, low, high, *halves)


def _best_cut(signatures: Mapping[int, bytes], axes: Sequence[Axis]) -> tuple[Axis, int, int]:
    """The cut after which the fewest bits are needed to say which program a traced rank has."""
    best: tuple[float, int, int] | None = None
    found: tuple[Axis, int, int] | None = None
    for preference, axis in enumerate(axes):
        places = sorted({int(axis.places[rank]) for rank in signatures})
        for low, high in pairwise(places):
            below = Counter(s for rank, s in signatures.items() if axis.places[rank] < high)
            above = Counter(s for rank, s in signatures.items() if axis.places[rank] >= high)
            cost = (round(_bits(below) + _bits(above), 9), preference, low)
            if best is None or cost < best:
                best, found = cost, (axis, low, high)
    assert found is not None, "the last axis numbers every rank differently"
    return found


def _bits(counts: Counter) -> float:
    total = sum(counts.values())
    return -sum(n * math.log2(n / total) for n in counts.values())


def nearest(tree: Tree, rank: int) -> tuple[int, str]:
    """The traced rank that stands for ``rank``, and what is doubtful about it ("" when nothing is)."""
    doubt = ""
    while tree.axis is not None:
        place = tree.axis.places[rank]
        if tree.low < place < tree.high:
            doubt = (
                f"programs differ between places {tree.low} and {tree.high} of {tree.axis.name}, where nothing was "
                "traced: --trace-ranks all would tell"
            )
        branch = tree.above if place >= tree.high else tree.below
        assert branch is not None
        tree = branch
    return tree.traced[0], doubt


# ---- what to trace next ----


def open_questions(tree: Tree) -> list[tuple[int, str]]:
    """Ranks whose program would settle where the differences found lie: (rank, why), most telling first."""
    questions = gaps(tree)
    if tree.axis is not None:
        for leaf in tree.leaves():
            if len(leaf.traced) == 1 and len(leaf.ranks) > 1:
                other = leaf.ranks[-1] if leaf.ranks[-1] != leaf.traced[0] else leaf.ranks[0]
                questions.append((other, f"is it like rank {leaf.traced[0]}?"))
    return questions


def gaps(tree: Tree) -> list[tuple[int, str]]:
    """Of the open questions those where programs are known to change, but not where."""
    return [question for cut in tree.cuts() if (question := _gap(cut)) is not None]


def _gap(cut: Tree) -> tuple[int, str] | None:
    """A rank at an open place of the cut; next to the first or last place of the axis at first, as they are special."""
    assert cut.axis is not None
    places = cut.axis.places[np.asarray(cut.ranks)]
    inside = sorted({int(p) for p in places if cut.low < p < cut.high})
    if not inside:
        return None
    if cut.low == places.min():
        wanted = inside[0]
    elif cut.high == places.max():
        wanted = inside[-1]
    else:
        wanted = inside[len(inside) // 2]
    rank = next(rank for rank, place in zip(cut.ranks, places) if place == wanted)
    return rank, f"where between places {cut.low} and {cut.high} of {cut.axis.name} do programs change?"


def spot_checks(ranks: Sequence[int], traced: Sequence[int], axes: Sequence[Axis]) -> list[tuple[int, str]]:
    """Ranks that bring the second and the last place of every axis to a class of which ``traced`` are known.

    Of the ranks at such a place the one that shares most other places with the first traced rank: what differs then
    is put down to one axis.
    """
    base = traced[0]
    known = list(traced)
    checks: list[tuple[int, str]] = []
    members = np.asarray(ranks)
    agreement = np.sum([axis.places[members] == axis.places[base] for axis in axes], axis=0)
    for axis in axes:
        places = axis.places[members]
        distinct = np.unique(places)
        if len(distinct) < 2:
            continue
        for wanted, label in ((distinct[-1], "last"), (distinct[0], "first"), (distinct[1], "second")):
            if (axis.places[np.asarray(known)] == wanted).any():
                continue
            at_place = np.flatnonzero(places == wanted)
            rank = int(members[at_place[np.argmax(agreement[at_place])]])
            known.append(rank)
            checks.append((rank, f"{label} place of {axis.name}"))
    return checks
