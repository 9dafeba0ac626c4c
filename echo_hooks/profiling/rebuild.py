"""A call of an op made again from its signature: operands of its shapes, dtypes and strides with random contents."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.timing.classes import op_class

MAX_TENSORS = 100_000
_NAME = re.compile(r"(aten|fsdp)\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
_NUMBER = 0.999
"""For a number that chooses no kernel: near one, so that an in-place product stays finite over many calls."""


class CannotRebuild(Exception):
    """Why an op cannot be called again from its signature alone."""


def rebuild(signature: OpSignature, device: torch.device, generator: torch.Generator) -> Callable[[], Any]:
    """The call, ready to be made any number of times; raises CannotRebuild."""
    if signature.name in ("copy_host_to_device", "copy_device_to_host"):
        raise CannotRebuild("its time is the host's, which a run does not tell: pinned memory or not")
    func = _op(signature.name)
    if not signature.call:
        raise CannotRebuild("its tracer left no arguments")
    args, kwargs = _arguments(func, signature, device, generator)
    if "_scaled_dot_product" in signature.name and func._schema.name.endswith("_backward"):
        args, kwargs = _after_forward(func, args, kwargs)
    if (tf32 := signature.attr("tf32")) is None:
        return lambda: func(*args, **kwargs)

    def with_precision() -> Any:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        return func(*args, **kwargs)

    return with_precision


def operand_bytes(signature: OpSignature) -> int:
    """Memory that a call takes, results included."""
    return sum(prod(m.shape) * 8 for m in signature.inputs) + sum(prod(m.shape) * 8 for m in signature.outputs)


def _op(name: str) -> Any:
    """The OpOverload of a name; only ops of the registry are called, whatever a file says."""
    found = _NAME.fullmatch(name)
    if found is None or op_class(name) is None:
        raise CannotRebuild("no operation that the registry knows")
    namespace, packet, overload = found.groups()
    if namespace == "fsdp":
        importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")  # it defines them
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        raise CannotRebuild(f"torch {torch.__version__} has no such op") from None


# ---- arguments ----


def _arguments(func: Any, signature: OpSignature, device: torch.device, generator: torch.Generator):
    try:
        positional, named = json.loads(signature.call)
        fields = {a.name: a for a in func._schema.arguments}
        names = list(fields)
        make = _Maker(func, signature, device, generator)
        if len(positional) > len(names):
            raise ValueError(f"{len(positional)} of {len(names)}")
        args = [make.value(text, name) for text, name in zip(positional, names)]
        kwargs = {name: make.value(text, name) for name, text in named.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CannotRebuild(f"its arguments do not fit the op ({error})") from None
    if make.next != len(signature.inputs):
        raise CannotRebuild("its arguments name other tensors than its operands")
    if "device" in fields and names.index("device") >= len(args):
        kwargs["device"] = device
    if func._schema.name in ("aten::slice_backward", "aten::slice_scatter"):
        _place_slice(func, args, names)
    if func._schema.name in ("aten::masked_scatter", "aten::masked_scatter_"):
        _mask_what_is_there(*args)
    return args, kwargs


def _place_slice(func: Any, args: list, names: list[str]) -> None:
    """The slice of the right length, at the start of its dimension."""
    part = args[names.index("grad_output" if "grad_output" in names else "src")]
    dim, step = (args[names.index(n)] if names.index(n) < len(args) else 1 for n in ("dim", "step"))
    for name, value in (("start", 0), ("end", part.shape[dim] * step)):
        if names.index(name) < len(args):
            args[names.index(name)] = value


def _mask_what_is_there(_: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> None:
    """As many places as the source has values: one more and the device asserts, which ends the process's context."""
    mask.fill_(False)
    mask.view(-1)[: source.numel()] = True


