"""GroupedLinear: one product for each expert, on its own rows."""

from __future__ import annotations

import torch

from echo_megatron.te.base import TransformerEngineBaseModule, WeightGradStore
from echo_megatron.te.communication import size_of
from echo_megatron.te.precision import FP8GlobalStateManager, quantize
from echo_megatron.te.products import accumulate, scale


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, splits, module, first, dtype, needs_input_grad, *parameters):
        weights, biases = parameters[: module.num_gemms], parameters[module.num_gemms :]
        recipe = FP8GlobalStateManager.get_fp8_recipe() if module.fp8 else None
        out = x.new_empty((x.shape[0], weights[0].shape[0]), dtype=dtype)
        saved = []
        for i, (part, target) in enumerate(zip(x.split(splits), out.split(splits))):
            bias = biases[i] if biases else None
            if recipe is None:
                w = weights[i].t()
                a = part
            else:
                q = quantize(part, recipe.dtype(True), rows=True, columns=True)
                w = module.quantized_weight(
                    f"weight{i}", weights[i].detach(), recipe.dtype(True), first, needs_input_grad
                ).rows.t()
                a, part = q.rows, q.columns
            saved.append(part)
            _into(target, a, w, bias, dtype)
        ctx.save_for_backward(*([x] if recipe is None else saved), *weights)
        ctx.arguments = splits, module, first, dtype, recipe, weights, bool(biases), x.shape, needs_input_grad
        ctx.updates_scales = recipe is not None and FP8GlobalStateManager.is_first_fp8_module()
        return out

    @staticmethod
    def backward(ctx, grad):
        splits, module, first, dtype, recipe, weights, use_bias, shape, needs_input_grad = ctx.arguments
        count = module.num_gemms
        saved = ctx.saved_tensors[:-count]
        inputs = saved[0].split(splits) if recipe is None else saved
        dx = grad.new_empty(shape) if needs_input_grad else None
        parts = grad.split(splits)
        rows, columns = list(parts), [part.t() for part in parts]
        if recipe is not None:
            both = [quantize(part, recipe.dtype(False), rows=True, columns=True) for part in parts]
            rows, columns = [q.rows for q in both], [q.columns for q in both]
        if dx is not None:
            for i, target in enumerate(dx.split(splits)):
                w = weights[i]
                if recipe is not None:
                    w = module.quantized_weight(
                        f"weight{i}", weights[i].detach(), recipe.dtype(True), first, True
                    ).columns.t()
                _into(target, rows[i], w, None, dtype)
        wgrads: list[torch.Tensor | None] = [None] * count
        if weights[0].requires_grad:

            def compute():
                return [
                    accumulate(
                        columns[i],
                        inputs[i] if recipe is None else inputs[i].t(),
                        weights[i],
                        module.fuse_wgrad_accumulation,
                        dtype,
                    )
                    if splits[i]
                    else _nothing(weights[i], module.fuse_wgrad_accumulation)
                    for i in range(count)
                ]

            if module.wgrad_store.delay_wgrad_compute():
                module.wgrad_store.put(compute)
            else:
                wgrads = compute()
        bias_grads = [torch.empty(grad.shape[1], dtype=dtype, device=grad.device)] * count if use_bias else []
        if ctx.updates_scales:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, None, None, None, None, None, *wgrads, *bias_grads


def _into(target, a, w, bias, dtype) -> None:
    """target = a w, where there are rows."""
    if not target.shape[0]:
        return
    if a.dtype.itemsize == 1:
        torch.ops.aten._scaled_mm.out(a, w, scale(a.device), scale(a.device), bias, out_dtype=dtype, out=target)
    elif bias is not None:
        torch.addmm(bias, a, w, out=target)
    else:
        torch.mm(a, w, out=target)


def _nothing(weight, fuse: bool):
    """An expert without rows."""
    if not fuse:
        return torch.zeros_like(weight)
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    return None


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms,
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
        device="cuda",
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        **_,
    ):
        self.gemms = num_gemms
        super().__init__()
        self.num_gemms = num_gemms
        self.tp_size = size_of(tp_group) if tp_group is not None else tp_size
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.parallel_mode = parallel_mode
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.save_original_input = save_original_input
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        dim = {"column": 0, "row": 1, None: -1}[parallel_mode]
        for i in range(num_gemms):
            shape = (self.out_features, self.in_features)
            self.make_weight(
                f"weight{i}",
                shape,
                init_method,
                self.params_dtype,
                device,
                dim=dim,
                rng_tracker=get_rng_state_tracker,
                rng_name=rng_tracker_name,
            )
            if bias:
                self.make_bias(
                    f"bias{i}",
                    self.out_features,
                    self.params_dtype,
                    device,
                    parallel=parallel_mode == "column",
                    sequence_parallel=False,
                )

    def forward(self, inp, m_splits, is_first_microbatch=None, **_):
        """``inp`` [rows, in], ``m_splits``: rows of each expert."""
        splits = [int(n) for n in m_splits]
        if len(splits) != self.num_gemms:
            raise AssertionError(f"Number of splits {len(splits)} should match number of GEMMs {self.num_gemms}.")
        dtype = self.begin_forward(inp)
        parameters = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        if self.apply_bias:
            parameters += [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        rows = inp.reshape(-1, self.in_features)
        out = _GroupedLinear.apply(rows, splits, self, is_first_microbatch, dtype, inp.requires_grad, *parameters)
        out = out.view(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return out
        return out, [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None


class Fp8Padding(torch.nn.Module):
    """Rows of each expert padded to what 8-bit products need."""

    def __init__(self, num_gemms, align_size=16):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp, m_splits):
        padded = [-(-int(n) // self.align_size) * self.align_size for n in m_splits]
        if padded == [int(n) for n in m_splits]:
            return inp, m_splits
        return _Rows.apply(inp, sum(padded)), padded


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms, align_size=16):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp, m_splits):
        rows = sum(int(n) for n in m_splits)
        return inp if rows == inp.shape[0] else _Rows.apply(inp, rows)


class _Rows(torch.autograd.Function):
    """Rows copied with gaps added or taken out, in one kernel."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = x.shape[0]
        return torch.ops.fused.move_rows(x, x.new_empty(0), rows)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.fused.move_rows(grad, grad.new_empty(0), ctx.rows), None
