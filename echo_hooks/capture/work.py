"""What one step of a really running rank computes, counted from its ATen ops: FLOPs and tokens, which kernels do not
tell."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from echo_hooks.graph.ops import OpSignature, OpTable, TensorMeta, dtype_name
from echo_hooks.graph.program import Evidence, Kind, Phase

_PLAIN = torch._C._disabled_torch_dispatch_impl
_LOOKUP, _LOOKUP_BACKWARD = torch.ops.aten.embedding.default, torch.ops.aten.embedding_dense_backward.default


class WorkCounter:
    """Active between ``start()`` and ``stop()``, both called where a step's first backward pass begins.

    ``flops``: by (dtype, phase). ``tokens``: looked up in the table with most lookups, those that learn if any do.
    Compiled code is left alone: an active dispatch mode would make it run eagerly, in other memory.
    """

    def __init__(self) -> None:
        self.flops: dict[tuple[str, int], int] = defaultdict(int)
        self._lookups: dict[Any, dict[tuple[int, ...], int]] = {
            _LOOKUP: defaultdict(int),
            _LOOKUP_BACKWARD: defaultdict(int),
        }
        self._mode = _Mode(self)
        self._active = False

    @property
    def tokens(self) -> int:
        return max((self._lookups[_LOOKUP_BACKWARD] or self._lookups[_LOOKUP]).values(), default=0)

    def start(self) -> None:
        if not _has_compiled():
            self._mode.__enter__()
            self._active = True

    def stop(self) -> None:
        if self._active and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._active = False

    def rows(self, ops: OpTable) -> list[tuple[Kind, dict[str, Any]]]:
        """Records that take no time and state the FLOPs of the step."""
        rows = []
        for (dtype, phase), flops in sorted(self.flops.items()):
            op = ops.add(OpSignature("work of the step", inputs=(TensorMeta((), dtype),), flops=flops))
            rows.append((Kind.COMPUTE, {"op": op, "phase": phase, "duration_us": 0.0, "evidence": Evidence.MEASURED}))
        return rows

    def count(self, func, args, kwargs, result) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            phase = Phase.FORWARD if torch._C._current_autograd_node() is None else Phase.BACKWARD
            dtype = next((t.dtype for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
            if dtype is not None:
                self.flops[dtype_name(dtype), int(phase)] += int(formula(*args, **kwargs, out_val=result))
        elif func in self._lookups:
            table, indices = (args[0].shape, args[1]) if func is _LOOKUP else (result.shape, args[1])
            self._lookups[func][tuple(table)] += math.prod(indices.shape)


class _Mode(TorchDispatchMode):
    def __init__(self, counter: WorkCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # shapes are worked out: no work of the script's
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # DTensor and the like unwrap first
        result = func(*args, **kwargs)
        with contextlib.suppress(Exception):  # a formula that does not know the call: its FLOPs are left out
            self.counter.count(func, args, kwargs, result)
        return result


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])
