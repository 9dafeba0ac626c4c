"""Which experts an unknown router chooses: loads by hand, the same on every rank and in every run of a layer."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hooks.capture.routing import Routing


def loads(chosen: np.ndarray, experts: int) -> list[int]:
    return np.bincount(chosen.ravel(), minlength=experts).tolist()


@pytest.mark.parametrize("routing", [Routing(), Routing(hot=2.0), Routing(sampled=True, seed=3)], ids=str)
def test_each_token_has_distinct_experts(routing):
    chosen = routing.choose(100, 8, 3)
    assert chosen.shape == (100, 3) and chosen.min() >= 0 and chosen.max() < 8
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_balanced():
    assert loads(Routing().choose(64, 8, 2), 8) == [16] * 8


def test_a_hot_expert_has_its_multiple_of_the_mean_and_the_others_share_the_rest():
    # 70 tokens, 2 of 8 experts each: a mean of 17.5; twice that is 35, and 105 are left for seven experts.
    assert loads(Routing(hot=2.0).choose(70, 8, 2), 8) == [35, *[15] * 7]


def test_hot_tokens_are_spread_over_the_sequence():
    chosen = Routing(hot=2.0).choose(80, 8, 2)
    halves = [int((part == 0).sum()) for part in (chosen[:40], chosen[40:])]
    assert halves == [20, 20]


def test_no_expert_has_more_than_all_tokens():
    assert loads(Routing(hot=100.0).choose(16, 4, 2), 4)[0] == 16


def test_sampling_depends_on_the_layer_and_the_seed_alone():
    routing = Routing(sampled=True, seed=1)
    first = routing.choose(50, 16, 4, "layers.0")
    assert (first == routing.choose(50, 16, 4, "layers.0")).all()
    assert (first != routing.choose(50, 16, 4, "layers.1")).any()
    assert (first != Routing(sampled=True, seed=2).choose(50, 16, 4, "layers.0")).any()


def test_sampling_is_even_on_average():
    counts = np.array(loads(Routing(sampled=True).choose(8000, 8, 2), 8))
    # 16000 choices, 2000 an expert; sampling without replacement has a deviation of sqrt(8000 * 1/4 * 3/4) = 39.
    assert np.abs(counts - 2000).max() < 5 * 39
