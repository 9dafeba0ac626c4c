"""True values of small tensors: exact as long as they are known, and never wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echo_hooks.capture import shadows

pytestmark = pytest.mark.usefixtures("stage")


def test_values_follow_writes_through_views(echo):
    tensor = torch.zeros(4, device="cuda")
    tensor[1] = 4
    tensor += 1
    assert tensor.tolist() == [1, 5, 1, 1]
    assert tensor[1].item() == 5 and float(tensor.sum()) == 8
    tensor.view(2, 2)[1].fill_(3)
    tensor[:2].mul_(2)
    assert tensor.tolist() == [2, 10, 3, 3]
    assert not echo.assumptions


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((3,), 7.0, device="cuda"),
        lambda: torch.ones(3, device="cuda") * 7,
        lambda: torch.empty(3, device="cuda").fill_(7),
        lambda: torch.tensor([7.0, 7, 7], device="cuda"),
        lambda: torch.tensor([7.0, 7, 7]).cuda(),
        lambda: torch.full_like(torch.empty(3, device="cuda"), 7),
        lambda: torch.zeros(3, device="cuda").copy_(torch.full((3,), 7.0)),
        lambda: torch.zeros(3, device="cuda").copy_(torch.tensor(7, device="cuda")),
        lambda: torch.arange(7.0, 8, 0.4, device="cuda").floor(),
    ],
)
def test_sevens(echo, make):
    tensor = make()
    assert tensor.tolist() == [7, 7, 7]
    tensor[0] = 1
    assert tensor.tolist() == [1, 7, 7]
    assert not echo.assumptions


def test_writes_do_not_reach_a_constants_other_users(echo):
    one, other = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    one[0] = 1
    assert other.tolist() == [0, 0, 0]
    source = torch.arange(3.0)
    copy = source.to("cuda")
    source.add_(1)
    copy[0] = 9
    assert copy.tolist() == [9, 1, 2] and source.tolist() == [1, 2, 3]


def test_unknown_values_are_forgotten_not_kept(echo):
    tensor = torch.zeros(3, device="cuda")
    view = tensor[:2]
    tensor.uniform_()
    assert shadows.known(tensor) is None and shadows.known(view) is None
    tensor.zero_()
    assert tensor.tolist() == [0, 0, 0] and shadows.known(view) is None
    tensor.add_(torch.randn(3, device="cuda"))
    assert shadows.known(tensor) is None
    tensor.copy_(torch.randn(3, device="cuda"))
    assert shadows.known(tensor) is None


def test_values_seen_through_a_large_storage_go_stale(echo):
    large = torch.empty(10_000, device="cuda")
    one, other = large[:8], large[4:12]
    one.fill_(1)
    assert one.tolist() == [1] * 8
    other.fill_(2)
    assert other.tolist() == [2] * 8
    assert shadows.known(one) is None
    large.zero_()
    assert shadows.known(other) is None


def test_large_constants_cost_nothing_and_are_not_written_through(echo):
    tensor = torch.zeros(1 << 17, dtype=torch.int64, device="cuda")
    assert shadows.known(tensor).untyped_storage().size() == 8
    assert tensor.sum().item() == 0
    tensor[3] = 1
    assert shadows.known(tensor) is None or shadows.known(tensor).sum() == 1


def test_integers_and_masks_are_known_where_floats_are_not(echo):
    tokens = torch.arange(2000, device="cuda")
    assert (tokens % 7 == 0).sum().item() == 286
    floats = tokens.float()
    assert shadows.known(floats) is None
    assert shadows.known(tokens.to(torch.int32)) is not None
    assert shadows.known(torch.empty(257, device="cuda").fill_(0)) is None
    assert shadows.known(torch.empty(256, device="cuda").fill_(0)) is not None


def test_random_operations_have_no_value_and_leave_the_generator_alone(echo):
    before = torch.get_rng_state()
    made = [
        torch.rand(2, device="cuda"),
        torch.randn(2, device="cuda"),
        torch.randint(5, (2,), device="cuda"),
        torch.randperm(4, device="cuda"),
        torch.normal(0.0, 1.0, (2,), device="cuda"),
        torch.bernoulli(torch.ones(2, device="cuda")),
        torch.zeros(2, device="cuda").normal_(),
        torch.rand_like(torch.ones(2, device="cuda")),
        torch.multinomial(torch.ones(4, device="cuda"), 2),
        nn.functional.dropout(torch.ones(2, device="cuda"), 0.5),
    ]
    assert all(shadows.known(t) is None for t in made)
    assert torch.equal(torch.get_rng_state(), before)


def test_control_flow_in_a_script_is_that_of_the_real_one(echo):
    """Megatron's and others' small tensors: counters, flags, loss scales, gathered lengths."""
    scale, counter = torch.tensor([2.0**16], device="cuda"), torch.zeros(1, dtype=torch.int, device="cuda")
    for found in (False, True, False):
        flag = torch.tensor([float(found)], device="cuda")
        if flag.item() > 0:
            scale.copy_(torch.max(scale * 0.5, torch.ones_like(scale)))
            counter.zero_()
        else:
            counter.add_(1)
    assert (scale.item(), counter.item()) == (2.0**15, 1)
    lengths = torch.stack([torch.tensor(n, device="cuda") for n in (3, 5)])
    assert torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).tolist() == [0, 3, 8]
    assert not echo.assumptions


def test_an_operation_the_cpu_cannot_do_only_loses_the_value(echo):
    tensor = torch.ones(1, 2, 16, 8, dtype=torch.bfloat16, device="cuda")
    result = torch.ops.aten._scaled_dot_product_flash_attention(tensor, tensor, tensor)[0]
    assert result.shape == tensor.shape and shadows.known(result) is None


def test_a_header_filled_in_piece_by_piece_is_known(echo):
    """DeepSpeed's pipeline sends the shape of its activations so: into a part of a fresh integer tensor."""
    header = torch.empty(8, dtype=torch.int32, device="cuda")
    header[:3].copy_(torch.tensor([2, 16, 64], dtype=torch.int32, device="cuda"))
    assert header[:4].tolist() == [2, 16, 64, 0]


def test_the_choice_of_topk_runs_along_its_dimension(echo):
    """A router's experts each choose tokens (dim 0): different ones, none beyond the last."""
    tokens = torch.topk(torch.randn(64, 4, device="cuda").exp(), k=16, dim=0)[1].cpu()
    assert tokens.shape == (16, 4) and tokens.max() < 64
    assert all(len(set(column.tolist())) == 16 for column in tokens.T)
