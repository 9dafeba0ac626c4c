"""``transformer_engine.pytorch.ops``: activations; the op-based layers are refused by name."""

from __future__ import annotations

import torch
from torch import nn

from echo_megatron.te import kernels


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gated):
        ctx.save_for_backward(x)
        ctx.gated = gated
        return kernels.gated_activation(x) if gated else kernels.activation(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        back = kernels.gated_activation_backward if ctx.gated else kernels.activation_backward
        return back(grad.contiguous(), x), None


class _ActivationModule(nn.Module):
    gated = False

    def __init__(self, *, cache_quantized_input: bool = False):
        super().__init__()

    def forward(self, x):
        return _Activation.apply(x, self.gated)


class GELU(_ActivationModule):
    pass


class ReLU(_ActivationModule):
    pass


class SiLU(_ActivationModule):
    pass


class SwiGLU(_ActivationModule):
    gated = True


class GEGLU(_ActivationModule):
    gated = True


class ReGLU(_ActivationModule):
    gated = True


class Sequential(nn.Sequential):
    def __init__(self, *_, **__):
        raise NotImplementedError(
            "Transformer Engine's operation-based layers (use_transformer_engine_op_fuser) are not simulated;"
            " run without that option"
        )


FusibleOperation = LayerNorm = RMSNorm = BasicLinear = Linear = Bias = AllReduce = ReduceScatter = AllGather = (
    Quantize
) = Sequential
