"""Filling in place leaves what the general rules give, without a copy of the buffer."""

from __future__ import annotations

import pytest
import torch

from echo_hooks.world import filling
from echo_hooks.world.values import reduce_values


@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum", "max", "min", "product"])
@pytest.mark.parametrize("apart", [False, True])
def test_reduced_is_what_the_general_rule_gives(op, apart):
    own = torch.tensor([1.0, -2.0, 3.0, 0.5])
    out = torch.full((4,), 9.0) if apart else own
    expected = reduce_values(op, own.clone(), 3, {})
    filling.reduced(own, out, op, 3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("op", "expected"), [("band", 6), ("bor", 6), ("bxor", 0), ("sum", 12)])
def test_reduced_integers(op, expected):
    own = torch.tensor([6])
    filling.reduced(own, own, op, 2)
    assert own.item() == expected


def test_a_sum_of_flags_stays_a_flag():
    own = torch.tensor([True, False])
    filling.reduced(own, own, "sum", 4)
    assert own.tolist() == [True, False]


def test_gathered_repeats_and_leaves_the_input_that_lies_in_its_own_slot():
    out = torch.zeros(3, 2)
    own = out[1]
    own.copy_(torch.tensor([5.0, 7.0]))
    filling.gathered(own, out, 3)
    assert out.tolist() == [[5.0, 7.0]] * 3


def test_fitted_takes_the_common_prefix():
    out = torch.full((4,), 9.0)
    filling.fitted(torch.tensor([1.0, 2.0]), out)
    assert out.tolist() == [1.0, 2.0, 0.0, 0.0]
    filling.fitted(torch.arange(6.0), out)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    filling.fitted(torch.arange(4.0).reshape(2, 2), out)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_made_up_values_are_finite_and_not_constant():
    generator = torch.Generator().manual_seed(0)
    out = torch.full((1000,), float("nan"))
    assert filling.made_up(out, None, generator) == "N(0, 0.02)"
    assert out.isfinite().all() and 0.015 < out.std().item() < 0.025
    numbers = torch.zeros(3, dtype=torch.int64)
    assert filling.made_up(numbers, 7, None) == 7 and numbers.tolist() == [7, 7, 7]
    flags = torch.ones(2, dtype=torch.bool)
    assert filling.made_up(flags, None, None) == 0 and not flags.any()
    small = torch.zeros(8, dtype=torch.float8_e4m3fn)
    filling.made_up(small, None, None)
    assert small.float().isfinite().all()
