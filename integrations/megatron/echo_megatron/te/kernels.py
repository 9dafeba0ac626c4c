"""Fused kernels that torch has no operation for: one operation each, with shapes, FLOPs and what it reads and writes.

They have no implementation: on a pretended device only their metadata counts. The registry of operation classes
(echo_hooks/timing/classes.py) prices them by name.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

_LIBRARY = torch.library.Library("fused", "DEF")


def _kernel(schema: str):
    """Define ``fused::schema``; the decorated function gives its outputs from fake tensors."""

    def define(shapes):
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        torch.library.register_fake(f"fused::{name}", shapes, lib=_LIBRARY)
        return getattr(torch.ops.fused, name).default

    return define


# ---- matrix products ----


@_kernel("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2) -> Tensor(a!)")
def addmm_(self, mat1, mat2):
    """A gradient of the weight added to the 32-bit sum of gradients by the product's own epilogue."""
    return self


@register_flop_formula(torch.ops.fused.addmm_)
def _addmm_flops(_self, mat1, mat2, **_):
    return 2 * mat1[0] * mat1[1] * mat2[1]


# ---- attention; tensors are [..., heads, size] in any order of sequence and batch ----


@_kernel(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, int queries, int keys, bool is_causal)"
    " -> (Tensor, Tensor)"
)
def attention(query, key, value, queries, keys, is_causal):
    """Output and the softmax's log-sum-exp, one float32 per query and head. ``queries`` and ``keys``: length of one
    sequence in each."""
    shape = (*query.shape[:-1], value.shape[-1])
    return query.new_empty(shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_kernel(
    "scaled_dot_product_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor sums, int queries, int keys, bool is_causal) -> (Tensor, Tensor, Tensor)"
)
def attention_backward(grad, query, key, value, out, sums, queries, keys, is_causal):
    """Gradients of query, key and value."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _product(query, keys: int, size: int) -> int:
    """FLOPs of [queries, size] by [size, keys] for every query and head of ``query``."""
    count = 2 * keys * size
    for n in query[:-1]:
        count *= n
    return count


@register_flop_formula(torch.ops.fused.scaled_dot_product_attention)
def _attention_flops(query, key, value, queries, keys, is_causal, **_):
    return _product(query, keys, query[-1]) + _product(query, keys, value[-1])


@register_flop_formula(torch.ops.fused.scaled_dot_product_attention_backward)
def _attention_backward_flops(grad, query, key, value, out, sums, queries, keys, is_causal, **_):
    # The scores again, dQ and dK of the query's size, dP and dV of the value's (as torch.utils.flop_counter).
    return 3 * _product(query, keys, query[-1]) + 2 * _product(query, keys, value[-1])


# ---- 8-bit casts ----


@_kernel("quantize(Tensor input, ScalarType dtype, bool rows, bool columns) -> (Tensor, Tensor)")
def quantize(input, dtype, rows, columns):
    """[m, n] in 8 bits and its transposed copy [n, m]; what is not wanted is empty."""
    m, n = input.shape
    return (
        input.new_empty((m, n) if rows else (0,), dtype=dtype),
        input.new_empty((n, m) if columns else (0,), dtype=dtype),
    )


@_kernel("transpose(Tensor input) -> Tensor")
def transpose(input):
    """[m, n] copied as [n, m]."""
    return input.new_empty((input.shape[1], input.shape[0]))


@_kernel("update_scales_(Tensor(a!) scales) -> Tensor(a!)")
def update_scales_(scales):
    """Scaling factors from the history of maxima, for all modules in one kernel."""
    return scales


# ---- activations of the MLP ----


@_kernel("gated_activation(Tensor input) -> Tensor")
def gated_activation(input):
    """SwiGLU and its kin: [..., 2 f] gives [..., f]."""
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


@_kernel("gated_activation_backward(Tensor grad, Tensor input) -> Tensor")
def gated_activation_backward(grad, input):
    return torch.empty_like(input)


@_kernel("activation(Tensor input) -> Tensor")
def activation(input):
    """GELU, ReLU, ...: one kernel, the bias of the product before included."""
    return torch.empty_like(input)


@_kernel("activation_backward(Tensor grad, Tensor input) -> Tensor")
def activation_backward(grad, input):
    return torch.empty_like(input)


# ---- rotary position embedding ----


@_kernel("rotary_embedding(Tensor input, Tensor angles) -> Tensor")
def rotary_embedding(input, angles):
    """Also its own backward."""
    return input.new_empty(input.shape)


# ---- loss ----


@_kernel("softmax_statistics(Tensor logits, Tensor targets) -> Tensor")
def softmax_statistics(logits, targets):
    """Maximum, sum of exponentials and the target's logit of each row, [3 * rows] float32."""
    return logits.new_empty((3 * targets.numel(),), dtype=torch.float32)


@_kernel("cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor statistics) -> Tensor")
def cross_entropy_(logits, targets, statistics):
    """Loss of each row, float32; the logits are overwritten by their gradient."""
    return logits.new_empty((targets.numel(),), dtype=torch.float32)


@_kernel("scale_rows_(Tensor(a!) input, Tensor factors) -> Tensor(a!)")
def scale_rows_(input, factors):
    return input


# ---- experts ----


@_kernel("row_map(Tensor routing_map) -> Tensor")
def row_map(routing_map):
    """Where each (token, expert) goes, [tokens, 2 * experts + 1] int32."""
    tokens, experts = routing_map.shape
    return routing_map.new_empty((tokens, 2 * experts + 1), dtype=torch.int32)


@_kernel("move_rows(Tensor input, Tensor row_map, int rows) -> Tensor")
def move_rows(input, row_map, rows):
    """Rows of ``input`` put in another order, repeated or summed up: [rows, hidden]."""
    return input.new_empty((rows, *input.shape[1:]))
