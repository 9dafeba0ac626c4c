"""LayerNormMLP: norm, two products and the activation between them in one module."""

from __future__ import annotations

import torch

from echo_megatron.te import kernels, products
from echo_megatron.te.base import TransformerEngineBaseModule
from echo_megatron.te.communication import size_of
from echo_megatron.te.norms import norm_backward, norm_forward
from echo_megatron.te.precision import FP8GlobalStateManager
from echo_megatron.te.products import Product

GATED = ("geglu", "reglu", "swiglu", "qgeglu", "sreglu", "glu")


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, w1, b1, w2, b2, eps, gated, first, second):
        normed, mean, sigma = norm_forward(x, norm_weight, norm_bias, eps)
        inner, saved1 = products.forward(first, normed, w1, b1)
        acted = kernels.gated_activation(inner) if gated else kernels.activation(inner)
        out, saved2 = products.forward(second, acted, w2, b2)
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, sigma, saved1, inner, saved2, w1, w2)
        ctx.arguments = gated, first, second, w1, w2, b1 is not None, b2 is not None
        ctx.updates_scales = first.recipe is not None and FP8GlobalStateManager.is_first_fp8_module()
        return out

    @staticmethod
    def backward(ctx, grad):
        gated, first, second, w1, w2, has_b1, has_b2 = ctx.arguments
        x, norm_weight, norm_bias, mean, sigma, saved1, inner, saved2, *_ = ctx.saved_tensors
        dacted, dw2, db2 = products.backward(second, grad.reshape(-1, grad.shape[-1]), saved2, w2, has_b2)
        back = kernels.gated_activation_backward if gated else kernels.activation_backward
        dnormed, dw1, db1 = products.backward(first, back(dacted, inner), saved1, w1, has_b1)
        dx, dnorm, dnorm_bias = norm_backward(dnormed, x, mean, sigma, norm_weight, norm_bias)
        if ctx.updates_scales:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, dnorm, dnorm_bias, dw1, db1, dw2, db2, None, None, None, None


class LayerNormMLP(TransformerEngineBaseModule):
    gemms = 2

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        eps=1e-5,
        sequence_parallel=False,
        return_bias=False,
        get_rng_state_tracker=None,
        tp_group=None,
        tp_size=1,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        activation="gelu",
        output_layer_init_method=None,
        fuse_wgrad_accumulation=False,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cuda",
        set_parallel_mode=False,
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        **_,
    ):
        super().__init__()
        self.tp_size = size_of(tp_group) if tp_group is not None else tp_size
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.eps, self.return_bias, self.use_bias = eps, return_bias, bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.gated = activation in GATED
        self.modes = ("column", "row") if set_parallel_mode else (None, None)
        self.overlaps = ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad
        dtype = params_dtype or torch.get_default_dtype()
        inner = ffn_hidden_size // self.tp_size
        self.make_norm(normalization, hidden_size, dtype, device, zero_centered_gamma, self.sequence_parallel)
        shapes = ((inner * (2 if self.gated else 1), hidden_size), (hidden_size, inner))
        inits = (init_method, output_layer_init_method)
        for i, (shape, init) in enumerate(zip(shapes, inits), 1):
            self.make_weight(f"fc{i}_weight", shape, init, dtype, device, dim=i - 1, rng_tracker=get_rng_state_tracker)
            if bias:
                self.make_bias(
                    f"fc{i}_bias",
                    shape[0],
                    dtype,
                    device,
                    parallel=i == 1,
                    sequence_parallel=self.sequence_parallel,
                )

    def forward(self, inp, is_first_microbatch=None, **_):
        dtype = self.begin_forward(inp)
        gather, scatter, scatter_backward = self.overlaps
        common = (dtype, is_first_microbatch, self.fuse_wgrad_accumulation)
        first, second = (
            Product(self, f"fc{i}_weight", common[0], self.modes[i - 1], common[1], common[2]) for i in (1, 2)
        )
        first.overlap_gather, first.overlap_scatter_backward = gather, scatter_backward
        second.overlap_scatter, second.overlap_gather_backward = scatter, gather
        apply = self.use_bias and not self.return_bias
        out = _LayerNormMLP.apply(
            inp.reshape(-1, inp.shape[-1]),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias if self.use_bias else None,
            self.fc2_weight,
            self.fc2_bias if apply else None,
            self.eps,
            self.gated,
            first,
            second,
        )
        out = out.view(-1, *inp.shape[1:-1], out.shape[-1])
        return (out, self.fc2_bias if self.use_bias else None) if self.return_bias else out
