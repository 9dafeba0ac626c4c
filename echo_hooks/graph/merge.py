"""One group table for all traced ranks: groups made with local synchronisation exist only in their members' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.rundir import RankTrace

GroupKey = tuple  # (ranks, desc, backend, site, n-th such group of its table)
FamilyKey = tuple  # (site, desc, backend, n-th such family of its table)


def merge_groups(traces: Iterable[RankTrace]) -> GroupTable:
    """One table for all ``traces``; their ``group`` columns are renumbered in place and their ``groups`` replaced."""
    by_rank = {trace.rank: trace for trace in traces}
    merged, mappings = match_groups({rank: trace.groups for rank, trace in by_rank.items()})
    for rank, trace in by_rank.items():
        renumber_groups(trace, merged, mappings[rank])
    return merged


def renumber_groups(trace: RankTrace, merged: GroupTable, mapping: np.ndarray) -> None:
    """Let ``trace`` use ``merged``; ``mapping[i]`` is the index there of group i of the trace's own table."""
    with_none = np.append(mapping, -1)  # index -1, no group, finds the appended -1
    for part in (trace.prologue, trace.program):
        column = part.columns["group"]
        part.columns["group"] = with_none[column].astype(column.dtype)
    trace.created = [int(mapping[g]) for g in trace.created]
    trace.groups = merged


def match_groups(tables: Mapping[int, GroupTable]) -> tuple[GroupTable, dict[int, np.ndarray]]:
    """The merged table, and for each rank an array that gives the merged index of each group of its own table.

    Groups are the same when members, description, backend, site and running number among equals agree. The lowest
    rank's groups keep their numbers; groups that only others know follow, in order of rank and creation.
    """
    ranks = sorted(tables)
    merge = _Merge()
    mappings: dict[int, np.ndarray] = {}
    done: list[tuple[list[Group], np.ndarray]] = []
    for rank in ranks:
        groups = tables[rank].groups
        # Nearly always every rank created every group: one comparison instead of a walk through the table.
        mapping = next((m for other, m in done if other is groups or other == groups), None)
        if mapping is None:
            mapping = merge.add(groups)
            done.append((groups, mapping))
        mappings[rank] = mapping
    return merge.table(), mappings


@dataclass
class _Merge:
    groups: dict[GroupKey, Group] = field(default_factory=dict)
    families: dict[FamilyKey, tuple[int, str, set[int]]] = field(default_factory=dict)  # number, name, ranks seen
    sizes: list[int] = field(default_factory=list)

    def add(self, groups: list[Group]) -> np.ndarray:
        occurrences: Counter = Counter()
        mapping = []
        family_keys = family_ordinals(groups)
        for group in groups:
            same = (group.ranks, group.desc, group.backend, group.site)
            key = (*same, occurrences[same])
            occurrences[same] += 1
            if key not in self.groups:
                self.groups[key] = self._placed(group, family_keys[group.family])
            mapping.append(self.groups[key].index)
        return np.asarray(mapping, dtype=np.int64)

    def _placed(self, group: Group, key: FamilyKey) -> Group:
        extra = 0
        family_key: FamilyKey = key
        # A rank is at most once in a family: where two tables disagree on that, the later group opens a family.
        while family_key in self.families and not self.families[family_key][2].isdisjoint(group.ranks):
            extra += 1
            family_key = (*key, extra)
        if family_key not in self.families:
            self.families[family_key] = (len(self.sizes), group.name, set())
            self.sizes.append(0)
        number, name, seen = self.families[family_key]
        seen.update(group.ranks)
        self.sizes[number] += 1
        return replace(group, index=len(self.groups), name=name, family=number, member=self.sizes[number] - 1)

    def table(self) -> GroupTable:
        table = GroupTable()
        table.restore(list(self.groups.values()))
        return table


def family_ordinals(groups: Iterable[Group]) -> dict[int, FamilyKey]:
    """Family number -> (site, desc, backend, n-th family made there): the same text in every rank's table.

    That holds for local synchronisation too: each call at a place gives a rank one group, hence one family.
    """
    found: dict[int, FamilyKey] = {}
    occurrences: Counter = Counter()
    for group in groups:
        if group.family not in found:
            place = (group.site, group.desc, group.backend)
            found[group.family] = (*place, occurrences[place])
            occurrences[place] += 1
    return found
