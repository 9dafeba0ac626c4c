"""What an op does to metadata: worked out once per (op, metadata) with FakeTensor, then replayed from a cache."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._pytree import tree_leaves

from echo_hooks.capture import kernels_only, shadows
from echo_hooks.capture.costs import signature
from echo_hooks.capture.temporaries import temporaries
from echo_hooks.devices.pretended import Pretended
from echo_hooks.graph.ops import OpSignature, OpTable

# Shares its input's storage and launches nothing, though its schema has no alias annotation.
_VIEWS_WITHOUT_ANNOTATION = {torch.ops.aten._unsafe_view.default}

# Served by cuBLAS or cuBLASLt (ATen's native_functions.yaml, entries with a CUDA kernel in cuda/Blas.cpp).
_MATRIX_PRODUCTS = frozenset(
    ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "addr", "linear")
) | {"_int_mm", "_scaled_mm"}

# Only allocate or look at metadata: nothing runs on the device.
_NO_KERNEL_PREFIXES = ("aten.empty", "aten.new_empty", "aten.set_", "aten.resize_", "aten.sym_", "prim.")


@dataclass(frozen=True, slots=True)
class Same:
    """The output is the very argument at this place among the op's tensors (in-place and out= ops)."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The output is the argument at this place with other metadata (t_, resize_, an out= that had to grow).

    ``bytes``: what its storage must hold.
    """

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Alias:
    """The output is a view of the argument at this place; ``offset`` counts from that argument's own.

    ``absolute``: from the start of the storage instead (as_strided with an offset).
    """

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    absolute: bool = False


@dataclass(frozen=True, slots=True)
class New:
    """The output is a new allocation of ``bytes``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    bytes: int


@dataclass(slots=True)
class Plan:
    """``outputs`` mirrors what the op returns (one spec, or a list or tuple of specs; None for no tensor).

    ``written``: places of the tensors that the op writes. ``signature``: None when nothing runs. On a ``device`` of
    type "cpu" the op is the host's work, on large tensors that are pretended there too.
    ``op``: its index in the op ``table`` of the rank that last used the plan. ``shadowed``: worth running on shadows.
    ``multiplies``: runs in cuBLAS. ``temporaries``: bytes of what its kernel holds for itself while it runs.
    """

    outputs: Any
    written: tuple[int, ...]
    signature: OpSignature | None
    device: torch.device
    shadowed: bool
    op: int = -1
    table: OpTable | None = None
    multiplies: bool = False
    temporaries: tuple[int, ...] = ()


def key_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Hashable stand-in for an argument, equal only where the op's metadata would be; gathers tensors in order.

    A scalar carries its type, since 1, 1.0 and True are equal as dictionary keys but promote differently.
    """
    kind = type(value)
    if kind is Pretended:
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.device)
    if kind is int or kind is float or kind is bool or kind is complex:
        return (kind, value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("real", value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple([key_of(item, tensors) for item in value])
    if isinstance(value, torch.Generator):
        return "generator"
    return value


def multiplies(signature: OpSignature | None) -> bool:
    """Whether an op is a matrix product of the library, by its full name ("aten.mm.default")."""
    parts = signature.name.split(".") if signature is not None else []
    return len(parts) > 1 and parts[0] == "aten" and parts[1].rstrip("_") in _MATRIX_PRODUCTS


class Planner:
    """Cache of plans; ``fake_mode`` answers first occurrences.

    One rank a planner: plans remember their place in the recorder's op table.
    """

    def __init__(self) -> None:
        self.fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._plans: dict[Any, Plan] = {}
        self._one_thread = threading.RLock()  # a fake mode keeps what it is doing in itself, not in the thread

    def plan(self, func, args: tuple, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Plan:
        """The plan of one call; ``tensors`` is filled with its tensor arguments in order."""
        key = (
            func,
            torch.get_default_dtype(),
            key_of(args, tensors),
            tuple([(name, key_of(value, tensors)) for name, value in kwargs.items()]),
            _repeated(tensors),
        )
        plan = self._plans.get(key)
        if plan is None:
            with self._one_thread:
                plan = self._plans[key] = self._describe(func, args, kwargs, tensors)
        return plan

    def _describe(self, func, args, kwargs, tensors: list[torch.Tensor]) -> Plan:
        fakes: dict[int, FakeTensor] = {}
        fake_args, fake_kwargs = (
            [self._fake(a, fakes) for a in args],
            {k: self._fake(v, fakes) for k, v in kwargs.items()},
        )
        result = self._run(func, fake_args, fake_kwargs)
        place_of = {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
        places = _places_by_argument(func, args, kwargs, place_of)
        outputs = _outputs(func, args, result, places, tensors, fakes)
        written = _written(func, places)
        device = _device_of(outputs, tensors, kwargs)
        launches = device.type != "meta" and not _is_view(func)
        launches = launches and not str(func).startswith(_NO_KERNEL_PREFIXES)
        launches = launches and (bool(written) or any(isinstance(r, torch.Tensor) for r in tree_leaves(result)))
        described = signature(func, fake_args, fake_kwargs, result, [tensors[i] for i in written]) if launches else None
        if described is not None and not described.bytes_read and not described.bytes_written:
            described = None  # only empty tensors: nothing is launched
        held = temporaries(func, fake_args, fake_kwargs, result) if described and device.type != "cpu" else ()
        return Plan(outputs, written, described, device, _worth_shadowing(func, outputs), temporaries=held)

    def _run(self, func, args, kwargs) -> Any:
        rule = kernels_only.rule(func)
        with self.fake_mode:
            if rule is not None:
                return rule(*args, **kwargs)
            try:
                return func(*args, **kwargs)
            except (NotImplementedError, UnsupportedOperatorException):
                pass
        return kernels_only.run_on_cpu(self.fake_mode, func, args, kwargs)

    def _fake(self, value: Any, fakes: dict[int, FakeTensor]) -> Any:
        if isinstance(value, torch.Tensor):
            found = fakes.get(id(value))
            if found is None:
                found = fakes[id(value)] = self.fake_like(value)
            return found
        if isinstance(value, (list, tuple)):
            return type(value)([self._fake(item, fakes) for item in value])
        if isinstance(value, torch.Generator):
            return None
        return value

    def fake_like(self, value: torch.Tensor) -> FakeTensor:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(self.fake_mode, meta, value.device)


def _repeated(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Which arguments are the same tensor: add(a, b, out=a) answers differently from add(a, b, out=c)."""
    ids = [id(tensor) for tensor in tensors]
    return () if len(set(ids)) == len(ids) else tuple([ids.index(i) for i in ids])


