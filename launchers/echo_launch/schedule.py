"""Which ranks to trace, and in which order: one of each class first, then spot checks of what was assumed equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_hooks.compose.roles import (
    RankClass,
    RankFacts,
    class_trees,
    point_to_point_families,
    rank_axes,
    rank_classes,
)
from echo_hooks.compose.symmetry import Axis, Tree, gaps, open_questions, spot_checks
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import rank_ranges

BUDGET = 12
"""Spot checks stop at this many traced ranks; classes without a traced rank are never given up, and where there are
more classes than this, one check is made all the same: the last rank of the first class, whose place differs on most
axes (in Megatron's layout, not the root of its TP group)."""


@dataclass(frozen=True)
class Wave:
    """Ranks to trace next, with the reason for each. ``in_order``: each waits for the one before it."""

    ranks: tuple[tuple[int, str], ...]
    in_order: bool = False


class Schedule:
    """Decides from what is traced so far; ``wanted`` is a list of ranks, or None for Echo's own choice.

    ``facts``: of the ranks traced, their groups as indices of the merged table ``groups``.
    """

    def __init__(self, world_size: int, nproc_per_node: int, wanted: Sequence[int] | None = None):
        self.world_size = world_size
        self.nproc_per_node = nproc_per_node
        self.wanted = wanted

    def first(self) -> Wave:
        """Rank 0, whose broadcasts answer the others (of a list its lowest rank)."""
        rank = 0 if self.wanted is None else min(self.wanted)
        return Wave(((rank, "first rank: it knows all groups and is the source of most broadcasts"),))

    def next(self, facts: Mapping[int, RankFacts], groups: GroupTable) -> Wave | None:
        """The next wave; None when nothing is left to trace. UsageError when the ranks asked for cannot do."""
        view = self._view(facts, groups)
        missing = [c for c, tree in zip(view.classes, view.trees) if tree is None]
        if self.wanted is not None:
            return self._next_wanted(facts, view, missing)
        if missing:
            chosen = [(rank_class, self._representative(rank_class, view)) for rank_class in missing]
            chosen.sort(key=lambda item: (item[0].places, item[1]))  # pipeline order: a stage hears from the one before
            return Wave(tuple((rank, _reason(c)) for c, rank in chosen), in_order=view.hands_on)
        left = max(BUDGET, len(view.classes) + 1) - len(facts)
        checks = self._checks(facts, view)
        return Wave(tuple(checks[:left])) if checks and left > 0 else None

    def unsettled(self, facts: Mapping[int, RankFacts], groups: GroupTable) -> list[str]:
        """What stays assumed although a difference was found nearby; one sentence each, for manifest and report."""
        view = self._view(facts, groups)
        open_ranks = [rank for tree in view.trees if tree is not None for rank, _ in gaps(tree)]
        open_ranks += [rank for rank, _ in _across(view)]
        if not open_ranks:
            return []
        return [
            f"programs differ between ranks of one class, and it was not settled how ranks such as "
            f"{rank_ranges(sorted(set(open_ranks))[:8])} behave: --trace-ranks all (or a list with them) would tell"
        ]

    # ---- how ----

    def _view(self, facts: Mapping[int, RankFacts], groups: GroupTable) -> _View:
        classes = rank_classes(self.world_size, groups, point_to_point_families(facts, groups))
        axes = rank_axes(self.world_size, groups, self.nproc_per_node)
        roots: dict[int, int] = {}
        for fact in facts.values():
            for _, root in fact.roots:
                roots[root] = roots.get(root, 0) + 1
        hands_on = any(fact.hands_on for fact in facts.values())
        return _View(classes, axes, class_trees(facts, classes, axes), roots, hands_on)

    def _next_wanted(self, facts: Mapping[int, RankFacts], view: _View, missing: list[RankClass]) -> Wave | None:
        assert self.wanted is not None
        wanted = set(self.wanted)
        lost = [c for c in missing if wanted.isdisjoint(c.ranks)]
        if lost:
            raise UsageError(
                f"--trace-ranks: no listed rank can stand for {rank_ranges(r for c in lost for r in c.ranks)} (other "
                f"groups, or other places in them): add {rank_ranges(c.ranks[0] for c in lost)}"
            )
        heads = sorted(((c, min(wanted & set(c.ranks))) for c in missing), key=lambda item: (item[0].places, item[1]))
        if heads:
            return Wave(tuple((rank, "asked for (--trace-ranks)") for _, rank in heads), in_order=view.hands_on)
        rest = sorted(wanted - set(facts))
        return Wave(tuple((rank, "asked for (--trace-ranks)") for rank in rest)) if rest else None

    def _representative(self, rank_class: RankClass, view: _View) -> int:
        """The world's last rank in its class; else one that is the root of broadcasts to others of its class."""
        last = self.world_size - 1
        if rank_class.ranks[-1] == last:
            return last
        return max(rank_class.ranks, key=lambda rank: (view.roots.get(rank, 0), -rank))

    def _checks(self, facts: Mapping[int, RankFacts], view: _View) -> list[tuple[int, str]]:
        """Ranks worth tracing beyond one of each class: answers to what is open, before new questions are asked."""
        settle = [(rank, why) for rank, why in _donors(facts) if rank not in facts and rank < self.world_size]
        for tree in view.trees:
            if tree is not None:
                settle += open_questions(tree)[:2]
        # The first and the last class speak for those between them: what differs there is then looked for in all.
        ends = [c for c in view.classes if c.ranks[0] == 0 or c.ranks[-1] == self.world_size - 1]
        for checks in (settle, _across(view), *(self._spot_checks(c, facts, view) for c in ends)):
            if checks:
                return [(rank, why) for i, (rank, why) in enumerate(checks) if rank not in [r for r, _ in checks[:i]]]
        return []

    @staticmethod
    def _spot_checks(rank_class: RankClass, facts: Mapping[int, RankFacts], view: _View) -> list[tuple[int, str]]:
        """The last rank of the class, which is the last on most axes, then what single axes still lack."""
        ranks = rank_class.ranks
        checks = [] if ranks[-1] in facts else [(ranks[-1], "last rank of its class")]
        known = [rank for rank in ranks if rank in facts or rank == ranks[-1]]
        return checks + spot_checks(ranks, known, view.axes)


@dataclass(frozen=True)
class _View:
    classes: list[RankClass]
    axes: list[Axis]
    trees: list[Tree | None]
    roots: dict[int, int]  # global rank -> rooted collectives that it is the root of, as seen by the traced ranks
    hands_on: bool


def _reason(rank_class: RankClass) -> str:
    if not rank_class.places:
        return "one of its groups, or of their sizes"
    return "one of " + ", ".join(f"{name} place {place}" for name, place in rank_class.places)


def _across(view: _View) -> list[tuple[int, str]]:
    """A difference found in one class is looked for in the others: a rank on the side not traced there."""
    questions = []
    cuts = {(cut.axis.name, cut.low, cut.high): cut for tree in view.trees if tree for cut in tree.cuts() if cut.axis}
    for cut in cuts.values():
        assert cut.axis is not None
        places = cut.axis.places
        for tree in view.trees:
            if tree is None:
                continue
            for side in (lambda p, c=cut: 0 <= p <= c.low, lambda p, c=cut: p >= c.high):
                members = [rank for rank in tree.ranks if side(places[rank])]
                if members and not any(side(places[rank]) for rank in tree.traced):
                    why = f"programs differ at place {cut.high} of {cut.axis.name} elsewhere"
                    questions.append((min(members, key=lambda r: (abs(int(places[r]) - cut.high), r)), why))
    return questions


def _donors(facts: Mapping[int, RankFacts]) -> list[tuple[int, str]]:
    return [
        (donor, f"source of values that rank {fact.rank} asked for")
        for fact in facts.values()
        for donor in sorted(fact.unanswered)
    ]
