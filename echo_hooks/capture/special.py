"""Ops that the common road cannot serve: values, copies between host and device, data-dependent shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from echo_hooks import host_tensors
from echo_hooks.capture import answers, shadows
from echo_hooks.capture.temporaries import crossing
from echo_hooks.devices import pinned
from echo_hooks.devices.pretended import Pretended
from echo_hooks.graph.ops import OpSignature, dtype_name, meta_of

aten = torch.ops.aten

HANDLERS: dict[Any, Callable] = {}
"""op -> handler(mode, func, args, kwargs) for calls with a pretended tensor or device."""

REAL_HANDLERS: dict[Any, Callable] = {
    # Pinning needs a driver; pageable memory does as well here.
    aten._pin_memory.default: lambda tensor, *_args, **_kwargs: pinned.pin(tensor),
    aten.is_pinned.default: lambda tensor, *_args, **_kwargs: pinned.is_pinned(tensor),
}

FLOAT_FACTORIES = {
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.rand.default,
    aten.randn.default,
    aten.full.default,
}

FILLS = {aten.fill_.Scalar, aten.zero_.default}
"""In-place ops whose result does not depend on what was there."""


def _constant(value):
    """A shadow of one element seen everywhere: costs nothing whatever the shape."""
    return lambda args, kwargs, result: host_tensors.full((), value(args), result.dtype).expand(result.shape)


def _blank(args, kwargs, result):
    """Small integers not yet written read as zeros: a header filled in piece by piece stays known as a whole."""
    if result.dtype.is_floating_point or result.dtype.is_complex or not shadows.small_enough(result):
        return None
    return host_tensors.full((), 0, result.dtype).expand(result.shape)


CONSTANTS = {
    aten.empty.memory_format: _blank,
    aten.zeros.default: _constant(lambda args: 0),
    aten.zeros_like.default: _constant(lambda args: 0),
    aten.new_zeros.default: _constant(lambda args: 0),
    aten.ones.default: _constant(lambda args: 1),
    aten.ones_like.default: _constant(lambda args: 1),
    aten.new_ones.default: _constant(lambda args: 1),
    aten.full.default: _constant(lambda args: args[1]),
    aten.full_like.default: _constant(lambda args: args[1]),
}
"""Factories whose value depends on no tensor."""


def _handles(*funcs):
    def register(handler):
        for func in funcs:
            HANDLERS[func] = handler
        return handler

    return register


# ---- values ----


@_handles(aten._local_scalar_dense.default)
def _item(mode, _func, args, _kwargs):
    _to_host(mode, args[0], blocking=True)
    return answers.item(mode.recorder, args[0])


@_handles(aten.equal.default)
def _equal(mode, _func, args, _kwargs):
    for tensor in args:
        _to_host(mode, tensor, blocking=True)
    left, right = (shadows.known(t) for t in args)
    if left is not None and right is not None:
        return torch.equal(left, right)
    mode.recorder.assume("equality of unknown tensors", True)
    return True


@_handles(aten.is_pinned.default)
def _is_pinned(_mode, _func, args, _kwargs):
    return pinned.is_pinned(args[0])


@_handles(aten._pin_memory.default, aten.pin_memory.default)
def _pin_memory(_mode, _func, args, _kwargs):
    return pinned.pin(args[0])


# ---- copies ----


@_handles(aten._to_copy.default)
def _to_copy(mode, func, args, kwargs):
    source = args[0]
    device = kwargs.get("device")
    device = source.device if device is None else torch.device(device)
    if device.type == source.device.type:
        return mode.replay(func, args, mode._with_device(kwargs))
    dtype = kwargs.get("dtype") or source.dtype
    if device.type == "cpu":
        _to_host(mode, source, blocking=not kwargs.get("non_blocking", False))
        if source.numel() <= shadows.INTEGERS_MAX_ELEMENTS:
            return answers.on_cpu(mode.recorder, source).to(dtype)
        return mode.fresh(source, source.shape, dtype, device)
    if device.type == "meta":
        strides = torch._prims_common.make_contiguous_strides_for(source.shape)
        return torch.empty_strided(source.shape, strides, dtype=dtype, device=device)
    device = mode._with_device({"device": device})["device"]
    if isinstance(source, Pretended):
        result = mode.fresh(source, source.shape, dtype, device)
        value = shadows.known(source)
        if value is not None:
            shadows.remember(result, value.to(dtype, copy=True))
    else:
        result = mode.to_device(source, device, dtype)
    _to_device_record(mode, source, result, kwargs.get("non_blocking", False))
    return result


@_handles(aten.copy_.default)
def _copy(mode, func, args, kwargs):
    target, source = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if target.device.type == source.device.type:
        if not isinstance(target, Pretended):  # a large pretended CPU tensor into a real one
            mode.recorder.assume("contents of a pretended tensor copied into a real one", "left as it was")
            return target
        mode.replay(func, args, {})
        _keep_copied_value(target, source)
        return target
    mode.memory.pass_through(crossing(source, target, non_blocking))
    if target.device.type == "cpu":
        _to_host(mode, source, blocking=not non_blocking)
        value = shadows.known(source)
        if isinstance(target, Pretended):
            shadows.remember(target, None)
        elif value is not None:
            target.copy_(value)
        else:
            mode.recorder.assume(
                f"contents of an unknown {dtype_name(source.dtype)} tensor copied to the host", "left as it was"
            )
        return target
    _to_device_record(mode, source, target, non_blocking)
    _keep_copied_value(target, source)
    return target


def _keep_copied_value(target: Pretended, source: torch.Tensor) -> None:
    value = shadows.known(source) if shadows.small_enough(source) else None
    if value is not None and shadows.small_enough(target):
        before = shadows.known(target)
        if before is not None and before.numel() <= shadows.SHADOW_MAX_ELEMENTS:
            before.copy_(value)
            shadows.written_in_place(target)
            return
        value = value.to(target.dtype, copy=True).broadcast_to(target.shape).clone()
        shadows.remember(target, value)
    else:
        shadows.remember(target, None)


def _copy_signature(direction: str, tensor: torch.Tensor) -> tuple[OpSignature, int]:
    bytes = tensor.numel() * tensor.dtype.itemsize
    meta = meta_of(tensor)
    name = f"copy_{direction}"
    return OpSignature(name, (meta,), (meta,), 0, bytes, bytes, (("direction", direction),)), bytes


def _to_host(mode, tensor: torch.Tensor, *, blocking: bool) -> None:
    if tensor.device.type == "cpu":
        return
    signature, bytes = _copy_signature("device_to_host", tensor)
    mode.recorder.copy(mode.recorder.ops.add(signature), bytes)
    if blocking:
        mode.recorder.sync(stream=mode.recorder.stream)


def _to_device_record(mode, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    if target.device.type == "cpu" or not source.numel():
        return
    signature, bytes = _copy_signature("host_to_device", source)
    mode.recorder.copy(mode.recorder.ops.add(signature), bytes)
    # cudaMemcpyAsync from pageable memory returns once the data is staged; PyTorch then synchronises the stream
    # unless non_blocking was asked for (aten/src/ATen/native/cuda/Copy.cu).
    if not non_blocking:
        mode.recorder.sync(stream=mode.recorder.stream)


@_handles(aten.set_.source_Tensor)
def _set(_mode, _func, args, _kwargs):
    """The tensor becomes a second name of the source's memory."""
    target, source = args
    target.echo_become(source)
    target.echo_shadow, target.echo_stamp = source.echo_shadow, source.echo_stamp
    return target