def _is_view(func) -> bool:
    """Every output aliases an input that the op does not write, or only metadata changes (t_): no kernel."""
    if func in _VIEWS_WITHOUT_ANNOTATION or torch.Tag.inplace_view in func.tags:
        return True
    returns = func._schema.returns
    return (bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)) or (
        func.is_view and bool(returns)
    )


def _places_by_argument(func, args, kwargs, place_of: dict[int, int]) -> list[tuple[Any, list[int]]]:
    """For each schema argument: its alias_info and the places of the tensors given for it."""
    result = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        places = [place_of[id(v)] for v in items if isinstance(v, torch.Tensor)]
        result.append((argument.alias_info, places))
    return result


def _written(func, places) -> tuple[int, ...]:
    return tuple(p for alias, found in places if alias is not None and alias.is_write for p in found)


def _outputs(func, args, result, places, tensors, fakes):
    returns = func._schema.returns
    if result is None or not returns:
        return None
    if len(returns) == 1:
        return _output(result, returns[0], func, args, places, tensors, fakes)
    return tuple(_output(r, spec, func, args, places, tensors, fakes) for r, spec in zip(result, returns))


def _output(result, spec, func, args, places, tensors, fakes):
    if isinstance(result, (list, tuple)):
        return [_output(item, spec, func, args, places, tensors, fakes) for item in result]
    if not isinstance(result, torch.Tensor):
        return result
    source = _source(spec, func, places)
    if source is not None and spec.alias_info is not None and spec.alias_info.is_write:
        for place in source:  # out= lists: the one whose fake came back
            if fakes.get(id(tensors[place])) is result:
                return _same(result, place, tensors)
        return Same(source[0])
    if source:
        shape, stride = tuple(result.shape), result.stride()
        absolute = func is torch.ops.aten.as_strided.default and len(args) > 3 and args[3] is not None
        return Alias(source[0], shape, stride, int(result.storage_offset()), result.dtype, absolute)
    for place, tensor in enumerate(tensors):
        if fakes.get(id(tensor)) is result:
            return _same(result, place, tensors)
    return New(
        tuple(result.shape),
        result.stride(),
        int(result.storage_offset()),
        result.dtype,
        result.device,
        _extent(result) * result.dtype.itemsize,
    )


def _same(result: torch.Tensor, place: int, tensors) -> Same | Changed:
    """The argument itself. Its fake stands at offset 0, whatever the argument's own."""
    tensor = tensors[place]
    if result.shape == tensor.shape and result.stride() == tensor.stride():
        return Same(place)
    size = _extent(result) * result.dtype.itemsize
    return Changed(place, tuple(result.shape), result.stride(), int(result.storage_offset()), size)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor, in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def _source(spec, func, places) -> list[int] | None:
    """Places of the arguments that an output with this alias annotation shares memory with."""
    if func in _VIEWS_WITHOUT_ANNOTATION:
        return places[0][1]
    if spec.alias_info is None:
        return None
    names = spec.alias_info.before_set | spec.alias_info.after_set
    for alias, found in places:
        if alias is not None and found and (alias.before_set & names or (not names and not alias.is_write)):
            return found
    # A list of views, `Tensor(a -> *)`: the annotation of the list itself is empty.
    return next((found for alias, found in places if alias is not None and found), None)


def _device_of(outputs, tensors, kwargs) -> torch.device:
    for tensor in tensors:
        if isinstance(tensor, Pretended) and tensor.device.type != "cpu":
            return tensor.device
    first = outputs
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, New):
        return first.device
    return torch.device(kwargs.get("device") or "cpu")


def _worth_shadowing(func, outputs) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False  # it would draw from the script's own CPU generator
    if str(func).startswith(("aten.empty", "aten.new_empty", "aten.resize_", "fsdp.", "aten.rand", "aten.normal")):
        return False
    flat = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return all(not isinstance(o, (New, Alias)) or _numel(o.shape) <= shadows.limit(o.dtype) for o in flat)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
