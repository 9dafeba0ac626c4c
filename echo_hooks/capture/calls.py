"""The arguments of an op as text: enough to call it again on tensors of the same layout, and to find its measurement.

JSON, ``[[positional...], {keyword: ...}]``. Tensors stand in the order of ``OpSignature.inputs``, which has their
shapes and dtypes:

    "T"             contiguous             ["T", s0, s1, ...]   with these strides
    "C"             a CPU tensor           ["=", i]             tensor i of the call once more
    {"T": n}        a list of n contiguous tensors
    "~", "~i"       a floating or whole number that does not choose the kernel
    {"L": [...]}    any other list         ["dtype", "float32"], ["format", "contiguous_format"], ["text", "mean"]

The device and options at their default are left out.

Numbers that choose neither kernel nor size are left out, so that a step's learning rate, or the place where this rank's
slice begins, makes no operation of its own.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch

from echo_hooks.graph.ops import dtype_name

# Arguments whose number chooses the kernel: a dropout of zero is a copy, a power of two a product, a norm of order two
# has a kernel of its own, and with beta zero the addend is not read.
_NUMBERS_MATTER = ("beta", "exponent", "ord", "p", "dropout_p")

# Positions, not sizes: where in the tensor it happens makes no other kernel.
_POSITIONS = {
    "aten::slice_backward": ("start", "end"),
    "aten::slice_scatter": ("start", "end"),
    "aten::select_backward": ("index",),
    "aten::select_scatter": ("index",),
    "aten::embedding": ("padding_idx",),
    "aten::embedding_dense_backward": ("padding_idx",),
    "fsdp::all_gather_copy_in": ("rank",),
}


# Where a result goes, and options that say what holds without them.
_PLACES = ("device", "pin_memory", "generator")
_DEFAULTS = {
    "layout": (None, torch.strided),
    "memory_format": (None, torch.preserve_format),
    "non_blocking": (False, None),
}


def call_text(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """The arguments of ``func``, an OpOverload, as text; "" when one of them has no form here."""
    names = [a.name for a in func._schema.arguments]
    given = [*zip(names, args), *((n, v) for n, v in kwargs.items() if not _says_nothing(n, v))]
    free = _free_numbers(func)
    seen: list[int] = []
    try:
        values = [(name, _value(value, name, free, seen)) for name, value in given]
    except TypeError:
        return ""
    return json.dumps([[v for _, v in values[: len(args)]], dict(values[len(args) :])], separators=(",", ":"))


def _says_nothing(name: str, value: Any) -> bool:
    return name in _PLACES or (name in _DEFAULTS and value in _DEFAULTS[name])


@cache
def _free_numbers(func: Any) -> frozenset[str]:
    """Arguments that are plain numbers or positions."""
    positions = _POSITIONS.get(func._schema.name, ())
    return frozenset(
        a.name
        for a in func._schema.arguments
        if a.name in positions or ("number" in str(a.real_type) and a.name not in _NUMBERS_MATTER)
    )


def _value(value: Any, name: str, free: frozenset[str], seen: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, seen)
    if isinstance(value, (list, tuple)):
        items = [_value(item, name, free, seen) for item in value]
        return {"T": len(items)} if len(items) > 1 and all(i == "T" for i in items) else {"L": items}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (torch.device, torch.Generator)):  # positional: as if left out
        return None
    if isinstance(value, (int, torch.SymInt)):
        return "~i" if name in free else int(value)
    if isinstance(value, (float, torch.SymFloat)):
        exact = name in _NUMBERS_MATTER and abs(float(value)) < float("inf")
        return float(value) if exact else "~"
    if isinstance(value, torch.dtype):
        return ["dtype", dtype_name(value)]
    if isinstance(value, (torch.memory_format, torch.layout)):
        return ["format", str(value).removeprefix("torch.")]
    if isinstance(value, str):
        return ["text", value]
    raise TypeError(f"{type(value)} has no form")


def _tensor(value: torch.Tensor, seen: list[int]) -> Any:
    """``seen``: the call's tensors so far, by identity, repetitions included."""
    seen.append(id(value))
    first = seen.index(id(value))
    if first < len(seen) - 1:
        return ["=", first]
    if value.device.type == "cpu":
        return "C"
    return "T" if value.is_contiguous() else ["T", *value.stride()]
