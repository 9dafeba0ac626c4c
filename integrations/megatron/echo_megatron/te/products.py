"""One parallel product y = x w^T, forward and backward, with its communication: all linear layers are made of it.

What is gathered, reduced, saved and in which order follows Transformer Engine 2.9 (pytorch/module/linear.py): the input
of a column-parallel product is gathered again in backward, under the product for the input's gradient, whose reduction
runs under the product for the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from echo_megatron.te import kernels
from echo_megatron.te.base import TransformerEngineBaseModule, get_dummy_wgrad
from echo_megatron.te.communication import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim, wait
from echo_megatron.te.overlapped import gathered_mm, scattered_mm
from echo_megatron.te.precision import FP8GlobalStateManager, Quantized, quantize
from echo_megatron.te.recipes import Recipe

_aten = torch.ops.aten


@dataclass
class Product:
    """How one product is cut and computed; one for each call.

    ``mode``: "column", "row" or None. ``first``: whether this is the first micro-batch of a step (None: not told; the
    weight is then cast to 8 bits each time). ``overlap_*``: products cut into chunks that run while chunks are
    communicated.
    """

    module: TransformerEngineBaseModule
    weight_name: str
    dtype: torch.dtype
    mode: str | None
    first: bool | None
    fuse_wgrad: bool
    needs_input_grad: bool = True
    overlap_gather: bool = False
    overlap_scatter: bool = False
    overlap_gather_backward: bool = False
    overlap_scatter_backward: bool = False
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        if self.module.fp8:
            self.recipe = FP8GlobalStateManager.get_fp8_recipe()

    @property
    def group(self):
        return self.module.tp_group

    @property
    def gathers(self) -> bool:
        """Input cut along the sequence."""
        return self.mode == "column" and self.module.sequence_parallel and self.module.tp_size > 1

    @property
    def scatters(self) -> bool:
        return self.mode == "row" and self.module.sequence_parallel and self.module.tp_size > 1

    @property
    def reduces(self) -> bool:
        return self.module.tp_size > 1


# ---- forward ----


def forward(p: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """x [tokens, in] gives y [tokens, out] and what backward keeps of x."""
    late_bias = None
    if p.mode == "row" and p.reduces:
        bias, late_bias = None, bias  # added once, after the sum over ranks
    if p.recipe is not None:
        a, saved = _quantized_input(p, x)
        w = p.module.quantized_weight(
            p.weight_name, weight.detach(), p.recipe.dtype(True), p.first, p.needs_input_grad
        ).rows
        assert w is not None
    else:
        a, saved, w = x.to(p.dtype), x, weight.to(p.dtype)
        saved = a
    if p.gathers and p.overlap_gather:
        y = gathered_mm(lambda part: mm(part, w.t(), p.dtype, bias), a, p.group)
    elif p.scatters and p.overlap_scatter:
        y = scattered_mm(lambda part: mm(part, w.t(), p.dtype, bias), a, p.group)
    else:
        if p.gathers:
            a, _ = gather_along_first_dim(a, p.group)
        y = mm(a, w.t(), p.dtype, bias)
        del a
        if p.scatters:
            y, _ = reduce_scatter_along_first_dim(y, p.group)
        elif p.mode == "row" and p.reduces:
            y, _ = allreduce(y, p.group)
    return y if late_bias is None else y + late_bias, saved


def _quantized_input(p: Product, x: torch.Tensor):
    assert p.recipe is not None
    keep_input = p.module.save_original_input
    columns = not p.gathers and not keep_input  # gathered tensors are transposed once they are whole
    q = quantize(x, p.recipe.dtype(True), rows=True, columns=columns)
    return q.rows, x if keep_input else q.rows if p.gathers else q.columns


def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, bias=None) -> torch.Tensor:
    """a [m, k] by b [k, n]; 8-bit operands give ``dtype``. The bias is added by the product's epilogue."""
    if a.dtype.itemsize > 1:
        if bias is None:
            return torch.mm(a, b)
        return torch.addmm(bias.to(a.dtype), a, b)
    factor = scale(a.device)
    return _aten._scaled_mm(a, b, factor, factor, None if bias is None else bias.to(dtype), out_dtype=dtype)