# ---- overflow ----


@_handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(mode, func, args, kwargs):
    """GradScaler's look for infinities: none is found, or it would skip its step."""
    found = shadows.known(args[1])
    mode.replay(func, args, kwargs)
    if found is not None:
        shadows.remember(args[1], found)
    mode.recorder.assume("overflow of unknown gradients", "none")


def _finite(mode, func, args, kwargs, answer: bool):
    """Unknown floating values are finite."""
    result = mode.replay(func, args, kwargs)
    if shadows.known(result) is None and shadows.small_enough(result):
        value = host_tensors.full((), answer, torch.bool).expand(result.shape)
        shadows.remember(result, shadows.writable(value))
        mode.recorder.assume("infinity or NaN in an unknown tensor", "none")
    return result


@_handles(aten.isnan.default, aten.isinf.default)
def _is_no_number(mode, func, args, kwargs):
    return _finite(mode, func, args, kwargs, False)


@_handles(aten.eq.Tensor)
def _equal_elements(mode, func, args, kwargs):
    if args[0] is args[1]:  # torch.isfinite and torch.isnan: (x == x) * (x.abs() != inf)
        return _finite(mode, func, args, kwargs, True)
    return mode.replay(func, args, kwargs)


@_handles(aten.ne.Tensor)
def _unequal_elements(mode, func, args, kwargs):
    if args[0] is args[1]:
        return _finite(mode, func, args, kwargs, False)
    return mode.replay(func, args, kwargs)


@_handles(aten.ne.Scalar)
def _unequal_to_number(mode, func, args, kwargs):
    if isinstance(args[1], float) and math.isinf(args[1]):
        return _finite(mode, func, args, kwargs, True)
    return mode.replay(func, args, kwargs)


# ---- routing ----


