"""DeepSpeed's compiled ops as operations of torch: their metadata alone, as a pretended device needs no more.

The registry of operation classes (echo_hooks/timing/classes.py) prices them by name. What runs on host tensors is
recorded as work of the host.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("fused", "FRAGMENT")


def _op(schema: str):
    """Define ``fused::schema``; the decorated function gives its outputs from fake tensors."""

    def define(shapes):
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"fused::{name}", shapes, lib=_LIBRARY)
        return getattr(torch.ops.fused, name).default

    return define


# ---- optimizers: lists of tensors, in as few kernels as fit ----


@_op("_fused_adam_lists_(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs) -> ()")
def adam_(grads, params, exp_avgs, exp_avg_sqs):
    """One step of Adam for all tensors of the lists."""


@_op("_fused_lion_lists_(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs) -> ()")
def lion_(grads, params, exp_avgs):
    """One step of Lion for all tensors of the lists."""


@_op("_fused_lamb_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad) -> Tensor")
def lamb_(param, exp_avg, exp_avg_sq, grad):
    """One step of LAMB for one tensor; gives its trust ratio, one float32."""
    return param.new_empty((1,), dtype=torch.float32)


@_op("_host_adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq) -> ()")
def host_adam_(param, grad, exp_avg, exp_avg_sq):
    """CPUAdam: one pass over host memory."""


@_op("_host_update_(Tensor(a!) param, Tensor grad, Tensor(b!) state) -> ()")
def host_update_(param, grad, state):
    """CPUAdagrad and CPULion: as CPUAdam with one state."""


# ---- quantization; groups of a tensor share a scale ----


@_op("quantize_groups(Tensor input, int groups, int bits, int offsets) -> (Tensor, Tensor)")
def quantize(input, groups, bits, offsets):
    """``input`` in ``bits`` (two 4-bit values a byte) and [groups, 1 or 2] float32 scales."""
    shape = (*input.shape[:-1], input.shape[-1] * bits // 8)
    return input.new_empty(shape, dtype=torch.int8), input.new_empty((groups, 1 + offsets), dtype=torch.float32)


@_op("dequantize_groups(Tensor input, Tensor scales, int bits, ScalarType dtype) -> Tensor")
def dequantize(input, scales, bits, dtype):
    return input.new_empty((*input.shape[:-1], input.shape[-1] * 8 // bits), dtype=dtype)


@_op("quantize_swizzled(Tensor input, int groups, int bits, int offsets) -> (Tensor, Tensor)")
def swizzle(input, groups, bits, offsets):
    """Quantized in the order in which the two all-to-alls of ZeRO++ send it: flat."""
    size = input.numel() * bits // 8
    return input.new_empty((size,), dtype=torch.int8), input.new_empty((groups, 1 + offsets), dtype=torch.float32)


@_op("quantized_sum(Tensor input, Tensor scales, int groups, int parts, int offsets) -> (Tensor, Tensor)")
def quantized_sum(input, scales, groups, parts, offsets):
    """Sum of ``parts`` quantized tensors, quantized again into ``groups``."""
    shape = (*input.shape[:-1], input.shape[-1] // parts)
    return input.new_empty(shape), input.new_empty((groups, 1 + offsets), dtype=torch.float32)