_scales: dict[torch.device, torch.Tensor] = {}


def scale(device: torch.device) -> torch.Tensor:
    """A scaling factor: every product reads two."""
    if device not in _scales:
        _scales[device] = torch.empty((), dtype=torch.float32, device=device)
    return _scales[device]


# ---- backward ----


def backward(p: Product, grad: torch.Tensor, saved: torch.Tensor, weight: torch.Tensor, use_bias: bool):
    """(gradient of x, of the weight as autograd takes it, of the bias). ``grad`` [tokens, out]."""
    wants_weight = weight.requires_grad
    rows: Any
    columns: Any
    if p.recipe is None:
        grad = grad.to(p.dtype)
        if p.scatters and not p.overlap_gather_backward:
            grad, _ = gather_along_first_dim(grad, p.group)
        rows, columns, w = grad, None, weight.to(p.dtype)
    else:
        q = quantize(grad, p.recipe.dtype(False), rows=True, columns=not p.scatters)
        if p.scatters and not p.overlap_gather_backward:
            q = Quantized(gather_along_first_dim(q.rows, p.group)[0], None)
        rows, columns = q.rows, q.columns
        cast = p.module.quantized_weight(p.weight_name, weight.detach(), p.recipe.dtype(True), p.first, True)
        assert cast.columns is not None
        w = cast.columns.t()
    x, x_work = saved, None
    if p.gathers and wants_weight:
        if p.recipe is not None and saved.dtype.itemsize > 1:  # the input was kept as it came
            x = quantize(saved, p.recipe.dtype(True), rows=True, columns=False).rows
        x, x_work = gather_along_first_dim(x, p.group, async_op=True)
    dgrad = dgrad_work = None
    if p.needs_input_grad:
        if p.scatters and p.overlap_gather_backward:
            dgrad = gathered_mm(lambda part: mm(part, w, p.dtype), rows, p.group)
            rows = rows.new_empty((rows.shape[0] * p.module.tp_size, rows.shape[1]))  # left whole in the buffer
        elif p.gathers and p.overlap_scatter_backward:
            dgrad = scattered_mm(lambda part: mm(part, w, p.dtype), rows, p.group)
        else:
            dgrad = mm(rows, w, p.dtype)
            if p.gathers:
                dgrad, dgrad_work = reduce_scatter_along_first_dim(dgrad, p.group, async_op=True)
            elif p.mode == "column" and p.reduces:
                dgrad, dgrad_work = allreduce(dgrad, p.group, async_op=True)
    wait(x_work)
    bias_grad = None
    if use_bias:  # the epilogue of the weight's product, or of the cast
        bias_grad = torch.empty(rows.shape[-1], dtype=p.dtype, device=grad.device)
    weight_grad = None
    if wants_weight:
        if p.module.wgrad_store.delay_wgrad_compute():
            p.module.wgrad_store.put(lambda: _late(p, rows, columns, x, weight))
        else:
            weight_grad = _weight_grad(p, rows, columns, x, weight)
    wait(dgrad_work)
    return dgrad, weight_grad, bias_grad


def _late(p: Product, rows, columns, x, weight) -> None:
    grad = _weight_grad(p, rows, columns, x, weight)
    if grad is not None and not p.fuse_wgrad:
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _weight_grad(p: Product, rows, columns, x, weight) -> torch.Tensor | None:
    """dw = dy^T x, into the sum of gradients where that is fused."""
    if p.recipe is not None:
        columns = columns if columns is not None else kernels.transpose(rows)
        if x.dtype.itemsize > 1:
            x = quantize(x, p.recipe.dtype(True), rows=False, columns=True).columns
        elif p.gathers:
            x = kernels.transpose(x)
        x = x.t()
    else:
        columns = rows.t()
    return accumulate(columns, x, weight, p.fuse_wgrad, p.dtype)


def accumulate(columns, x, weight, fuse: bool, dtype) -> torch.Tensor | None:
    """columns [out, tokens] by x [tokens, in]: added to ``weight.main_grad`` if ``fuse``, else returned."""
    if not fuse:
        return mm(columns, x, dtype)
    main = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else weight.main_grad
    kernels.addmm_(main, columns, x)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(main.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))
