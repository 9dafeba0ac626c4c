"""Ranks as people write them, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hooks.graph.problems import parse_rank_ranges, rank_ranges


@given(st.sets(st.integers(0, 9_999_999), min_size=1, max_size=40))
def test_what_is_written_is_read_back(ranks):
    assert sorted(parse_rank_ranges(rank_ranges(ranks))) == sorted(ranks)


def test_the_order_given_is_kept():
    assert parse_rank_ranges("5, 0-2") == (5, 0, 1, 2)
    assert parse_rank_ranges("0-88:8") == tuple(range(0, 89, 8))


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "3-1", "0-4:0", "1,,2", "1;2", "\u0661", "99999999", "0-3,2"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):
        parse_rank_ranges(text)
