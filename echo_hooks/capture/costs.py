"""FLOPs and bytes of one op, from its arguments' metadata: the OpSignature that timing prices later."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from echo_hooks.capture.calls import call_text
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

# Write only the rows they are given, not the whole table in their first argument; the second set adds to what is there.
_SCATTERS = {
    aten.index_put_.default,
    aten.index_copy_.default,
    aten.scatter_.src,
    aten.scatter_.value,
}
_SCATTERS_THAT_ADD = {
    aten.index_add_.default,
    aten.scatter_add_.default,
    aten.scatter_reduce_.two,
    aten.scatter_.reduce,
    aten.scatter_.value_reduce,
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
    name = func._schema.name.rsplit("::", 1)[-1]
    if name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_"):
        read -= sum(moved_bytes(t) for t in written)  # overwritten without being read
    elif name.startswith("new_") or name.endswith("_like"):
        read = 0  # they look at their argument's metadata alone
    elif func in _SCATTERS or func in _SCATTERS_THAT_ADD:
        read -= moved_bytes(args[0])
        write = _scattered(name, args) * args[0].dtype.itemsize
        adds = func in _SCATTERS_THAT_ADD or (name == "index_put_" and len(args) > 3 and args[3])
        read += write if adds else 0
    return OpSignature(
        name=str(func),
        inputs=tuple(meta_of(t) for t in inputs),
        outputs=tuple(meta_of(t) for t in outputs),
        flops=_flops(func, args, kwargs, result),
        bytes_read=max(read, 0),
        bytes_written=write,
        attrs=tuple(_attributes(func, args, kwargs, inputs)),
        call=call_text(func, args, kwargs),
    )


def _scattered(name: str, args) -> int:
    """Elements that an op of _SCATTERS writes (a boolean index: as many as it can select)."""
    if name != "index_put_":
        return args[3].numel() if name.startswith("index_") else args[2].numel()
    indices = [i for i in args[1] if i is not None]
    covered: set[int] = set()
    dim = 0
    for index in args[1]:
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        covered.update(range(dim, dim + width) if index is not None else ())
        dim += width
    rest = math.prod(n for d, n in enumerate(args[0].shape) if d not in covered)
    return max(i.numel() for i in indices) * rest


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
    if "foreach" in name or ("_fused_" in name and args and isinstance(args[0], (list, tuple))):
        yield "tensors", len(args[0]) if args and isinstance(args[0], (list, tuple)) else len(inputs)
    if inputs and inputs[0].dtype is torch.float32 and func._overloadpacket in flop_registry:
        yield "tf32", torch.get_float32_matmul_precision() != "highest"