@_handles(aten.topk.default)
def _topk(mode, func, args, kwargs):
    """Indices of unknown scores (a router choosing experts): as the capture's ``routing`` says, counted."""
    values, indices = mode.replay(func, args, kwargs)
    scores, k = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    choices = scores.shape[dim] if scores.dim() else 1
    if shadows.known(indices) is None and scores.dim() >= 2 and indices.numel() <= shadows.INTEGERS_MAX_ELEMENTS:
        shape = indices.movedim(dim, -1).shape
        layer = mode.recorder.program.strings[mode.recorder.module]
        chosen = mode.routing.choose(math.prod(shape[:-1]), choices, k, layer)
        rows = torch.from_numpy(chosen).reshape(shape)
        shadows.remember(indices, rows.movedim(-1, dim).contiguous())
        mode.recorder.assume(f"top {k} of {choices} unknown scores", mode.routing.describe())
    return values, indices


# ---- shapes that depend on values ----


@_handles(
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
)
def _data_dependent(mode, func, args, kwargs):
    """Exact where the values are known; else the largest shape the op can give, counted. The size is a host sync."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    device = next(t.device for t in tensors if isinstance(t, Pretended))
    values = shadows.run_on_shadows(func, args, kwargs, tensors)
    if values is None:
        values = _largest(mode, func, args, kwargs)
    flat = values if isinstance(values, (tuple, list)) else (values,)
    results = tuple(_pretend(mode, v, device) for v in flat)
    _sized_by_device(mode, func, tensors, results)
    return results if isinstance(values, (tuple, list)) else results[0]


def _sized_by_device(mode, func, inputs, outputs) -> None:
    """Record an op whose result the host must wait for to know its size."""
    if outputs[0].device.type == "cpu":
        return
    read, written = (sum(t.numel() * t.dtype.itemsize for t in tensors) for tensors in (inputs, outputs))
    signature = OpSignature(str(func), tuple(map(meta_of, inputs)), tuple(map(meta_of, outputs)), 0, read, written)
    mode.recorder.compute(mode.recorder.ops.add(signature))
    mode.recorder.sync(stream=mode.recorder.stream)


def _largest(mode, func, args, kwargs):
    """Outputs on the meta device: as many elements as a known mask selects, else as many as there can be."""
    tensor = args[0]
    if func is aten.masked_select.default:
        count = _selected(mode, func, torch.broadcast_shapes(tensor.shape, args[1].shape), args[1])
        return host_tensors.empty((count,), tensor.dtype, "meta")
    count = tensor.numel()
    if func is aten.bincount.default:
        count = (args[2] if len(args) > 2 else kwargs.get("minlength")) or count
    if func is aten.repeat_interleave.Tensor:
        count = kwargs.get("output_size") or count
    mode.recorder.assume(f"size of the result of {func}", count)
    index = host_tensors.empty((count,), torch.int64, "meta")
    if func is aten.nonzero.default:
        return host_tensors.empty((count, tensor.dim()), torch.int64, "meta")
    if func in (aten.bincount.default, aten.repeat_interleave.Tensor):
        return index
    return host_tensors.empty((count,), tensor.dtype, "meta"), index, index


def _selected(mode, func, shape, mask: torch.Tensor) -> int:
    """How many elements a boolean mask selects from ``shape``: exact when the mask is known, else all, counted."""
    value = shadows.known(mask)
    if value is not None:
        return int(value.broadcast_to(shape).sum())
    count = math.prod(shape)
    mode.recorder.assume(f"size of the result of {func}", count)
    return count


@_handles(aten.index.Tensor)
def _index(mode, func, args, kwargs):
    """A boolean index is replaced by the places where it is true, as PyTorch does; others have static shapes."""
    tensor, indices = args[0], args[1]
    if not any(_is_mask(i) for i in indices):
        return mode.replay(func, args, kwargs)
    # Beside an unknown mask, an index of several elements says how many it must select.
    given = next((i.numel() for i in indices if i is not None and not _is_mask(i) and i.numel() > 1), None)
    places: list[torch.Tensor | None] = []
    for index in indices:
        places += _where(mode, func, tensor, index, given) if _is_mask(index) else [index]
    return mode.replay(func, (tensor, places), kwargs)


def _where(mode, func, tensor: torch.Tensor, mask: torch.Tensor, given: int | None) -> list[torch.Tensor]:
    """Index tensors, one per dimension of ``mask``; ``given`` elements where the mask is not known."""
    value = shadows.known(mask)
    count = given if given and value is None else _selected(mode, func, mask.shape, mask)
    found = [mode.fresh(tensor, (count,), torch.int64) for _ in range(mask.dim())]
    _sized_by_device(mode, aten.nonzero.default, [mask], found)
    if value is not None:
        for place, known in zip(found, value.nonzero().unbind(1)):
            shadows.remember(place, known.clone())
    return found


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _pretend(mode, value: torch.Tensor, device: torch.device) -> Pretended:
    result = mode.fresh(value, value.shape, value.dtype, device)
    if value.device.type == "cpu":
        shadows.remember(result, value)
    return result
