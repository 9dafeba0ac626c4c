"""Module path and phase of every record, in forward, backward and recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echo_hooks.graph.program import Phase

pytestmark = pytest.mark.usefixtures("stage")


class Block(nn.Module):
    def __init__(self, how: str = "plain"):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.how = how

    def inner(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def trained(echo, how="plain", optimizer=False):
    model = nn.Sequential(Block(how), Block(how)).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    steps = torch.optim.SGD(model.parameters(), 0.1)
    model(x).sum().backward()
    if optimizer:
        steps.step()
    return [(op, path) for op, path in echo.modules(Phase.FORWARD) if path], echo.modules(Phase.BACKWARD)


def test_forward_names_the_innermost_module(echo):
    forward, _ = trained(echo)
    assert forward == [
        (op, f"Sequential.{block}{leaf}")
        for block in (0, 1)
        for op, leaf in (("addmm", ".up"), ("relu", ""), ("addmm", ".down"))
    ]


def test_backward_names_the_module_that_made_the_node(echo):
    _, backward = trained(echo)
    matmuls = [path for op, path in backward if op == "mm"]
    expected = [f"Sequential.{b}.{leaf}" for b in (1, 0) for leaf in ("down", "up") for _ in range(2)]
    assert matmuls == expected
    assert [path for op, path in backward if op == "threshold_backward"] == ["Sequential.1", "Sequential.0"]


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_recomputation_is_labelled_backward_with_its_own_module(echo, how):
    forward, backward = trained(echo, how)
    assert [path for op, path in forward if op == "addmm"] == [
        f"Sequential.{b}.{leaf}" for b in (0, 1) for leaf in ("up", "down")
    ]
    recomputed = [path for op, path in backward if op == "addmm"]
    # Only the reentrant kind computes the last output again, which nobody needs.
    again = ["up", "down"] if how == "reentrant" else ["up"]
    assert recomputed == [f"Sequential.{b}.{leaf}" for b in (1, 0) for leaf in again]
    matmuls = [path for op, path in backward if op == "mm"]
    assert matmuls == [f"Sequential.{b}.{leaf}" for b in (1, 0) for leaf in ("down", "up") for _ in range(2)]


def test_optimizer_phase(echo):
    trained(echo, optimizer=True)
    assert {op for op, _ in echo.modules(Phase.OPTIMIZER)} == {"_foreach_add_"}


def test_a_module_that_raises_leaves_no_label_behind(echo):
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError

    with pytest.raises(ValueError):
        Raises()(torch.ones(1, device="cuda"))
    torch.ones(1, device="cuda").mul(2)
    assert echo.modules(Phase.FORWARD)[-1] == ("mul", "")


def test_nested_backward_in_forward(echo):
    """torch.autograd.grad inside a module (gradient penalties) does not confuse what follows."""
    model = nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).sum() + gradient.norm()).backward()
    paths = {path for op, path in echo.modules(Phase.BACKWARD) if op in ("mm", "addmm")}
    assert paths <= {"Linear", ""}
    assert "Linear" in paths
