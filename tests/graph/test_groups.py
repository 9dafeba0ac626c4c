"""Families of groups, and how a role's program is carried over to another rank."""

import pytest

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.graph.roles import group_for, peer_for


def tp2_pp2_dp2() -> GroupTable:
    table = GroupTable()
    table.add(tuple(range(8)), name="world")
    for ranks in ((0, 1), (2, 3), (4, 5), (6, 7)):
        table.add(ranks, desc="tp", site="a.py:1")
    for ranks in ((0, 4), (1, 5), (2, 6), (3, 7)):
        table.add(ranks, desc="pp", site="a.py:1")
    return table


def test_groups_of_one_place_and_description_form_a_family():
    table = tp2_pp2_dp2()
    assert [[g.ranks for g in family] for family in table.families()] == [
        [tuple(range(8))],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 4), (1, 5), (2, 6), (3, 7)],
    ]
    assert [g.name for g in table.family(1)] == ["tp"] * 4


def test_a_repeated_rank_opens_a_new_family():
    table = GroupTable()
    first, second = table.add((0, 1), desc="x"), table.add((1, 2), desc="x")
    assert (first.family, second.family) == (0, 1)


def test_group_and_peer_of_another_member_of_the_role():
    table = tp2_pp2_dp2()
    pipeline = table[5]  # (0, 4), as traced rank 0 sees it
    mapped = group_for(table, pipeline, 3)
    assert mapped.ranks == (3, 7)
    assert peer_for(pipeline, 4, mapped) == 7
    assert peer_for(pipeline, -1, mapped) == -1


def test_a_rank_outside_the_family_cannot_share_the_role():
    table = GroupTable()
    embedding = table.add((0, 3), desc="embedding")
    with pytest.raises(ValueError, match="rank 1 is in no group of the family"):
        group_for(table, embedding, 1)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([5], "5"), ([0, 1, 2, 5], "0-2,5"), ([0, 8, 16, 24], "0-24:8"), ([3, 1], "1,3"), (range(96), "0-95")],
)
def test_rank_ranges(ranks, text):
    assert rank_ranges(ranks) == text
