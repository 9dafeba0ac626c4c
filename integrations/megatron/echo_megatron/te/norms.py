"""LayerNorm and RMSNorm: one fused kernel forward, saved statistics, two kernels backward."""

from __future__ import annotations

import torch
from torch import nn

_aten = torch.ops.aten


def norm_forward(inputs, weight, bias, eps: float):
    """(output, mean or None, inverse deviation) over the last dimension; a bias makes it a LayerNorm."""
    if bias is not None:
        return _aten.native_layer_norm(inputs, [inputs.shape[-1]], weight, bias, eps)
    out, sigma = _aten._fused_rms_norm(inputs, [inputs.shape[-1]], weight, eps)
    return out, None, sigma


def norm_backward(grad, inputs, mean, sigma, weight, bias):
    """Gradients of input, weight and bias (None for RMSNorm)."""
    shape = [inputs.shape[-1]]
    if bias is not None:
        return _aten.native_layer_norm_backward(grad, inputs, shape, mean, sigma, weight, bias, [True, True, True])
    return *_aten._fused_rms_norm_backward(grad, inputs, shape, sigma, weight, [True, True]), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias, eps):
        out, mean, sigma = norm_forward(inputs, weight, bias, eps)
        ctx.save_for_backward(inputs, weight, bias, mean, sigma)
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs, weight, bias, mean, sigma = ctx.saved_tensors
        return *norm_backward(grad.contiguous(), inputs, mean, sigma, weight, bias), None


class _NormModule(nn.Module):
    with_bias = False

    def __init__(
        self,
        normalized_shape=None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype=None,
        zero_centered_gamma: bool = False,
        hidden_size=None,
        device="cuda",
        dtype=None,
        **_,
    ):
        super().__init__()
        shape = normalized_shape if normalized_shape is not None else hidden_size
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = params_dtype or dtype or torch.get_default_dtype()
        value = torch.zeros if zero_centered_gamma else torch.ones
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(value(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if self.with_bias else None
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    def forward(self, inputs):
        weight = self.weight
        rows = inputs.reshape(-1, weight.numel())
        return _Norm.apply(rows, weight, self.bias, self.eps).view(inputs.shape)

    def reset_parameters(self, **_) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()


class LayerNorm(_NormModule):
    with_bias = True


class RMSNorm(_NormModule):
    with_bias = False
