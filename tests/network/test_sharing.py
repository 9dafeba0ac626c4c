"""Max-min fair sharing against cases worked out by hand, and its conservation laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hooks.network.sharing import max_min_rates


@pytest.mark.parametrize(
    ("loads", "capacities", "expected"),
    [
        ([], [1.0], []),
        ([[]], [1.0], [1.0]),
        ([[(0, 10.0)]], [10.0], [1.0]),  # alone: full speed
        ([[(0, 10.0)], [(0, 10.0)]], [10.0], [0.5, 0.5]),
        ([[(0, 10.0)], [(1, 10.0)]], [10.0, 10.0], [1.0, 1.0]),  # eight rings on eight NICs do not collide
        ([[(0, 4.0)], [(0, 4.0)]], [10.0], [1.0, 1.0]),  # neither fills the link
        # Two on a link of 10, one of them held to a fifth by another link: the first takes the rest.
        ([[(0, 10.0)], [(0, 10.0), (1, 10.0)]], [10.0, 2.0], [0.8, 0.2]),
        # The chain of the textbook: A on both links, B on the first, C on the second, link 2 twice as fast.
        ([[(0, 1.0), (1, 1.0)], [(0, 1.0)], [(1, 2.0)]], [1.0, 2.0], [0.5, 0.5, 0.75]),
        ([[(0, 6.0)], [(0, 6.0)], [(0, 6.0)]], [9.0], [0.5, 0.5, 0.5]),
        ([[(0, 5.0)]], [0.0], [0.0]),  # a dead link
        ([[(0, 0.0)]], [0.0], [1.0]),  # that is not used
    ],
)
def test_by_hand(loads, capacities, expected):
    assert max_min_rates(loads, capacities) == pytest.approx(expected, abs=1e-12)


RESOURCES = 5


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(
        st.lists(st.tuples(st.integers(0, RESOURCES - 1), st.floats(0.01, 100)), max_size=4), min_size=1, max_size=8
    ),
    capacities=st.lists(st.floats(0.1, 100), min_size=RESOURCES, max_size=RESOURCES),
)
def test_conserves_and_nobody_can_be_raised(loads, capacities):
    rates = max_min_rates(loads, capacities)
    used = [0.0] * RESOURCES
    for load, rate in zip(loads, rates):
        assert 0 <= rate <= 1
        for r, demand in load:
            used[r] += rate * demand
    assert all(u <= c * (1 + 1e-9) for u, c in zip(used, capacities))
    for load, rate in zip(loads, rates):
        if rate < 1:  # held by a full link on which nobody is faster
            assert any(
                used[r] >= capacities[r] * (1 - 1e-9)
                and all(rate >= other - 1e-9 for o, other in zip(loads, rates) if any(q == r for q, _ in o))
                for r, _ in load
            )
