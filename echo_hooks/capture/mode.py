"""The dispatch mode: CPU tensors stay real, whatever touches the device is pretended and recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from echo_hooks import host_tensors
from echo_hooks.capture import shadows, special
from echo_hooks.capture.labels import Labels
from echo_hooks.capture.memory import Memory
from echo_hooks.capture.plans import Alias, Changed, New, Plan, Planner, Same, multiplies
from echo_hooks.capture.routing import BALANCED
from echo_hooks.capture.steps import Steps
from echo_hooks.devices import pinned
from echo_hooks.devices.pretended import Pretended, Storage
from echo_hooks.graph.recorder import Recorder
from echo_hooks.world.functional import NAMESPACES

LARGE_CPU_BYTES = 1 << 20
"""Floating CPU factories above this size are pretended too: a model built on the CPU then costs no memory."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = torch._C._disabled_torch_dispatch_impl


class CaptureMode(TorchDispatchMode):
    """Records what would run on the device; ``world`` answers functional collectives (VirtualWorld or None);
    ``routing``: which experts a router with unknown scores chooses."""

    def __init__(self, recorder: Recorder, planner: Planner, memory: Memory, labels: Labels, steps: Steps, world=None):
        super().__init__()
        self.recorder = recorder
        self.planner = planner
        self.memory = memory
        self.labels = labels
        self.steps = steps
        self.world = world
        self.routing = BALANCED

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every dispatch in Python code of its own, against a compiler that is off

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        pretended = False
        for kind in types:
            if kind is Pretended:
                pretended = True
            elif kind.__torch_dispatch__ is not _PLAIN:
                return self._foreign(kind, func, types, args, kwargs)
        if not pretended:
            # Fake modes rank below ours whenever they were entered: what runs under one (DTensor works out shapes so)
            # is no work of the script's.
            if torch._C._get_dispatch_mode(_FAKE) is not None:
                return func(*args, **kwargs)
            if not self._becomes_pretended(func, args, kwargs):
                return _real(func, args, kwargs)
        return self.run(func, types, args, kwargs)

    def run(self, func, types, args, kwargs):
        """Serve one op on pretended tensors (also without an active mode, from a thread of the script)."""
        recorder = self.recorder
        recorder.enter_from_dispatch()
        try:
            self.labels.update()
            self.steps.check()
            if func.namespace in NAMESPACES:
                return self._functional(func, args, kwargs)
            handler = special.HANDLERS.get(func)
            if handler is not None:
                return handler(self, func, args, kwargs)
            result = self.replay(func, args, self._with_device(kwargs))
            return pinned.pin(result) if kwargs.get("pin_memory") else result
        finally:
            recorder.leave()

    # ---- the common road ----

    def replay(self, func, args, kwargs):
        """Outputs by the cached plan, one record where a kernel would run, and the values where they are known."""
        tensors: list[torch.Tensor] = []
        plan = self.planner.plan(func, args, kwargs, tensors)
        self._record(plan)
        result = self._build(plan.outputs, tensors)
        if plan.temporaries:
            self.memory.pass_through(plan.temporaries)
        constant = special.CONSTANTS.get(func)
        if constant is not None and isinstance(result, Pretended) and result.numel() <= shadows.INTEGERS_MAX_ELEMENTS:
            value = constant(args, kwargs, result)
            if value is not None:
                shadows.remember(result, shadows.writable(value))
        elif plan.shadowed or plan.written:
            self._shadow(plan, func, args, kwargs, tensors, result)
        return result

    def _record(self, plan: Plan) -> None:
        if plan.signature is None:
            return
        if plan.table is not self.recorder.ops:
            plan.table = self.recorder.ops
            plan.op = plan.table.add(plan.signature)
            plan.multiplies = multiplies(plan.signature)
        if plan.device.type == "cpu":
            self.recorder.host_work(plan.op, plan.signature.bytes_read + plan.signature.bytes_written)
            return
        if plan.multiplies:
            self.memory.work()
        self.recorder.compute(plan.op)

    def _build(self, spec: Any, tensors: list[torch.Tensor]) -> Any:
        kind = type(spec)
        if kind is New:
            if spec.device.type == "meta":
                return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            return Pretended(
                spec.shape, spec.stride, spec.offset, spec.dtype, spec.device, self.memory.new(spec.bytes, spec.device)
            )
        if kind is Same:
            return tensors[spec.tensor]
        if kind is Alias:
            base = tensors[spec.tensor]
            if not isinstance(base, Pretended):  # a view of a real tensor inside a mixed call
                return base.as_strided(spec.shape, spec.stride, base.storage_offset() + spec.offset)
            offset = spec.offset if spec.absolute else base.storage_offset() + spec.offset
            return Pretended(spec.shape, spec.stride, offset, spec.dtype, base.device, base.echo_storage)
        if kind is Changed:
            return self._change(tensors[spec.tensor], spec)
        if kind is list:
            return [self._build(item, tensors) for item in spec]
        if kind is tuple:
            return tuple([self._build(item, tensors) for item in spec])
        return spec

    def _change(self, tensor: torch.Tensor, spec: Changed) -> torch.Tensor:
        """Give ``tensor`` other metadata; its storage only ever grows, as a real one."""
        if not isinstance(tensor, Pretended):
            return tensor.as_strided_(spec.shape, spec.stride)
        offset = tensor.storage_offset() + spec.offset
        needed = int(offset) * tensor.dtype.itemsize + spec.bytes
        if needed > tensor.echo_storage.bytes:
            self.memory.resize(tensor.echo_storage, needed)
        changed = Pretended(spec.shape, spec.stride, offset, tensor.dtype, tensor.device, tensor.echo_storage)
        return tensor.echo_become(changed)

    def _shadow(self, plan: Plan, func, args, kwargs, tensors, result) -> None:
        value = shadows.run_on_shadows(func, args, kwargs, tensors) if plan.shadowed else None
        if plan.written:
            self._written(plan, func, args, kwargs, tensors, value is not None)
        if value is not None:
            _attach(result, value, tensors)

    def _written(self, plan: Plan, func, args, kwargs, tensors, ran: bool) -> None:
        """In-place results: the shadows already hold them, or they are unknown unless the op overwrites everything."""
        for place in plan.written:
            tensor = tensors[place]
            if not isinstance(tensor, Pretended):
                continue
            if ran:
                shadows.written_in_place(tensor)
            elif func in special.FILLS and shadows.small_enough(tensor):
                fresh = host_tensors.empty(tensor.shape, tensor.dtype)
                shadows.remember(tensor, func(fresh, *args[1:], **kwargs))
            else:
                shadows.remember(tensor, None)

    # ---- other roads ----

    def _functional(self, func, args, kwargs):
        if self.world is None:
            raise NotImplementedError(f"{func}: a functional collective outside a virtual world")
        return self.world.functional(func, args, kwargs)

    def _foreign(self, kind, func, types, args, kwargs):
        """Tensor classes with a dispatch of their own (DTensor, ...) unwrap first; foreign fakes go to their mode."""
        if issubclass(kind, FakeTensor):
            fake = next(a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, FakeTensor))
            return fake.fake_mode.dispatch(func, types, args, kwargs)
        return NotImplemented

    def _becomes_pretended(self, func, args, kwargs) -> bool:
        """An op without pretended tensors that makes one: on the device, or a large CPU factory."""
        device = kwargs.get("device")
        if device is not None:
            device = torch.device(device)
            if device.type not in ("cpu", "meta"):
                return True
        if func in special.FLOAT_FACTORIES and (device is None or device.type == "cpu"):
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            size = args[0] if args else ()
            large = dtype.is_floating_point and _elements(size) * dtype.itemsize > LARGE_CPU_BYTES
            # A worker of a data loader hands what it makes to another process, in shared memory.
            return large and torch.utils.data.get_worker_info() is None
        return False

    def _with_device(self, kwargs):
        """A device without an index is the current one; what is to be pinned is made without a driver first."""
        device = kwargs.get("device")
        if device is not None and device.type != "cpu" and device.index is None:
            kwargs = {**kwargs, "device": torch.device(device.type, torch.cuda.current_device())}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return kwargs

    def fresh(self, like: torch.Tensor, shape, dtype=None, device=None) -> Pretended:
        """A new dense pretended tensor (no record: allocation launches nothing)."""
        shape = tuple(int(n) for n in shape)
        dtype = dtype or like.dtype
        device = device or like.device
        storage = self.memory.new(_elements(shape) * dtype.itemsize, device)
        return Pretended(shape, torch._prims_common.make_contiguous_strides_for(shape), 0, dtype, device, storage)

    def to_device(self, value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Pretended:
        """A real CPU tensor moved to the device: fresh storage, the same strides where dense, value kept when small."""
        if value.is_contiguous() or not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
            result = self.fresh(value, value.shape, dtype, device)
        else:
            storage: Storage = self.memory.new(value.numel() * dtype.itemsize, device)
            result = Pretended(value.shape, value.stride(), 0, dtype, device, storage)
        if shadows.small_enough(value):
            shadows.remember(result, value.detach().to(dtype, copy=True))
        return result


def _real(func, args, kwargs):
    if kwargs.get("pin_memory"):
        return pinned.pin(func(*args, **{**kwargs, "pin_memory": False}))
    handler = special.REAL_HANDLERS.get(func)
    return handler(*args, **kwargs) if handler is not None else func(*args, **kwargs)


def _attach(result: Any, value: Any, tensors) -> None:
    if isinstance(result, Pretended):
        if isinstance(value, torch.Tensor) and result.shape == value.shape and not any(result is t for t in tensors):
            result.echo_shadow, result.echo_stamp = value, result.echo_storage.version
    elif isinstance(result, (list, tuple)) and isinstance(value, (list, tuple)):
        for r, v in zip(result, value):
            _attach(r, v, tensors)


def _elements(size) -> int:
    count = 1
    for n in size if isinstance(size, (list, tuple)) else (size,):
        count *= int(n)
    return count
