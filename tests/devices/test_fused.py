"""What a GPU runs as one kernel is one op on the pretended device too, whatever wheel torch is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from echo_hooks.devices.fused import NAMES, FusedKernels


def kernels(mode) -> list[str]:
    return [op for op in mode.ops if op != "detach"]


def test_rms_norm_is_one_kernel_forward_and_backward(mode):
    x = torch.randn(4, 16, device="cuda", requires_grad=True)
    weight = torch.ones(16, device="cuda", requires_grad=True)
    mode.ops.clear()
    out = F.rms_norm(x, (16,), weight)
    assert kernels(mode) == ["_fused_rms_norm"] and out.shape == (4, 16)
    mode.ops.clear()
    out.backward(torch.ones_like(out))
    assert "_fused_rms_norm_backward" in mode.ops and not {"pow", "mean", "rsqrt"} & set(mode.ops)
    assert x.grad.shape == (4, 16) and weight.grad.shape == (16,)


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_activations_go_back_in_one_kernel(mode, name):
    x = torch.randn(4, 16, device="cuda", requires_grad=True)
    out = getattr(F, name)(x)
    gradient = torch.ones_like(out)
    mode.ops.clear()
    out.backward(gradient)
    assert kernels(mode) == [f"{name}_backward"] and x.grad.shape == (4, 16)


def test_decompositions_are_back_after_removal():
    """torch has the ops, and each is decomposed where no kernel is registered: else the list is out of date."""
    for name in NAMES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
    before = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in NAMES]
    kernels = FusedKernels()
    kernels.install()
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in NAMES)
    kernels.remove()
    assert before == [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in NAMES]