class _Maker:
    """Values of a call's text; tensors in the order of the signature's inputs."""

    def __init__(self, func: Any, signature: OpSignature, device: torch.device, generator: torch.Generator):
        self.func, self.signature, self.device, self.generator = func, signature, device, generator
        self.next = 0
        self.tensors: list[torch.Tensor] = []

    def value(self, text: Any, name: str) -> Any:
        if text is None or isinstance(text, (bool, int, float)):
            return text
        if text in ("~", "~i"):
            return _NUMBER if text == "~" else _PLACES.get(name, 1)
        if text in ("T", "C"):
            return self.tensor(name, None, torch.device("cpu") if text == "C" else self.device)
        if isinstance(text, dict):
            if "T" in text:
                if not 0 <= int(text["T"]) <= MAX_TENSORS:
                    raise ValueError("too many tensors")
                return [self.tensor(name, None, self.device) for _ in range(int(text["T"]))]
            return [self.value(item, name) for item in text["L"]]
        kind, *rest = text
        if kind == "T":
            return self.tensor(name, tuple(int(s) for s in rest), self.device)
        if kind == "=":
            self.next += 1
            self.tensors.append(self.tensors[int(rest[0])])
            return self.tensors[-1]
        if kind == "dtype":
            return _dtype(rest[0])
        if kind == "format":
            return _FORMATS[rest[0]]
        if kind == "text":
            return str(rest[0])
        raise ValueError(f"{kind!r} is no argument")

    def tensor(self, name: str, stride: tuple[int, ...] | None, device: torch.device) -> torch.Tensor:
        meta = self.signature.inputs[self.next]
        self.next += 1
        made = self._filled(meta, stride, device, name)
        self.tensors.append(made)
        return made

    def _filled(self, meta: TensorMeta, stride, device: torch.device, name: str) -> torch.Tensor:
        extent = prod(meta.shape)
        if stride is not None and extent:
            if len(stride) != len(meta.shape) or min(stride, default=0) < 0:
                raise ValueError("strides that do not fit the shape")
            extent = 1 + sum((n - 1) * s for n, s in zip(meta.shape, stride))
        if extent * 8 > 1 << 38:
            raise CannotRebuild("an operand larger than any device")
        dtype = _dtype(meta.dtype)
        base = torch.empty(extent, dtype=dtype, device=device)
        self._fill(base, name, meta)
        return base.view(meta.shape) if stride is None else base.as_strided(meta.shape, stride)

    def _fill(self, base: torch.Tensor, name: str, meta: TensorMeta) -> None:
        generator = self.generator if base.device.type == self.generator.device.type else None
        if name in _CONSTANTS:
            base.fill_(_CONSTANTS[name])
        elif base.dtype.is_floating_point and base.dtype.itemsize > 1:
            base.normal_(generator=generator)
            if name in ("exp_avg_sqs", "max_exp_avg_sqs", "rstd", "invstd", "save_invstd", "running_var"):
                base.abs_()
        elif base.dtype.is_complex:
            torch.view_as_real(base).normal_(generator=generator)
        elif base.dtype is torch.bool:
            base.random_(0, 2, generator=generator)
        elif base.dtype.is_floating_point:  # eight bits: drawn wide, then rounded
            base.copy_(torch.empty(base.shape, device=base.device).normal_(generator=generator))
        else:
            base.random_(0, self._bound(name), generator=generator)

    def _bound(self, name: str) -> int:
        """Above the largest index that this operand may hold."""
        base = self.func._schema.name.split("::")[1].removesuffix("_")
        first = self.signature.inputs[0].shape
        if base == "embedding_dense_backward":
            return max(int(json.loads(self.signature.call)[0][2]), 1)
        if base == "embedding":
            return max(first[0], 1)
        if base.startswith("nll_loss"):
            classes = self.signature.inputs[1 if base.endswith("backward") else 0].shape
            return max(classes[-1], 1)
        if self.next == 1 and name == "self":  # the operand itself, not an index into it
            return 100
        return max(min((n for n in first), default=1), 1)


_CONSTANTS = {"state_steps": 10.0, "found_inf": 0.0, "grad_scale": 1.0, "inv_scale": 1.0, "total_weight": 1.0}
_PLACES = {"padding_idx": -1, "rank": 0, "index": 0}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "strided": torch.strided,
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


# ---- ops that need more than random operands ----


def _after_forward(func: Any, args: list, kwargs: dict[str, Any]):
    """The backward of fused attention with what a forward over the same operands saves."""
    given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
    namespace, name = func._schema.name.split("::")
    forward = getattr(getattr(torch.ops, namespace), name.removesuffix("_backward")).default
    takes = {a.name: a for a in forward._schema.arguments}
    renamed = {"is_causal": given.get("is_causal", given.get("causal")), "compute_log_sumexp": True}
    asked = {n: v for n, v in (given | renamed).items() if n in takes and n != "return_debug_mask"}
    results = dict(zip((r.name for r in forward._schema.returns), forward(**asked)))
    saved = {
        "out": results.get("output"),
        "logsumexp": results.get("logsumexp", results.get("log_sumexp")),
        "philox_seed": results.get("philox_seed", results.get("rng_state")),
        "philox_offset": results.get("philox_offset", results.get("unused")),
        **{n: results.get(n) for n in ("cum_seq_q", "cum_seq_k", "max_q", "max_k")},
    }
    given.update({n: v for n, v in saved.items() if n in given})
    return [], given
