"""FLOPs and bytes of one op, from its arguments' metadata: the OpSignature that timing prices later."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from echo_hooks.graph.ops import OpSignature, meta_of

aten = torch.ops.aten

# Touch only the rows they look up, not the whole table in their first argument.
_GATHERS = {
    aten.embedding.default,
    aten.index_select.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind the tensor; a dimension of stride 0 (expand) is read once."""
    count = tensor.dtype.itemsize
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride or not size:
            count *= size
    return count


def signature(func, args, kwargs, result, written: list[torch.Tensor]) -> OpSignature:
    """Signature of a call on fake (or real) tensors.

    FLOPs come from torch.utils.flop_counter's registry (a multiply-add counts two); 0 for ops it has no formula for.
    """
    inputs, outputs = _tensors((args, kwargs)), _tensors(result)
    ids = {id(t) for t in inputs}
    fresh = [t for t in outputs if id(t) not in ids]
    read = sum(moved_bytes(t) for t in {id(t): t for t in inputs}.values())
    if func in _GATHERS:
        read = sum(moved_bytes(t) for t in fresh) + sum(moved_bytes(t) for t in inputs[1:])
    write = sum(moved_bytes(t) for t in fresh) + sum(moved_bytes(t) for t in written)
    if func._schema.name.rsplit("::", 1)[-1] in ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_"):
        read -= sum(moved_bytes(t) for t in written)  # overwritten without being read
    return OpSignature(
        name=str(func),
        inputs=tuple(meta_of(t) for t in inputs),
        outputs=tuple(meta_of(t) for t in outputs),
        flops=_flops(func, args, kwargs, result),
        bytes_read=max(read, 0),
        bytes_written=write,
        attrs=tuple(_attributes(func, args, kwargs, inputs)),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for item in value for t in _tensors(item)]


def _flops(func, args, kwargs, result) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _attributes(func, args, kwargs, inputs: list[torch.Tensor]):
    name = func._schema.name
    if "scaled_dot_product" in name:
        values = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        yield "causal", bool(values.get("is_causal", False))
    if "foreach" in name or "fused_adam" in name or "fused_sgd" in name:
        yield "tensors", len(args[0]) if args and isinstance(args[0], (list, tuple)) else len(inputs)
    if inputs and inputs[0].dtype is torch.float32 and func._overloadpacket in flop_registry:
        yield "tf32", torch.get_float32_matmul_precision() != "highest"
