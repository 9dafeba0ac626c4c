"""Functional collectives on pretended tensors.

On real tensors `torch.ops._c10d_functional.*` goes through C++ to the group. On pretended ones it never gets there, so
the capture's dispatch mode hands the op to `Functional.answer`, which records it and answers with tensors of the same
kind. A wait becomes a wait for the event of the tensor's own collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import distributed_c10d as c10d

from echo_hooks.world import calls
from echo_hooks.world.streams import Completion
from echo_hooks.world.values import reduce_name, storage_key
from echo_hooks.world.work import RecordedWork

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


class Functional:
    """The functional namespaces of one world."""

    def __init__(self, world: VirtualWorld):
        self.world = world
        # Completions, not works: a work holds its outputs, and one that nobody waits for would hold them for ever.
        self._by_storage: WeakKeyDictionary[Any, Completion] = WeakKeyDictionary()
        self._by_address: dict[int, Completion] = {}
        self._ops: dict[str, Callable[..., Any]] = {
            "all_reduce": self._all_reduce,
            "all_reduce_": self._all_reduce_inplace,
            "all_reduce_coalesced": self._all_reduce_coalesced,
            "all_reduce_coalesced_": self._all_reduce_coalesced_inplace,
            "all_gather_into_tensor": self._all_gather,
            "all_gather_into_tensor_coalesced": self._all_gather_coalesced,
            "all_gather_into_tensor_out": self._all_gather,
            "reduce_scatter_tensor": self._reduce_scatter,
            "reduce_scatter_tensor_coalesced": self._reduce_scatter_coalesced,
            "reduce_scatter_tensor_out": self._reduce_scatter,
            "all_to_all_single": self._all_to_all,
            "broadcast": self._broadcast,
            "broadcast_": self._broadcast_inplace,
            "isend": self._isend,
            "irecv": self._irecv,
            "batch_p2p_ops": self._batch_p2p_ops,
            "wait_tensor": self._wait,
            "_wrap_tensor_autograd": self._wrap,
        }

    def names(self) -> list[str]:
        return sorted(self._ops)

    def answer(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        """Record ``func`` (an OpOverload of one of NAMESPACES) and return what it returns.

        Raises NotImplementedError naming an op that is not simulated.
        """
        namespace, name = func._schema.name.split("::")
        handler = self._ops.get(name)
        if handler is None or namespace not in NAMESPACES:
            raise NotImplementedError(f"{namespace}.{name} is not simulated")
        if namespace == "c10d_functional":
            args = _modern_arguments(name, args)
        with self.world.recorder.own_time():
            return handler(*args, **(kwargs or {}))

    # ---- collectives ----

    def _all_reduce(self, tensor, reduce_op, group_name):
        return self._all_reduce_coalesced([tensor], reduce_op, group_name)[0]

    def _all_reduce_inplace(self, tensor, reduce_op, group_name):
        return self._all_reduce_coalesced_inplace([tensor], reduce_op, group_name)[0]

    def _all_reduce_coalesced(self, tensors, reduce_op, group_name):
        outputs = [self._empty(t, tuple(t.shape)) for t in tensors]
        work = calls.all_reduce(self.world, _group(group_name), tensors, outputs, reduce_name(reduce_op), True)
        return self._pending(outputs, work)

    def _all_reduce_coalesced_inplace(self, tensors, reduce_op, group_name):
        work = calls.all_reduce(self.world, _group(group_name), tensors, tensors, reduce_name(reduce_op), True)
        return self._pending(tensors, work)

    def _all_gather(self, tensor, group_size, group_name, *, out=None):
        return self._all_gather_coalesced([tensor], group_size, group_name, None if out is None else [out])[0]

    def _all_gather_coalesced(self, tensors, group_size, group_name, outputs=None):
        if outputs is None:
            outputs = [self._empty(t, (_rows(t) * group_size, *t.shape[1:])) for t in tensors]
        work = calls.all_gather(self.world, _group(group_name), tensors, outputs, True)
        return self._pending(outputs, work)

    def _reduce_scatter(self, tensor, reduce_op, group_size, group_name, *, out=None):
        given = None if out is None else [out]
        return self._reduce_scatter_coalesced([tensor], reduce_op, group_size, group_name, given)[0]

    def _reduce_scatter_coalesced(self, tensors, reduce_op, group_size, group_name, outputs=None):
        if outputs is None:
            outputs = [self._empty(t, (_rows(t) // group_size, *t.shape[1:])) for t in tensors]
        op = reduce_name(reduce_op)
        return self._pending(outputs, calls.reduce_scatter(self.world, _group(group_name), tensors, outputs, op, True))

    def _all_to_all(self, tensor, output_splits, input_splits, group_name):
        ours = [int(n) for n in output_splits or ()]
        theirs = [int(n) for n in input_splits or ()]
        rows = sum(ours) if ours else _rows(tensor)
        output = self._empty(tensor, (rows, *tensor.shape[1:]))
        work = calls.all_to_all(self.world, _group(group_name), [tensor], [output], theirs, ours, True)
        return self._pending([output], work)[0]

    def _broadcast(self, tensor, src, group_name):
        output = self._empty(tensor, tuple(tensor.shape))
        work = calls.broadcast(self.world, _group(group_name), tensor, output, int(src), True)
        return self._pending([output], work)[0]

    def _broadcast_inplace(self, tensor, src, group_name):
        work = calls.broadcast(self.world, _group(group_name), tensor, tensor, int(src), True)
        return self._pending([tensor], work)[0]

    # ---- point to point (peers are global ranks: _functional_collectives.isend_inplace) ----

    def _isend(self, tensor, dst, tag, group_name):
        group = _group(group_name)
        return self._pending([tensor], calls.send(self.world, group, tensor, group.members[int(dst)], int(tag)))[0]

    def _irecv(self, tensor, src, tag, group_name):
        group = _group(group_name)
        return self._pending([tensor], calls.recv(self.world, group, tensor, group.members[int(src)], int(tag)))[0]

    def _batch_p2p_ops(self, op_list, peer_list, tag_list, tensors, group_name):
        group = _group(group_name)
        one = {"isend": self._isend, "irecv": self._irecv}
        if group.runs_on_host(tensors[0].device):
            return [one[op](t, p, tag, group) for op, p, tag, t in zip(op_list, peer_list, tag_list, tensors)]
        with group.batched(tensors[0].device) as works:
            for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors):
                one[op](tensor, peer, tag, group)
        return self._pending(list(tensors), works[0])

    # ---- waiting ----

    def _wait(self, tensor):
        key = storage_key(tensor)
        completion = self._by_address.pop(key, None) if isinstance(key, int) else self._by_storage.pop(key, None)
        if completion is not None:
            completion.wait(self.world.recorder)
        return tensor

    def _wrap(self, tensor):
        """The op's own fake kernel would return a plain tensor, and no wait would ever follow."""
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(tensor)

    def _pending(self, outputs: list[torch.Tensor], work: RecordedWork) -> list[torch.Tensor]:
        for output in outputs:
            key = storage_key(output)
            if isinstance(key, int):
                self._by_address[key] = work.completion
            else:
                self._by_storage[key] = work.completion
        return outputs

    def _empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return self.world.values.empty(like, shape)


def _group(name: Any) -> RecordingGroup:
    """From a name, or from the group itself (torch 2.13 on passes either)."""
    return c10d._resolve_process_group(name) if isinstance(name, str) else name  # type: ignore


def _rows(t: torch.Tensor) -> int:
    return t.shape[0] if t.dim() else 1


def _modern_arguments(name: str, args: tuple) -> tuple:
    """Arguments of the legacy namespace, (..., tag, ranks, group_size), in the order of the current one."""
    if name in ("wait_tensor", "isend", "irecv", "batch_p2p_ops"):
        return args
    *front, tag, ranks, group_size = args
    group = c10d._find_or_create_pg_by_ranks_and_tag(tag, list(ranks), group_size)
    if name.startswith(("all_gather", "reduce_scatter")):
        return (*front, group_size, group)
    return (*front, group)
