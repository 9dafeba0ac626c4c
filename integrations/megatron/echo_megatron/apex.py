"""What stands in for the parts of Apex that Megatron uses."""

from __future__ import annotations

import torch

from echo_megatron.te import kernels
from echo_megatron.te.norms import LayerNorm, RMSNorm, norm_backward, norm_forward
from echo_megatron.te.optimizers import (
    FusedAdam,
    FusedSGD,
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "FusedAdam",
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedRMSNorm",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "wgrad_gemm_accum_fp16",
    "wgrad_gemm_accum_fp32",
]

FusedLayerNorm = MixedFusedLayerNorm = LayerNorm
FusedRMSNorm = MixedFusedRMSNorm = RMSNorm


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Megatron's own layer norm calls the function behind Apex's module."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        rows = input.reshape(-1, weight.numel())
        out, mean, sigma = norm_forward(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, bias, mean, sigma)
        return out.view(input.shape)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, bias, mean, sigma = ctx.saved_tensors
        grads = norm_backward(grad.reshape(rows.shape), rows, mean, sigma, weight, bias)
        return grads[0].view(grad.shape), grads[1], grads[2], None, None, None


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """fused_weight_gradient_mlp_cuda: grad_output^T inputs added to the 32-bit sum of gradients."""
    rows = (t.reshape(-1, t.shape[-1]) for t in (grad_output, inputs))
    grad, inputs = rows
    kernels.addmm_(main_grad, grad.t(), inputs)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
