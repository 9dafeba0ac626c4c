"""Linear and LayerNormLinear: Transformer Engine's arguments, parameter names, communication and saved tensors."""

from __future__ import annotations

import torch

from echo_megatron.te import products
from echo_megatron.te.base import TransformerEngineBaseModule, WeightGradStore
from echo_megatron.te.communication import size_of
from echo_megatron.te.norms import norm_backward, norm_forward
from echo_megatron.te.precision import FP8GlobalStateManager
from echo_megatron.te.products import Product


class _Parallel(TransformerEngineBaseModule):
    """Arguments that Linear and LayerNormLinear share."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel,
        fuse_wgrad_accumulation,
        tp_group,
        tp_size,
        bias,
        return_bias,
        params_dtype,
        parallel_mode,
        delay_wgrad_compute,
        ub_name,
    ):
        super().__init__()
        self.tp_size = size_of(tp_group) if tp_group is not None else tp_size
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        assert parallel_mode in ("row", "column", None), f"parallel_mode {parallel_mode} not supported"
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.ub_name = ub_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)

    def _parameters_of_product(self, init_method, get_rng_state_tracker, rng_tracker_name, device) -> None:
        dim = {"column": 0, "row": 1, None: -1}[self.parallel_mode]
        self.make_weight(
            "weight",
            (self.out_features, self.in_features),
            init_method,
            self.params_dtype,
            device,
            dim=dim,
            rng_tracker=get_rng_state_tracker,
            rng_name=rng_tracker_name,
        )
        if self.use_bias:
            self.make_bias(
                "bias",
                self.out_features,
                self.params_dtype,
                device,
                parallel=self.parallel_mode == "column",
                sequence_parallel=self.sequence_parallel,
            )
        else:
            self.bias = torch.empty(0, dtype=self.params_dtype)

    def reset_parameters(self, defer_init=False) -> None:
        pass

    def _bias_result(self, out):
        return (out, self.bias.to(out.dtype) if self.use_bias else self.bias) if self.return_bias else out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, product):
        out, saved = products.forward(product, x, weight, bias)
        ctx.save_for_backward(saved, weight)
        ctx.product, ctx.use_bias, ctx.weight = product, bias is not None, weight
        ctx.updates_scales = product.recipe is not None and FP8GlobalStateManager.is_first_fp8_module()
        return out

    @staticmethod
    def backward(ctx, grad):
        dgrad, wgrad, bgrad = products.backward(
            ctx.product, grad.reshape(-1, grad.shape[-1]), ctx.saved_tensors[0], ctx.weight, ctx.use_bias
        )
        if ctx.updates_scales:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dgrad, wgrad, bgrad, None


class Linear(_Parallel):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
        **_,
    ):
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            tp_group,
            tp_size,
            bias,
            return_bias,
            params_dtype,
            parallel_mode,
            delay_wgrad_compute,
            ub_name,
        )
        self.save_original_input = save_original_input
        self.ub_overlap_ag = ub_overlap_ag
        self.ub_overlap_rs = ub_overlap_rs
        self.ub_overlap_rs_dgrad = ub_overlap_rs_dgrad
        self._parameters_of_product(init_method, get_rng_state_tracker, rng_tracker_name, device)

    def forward(self, inp, is_first_microbatch=None, **_):
        dtype = self.begin_forward(inp)
        product = Product(
            self,
            "weight",
            dtype,
            self.parallel_mode,
            is_first_microbatch,
            self.fuse_wgrad_accumulation,
            needs_input_grad=inp.requires_grad,
            overlap_gather=self.ub_overlap_ag,
            overlap_scatter=self.ub_overlap_rs,
            overlap_gather_backward=self.ub_overlap_ag,
            overlap_scatter_backward=self.ub_overlap_rs_dgrad,
        )
        rows = inp.reshape(-1, self.in_features)
        out = _Linear.apply(rows, self.weight, self.bias if self.apply_bias else None, product)
        return self._bias_result(_shaped(out, inp))


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, eps, product):
        normed, mean, sigma = norm_forward(x, norm_weight, norm_bias, eps)
        product.needs_input_grad = True
        out, saved = products.forward(product, normed, weight, bias)
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, sigma, saved, weight)
        ctx.product, ctx.use_bias, ctx.weight = product, bias is not None, weight
        ctx.updates_scales = product.recipe is not None and FP8GlobalStateManager.is_first_fp8_module()
        ctx.set_materialize_grads(False)
        return out, normed

    @staticmethod
    def backward(ctx, grad, normed_grad):
        x, norm_weight, norm_bias, mean, sigma, saved, _ = ctx.saved_tensors
        dgrad, wgrad, bgrad = products.backward(
            ctx.product, grad.reshape(-1, grad.shape[-1]), saved, ctx.weight, ctx.use_bias
        )
        if normed_grad is not None:
            dgrad = dgrad + normed_grad
        dx, norm_wgrad, norm_bgrad = norm_backward(dgrad, x, mean, sigma, norm_weight, norm_bias)
        if ctx.updates_scales:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, norm_wgrad, norm_bgrad, wgrad, bgrad, None, None


class LayerNormLinear(_Parallel):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_overlap_ag=False,
        ub_overlap_rs_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
        **_,
    ):
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            tp_group,
            tp_size,
            bias,
            return_bias,
            params_dtype,
            parallel_mode,
            delay_wgrad_compute,
            ub_name,
        )
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        self.normalization = normalization
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.ub_overlap_ag = ub_overlap_ag
        self.ub_overlap_rs_dgrad = ub_overlap_rs_dgrad
        self.make_norm(
            normalization, in_features, self.params_dtype, device, zero_centered_gamma, self.sequence_parallel
        )
        self._parameters_of_product(init_method, get_rng_state_tracker, rng_tracker_name, device)

    def forward(self, inp, is_first_microbatch=None, **_):
        dtype = self.begin_forward(inp)
        product = Product(
            self,
            "weight",
            dtype,
            self.parallel_mode,
            is_first_microbatch,
            self.fuse_wgrad_accumulation,
            overlap_gather=self.ub_overlap_ag,
            overlap_scatter_backward=self.ub_overlap_rs_dgrad,
        )
        out, normed = _LayerNormLinear.apply(
            inp.reshape(-1, self.in_features),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self.bias if self.apply_bias else None,
            self.eps,
            product,
        )
        result = self._bias_result(_shaped(out, inp))
        if not self.return_layernorm_output:
            return result
        return (*(result if isinstance(result, tuple) else (result,)), normed.view(inp.shape))


def _shaped(out: torch.Tensor, inp: torch.Tensor) -> torch.Tensor:
    """[tokens, out] as the input was; a gather or scatter has changed its first dimension."""
    return out.view(-1, *inp.shape[1:-1], out.shape[-1])
