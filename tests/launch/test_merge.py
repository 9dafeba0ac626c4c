"""One group table from many: identical tables, local synchronisation, repeated and conflicting groups."""

from __future__ import annotations

import numpy as np
from layouts import Layout, table_of, trace_of

from echo_hooks.compose.roles import program_signature
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.merge import match_groups, merge_groups


def test_equal_tables_stay_as_they_are():
    layout = Layout(16, tp=2, pp=2)
    merged, mappings = match_groups({rank: table_of(layout) for rank in range(16)})
    assert merged.groups == table_of(layout).groups
    assert all(mapping.tolist() == list(range(len(merged))) for mapping in mappings.values())


def test_local_synchronisation_gives_the_same_families_as_full_tables():
    layout = Layout(16, tp=2, pp=2, embedding=True)
    local = Layout(16, tp=2, pp=2, embedding=True, local_sync=True)
    merged, _ = match_groups({rank: table_of(local, rank) for rank in range(16)})
    full = table_of(layout)
    assert {g.ranks for g in merged} == {g.ranks for g in full}
    families = {frozenset((g.name, g.ranks) for g in family) for family in merged.families()}
    assert families == {frozenset((g.name, g.ranks) for g in family) for family in full.families()}
    for family in range(len(merged.families())):
        for rank in range(16):
            assert merged.of_rank(family, rank) is not None


def test_two_local_families_of_one_source_line_are_kept_apart():
    # A helper that makes "my TP group" and then "my DP group" at the same line.
    tables = {}
    for rank, groups in {0: ((0, 1), (0, 2)), 3: ((2, 3), (1, 3))}.items():
        tables[rank] = GroupTable()
        for ranks in groups:
            tables[rank].add(ranks, site="helper.py:7")
    merged, mappings = match_groups(tables)
    assert [[g.ranks for g in family] for family in merged.families()] == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    assert mappings[3].tolist() == [2, 3]


def test_twins_are_matched_by_their_running_number():
    tables = {}
    for rank in (0, 1):
        tables[rank] = GroupTable()
        tables[rank].add((0, 1), site="a.py:1")
        tables[rank].add((0, 1), site="a.py:1")
        tables[rank].add((0, 1), site="a.py:1", backend="gloo")
    merged, mappings = match_groups(tables)
    assert len(merged) == 3
    assert mappings[1].tolist() == [0, 1, 2]


def test_overlapping_groups_never_share_a_family():
    tables = {0: GroupTable(), 1: GroupTable()}
    tables[0].add((0, 1), site="a.py:1")
    tables[1].add((1, 2), site="a.py:1")
    merged, _ = match_groups(tables)
    assert [[g.ranks for g in family] for family in merged.families()] == [[(0, 1)], [(1, 2)]]


def test_group_columns_follow_and_signatures_stay():
    layout = Layout(16, tp=2, pp=2, local_sync=True)
    traces = [trace_of(rank, layout) for rank in (0, 5, 15)]
    before = [(program_signature(t), _named(t)) for t in traces]
    merged = merge_groups(traces)
    assert [(program_signature(t), _named(t)) for t in traces] == before
    assert all(t.groups is merged for t in traces)
    assert all(t.program.group.dtype == np.int32 for t in traces)


def test_no_traces_give_an_empty_table():
    assert len(merge_groups([])) == 0


def _named(trace):
    return [trace.groups[i].ranks if i >= 0 else None for i in trace.whole().group.tolist()]
