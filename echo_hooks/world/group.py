"""The recording process group: every method of torch's ProcessGroup is recorded, or raises and says its name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, FakeProcessGroup

from echo_hooks.graph.groups import Group
from echo_hooks.world import calls
from echo_hooks.world.streams import Bracket, Completion
from echo_hooks.world.values import reduce_name
from echo_hooks.world.work import RecordedWork

if TYPE_CHECKING:
    from echo_hooks.world.virtual_world import VirtualWorld


def _own_time(method):
    """The method's time is Echo's, not the script's."""

    @wraps(method)
    def timed(self, *args, **kwargs):
        recorder = self.world.recorder
        recorder.enter()
        try:
            return method(self, *args, **kwargs)
        finally:
            recorder.leave()

    return timed


def _flat(tensors: Any) -> list[torch.Tensor]:
    """A tensor, a list, or nested lists, as torch's layers pass them."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for item in tensors for t in _flat(item)]


def _asynchronous(opts: Any) -> bool:
    """``asyncOp`` is set by the ``dist.*`` layer; C++ callers leave it at its default, True."""
    return True if opts is None else bool(opts.asyncOp)


class RecordingGroup(dist.ProcessGroup):
    """Process group of a virtual rank. Inside is a C++ FakeProcessGroup, which answers what only C++ asks.

    Attributes:
        entry: the group's line in the group table.
        ranks: global ranks in group order; members: global rank to group rank.
        backends: device type to backend name, as the script asked.
    """

    def __init__(self, world: VirtualWorld, entry: Group, backends: dict[str, str]):
        rank = entry.position(world.rank)
        super().__init__(rank, entry.size)  # type: ignore[call-arg]
        self.world = world
        self.entry = entry
        self.ranks = entry.ranks
        self.members = {global_rank: i for i, global_rank in enumerate(entry.ranks)}
        self.backends = backends
        self.bracket: Bracket | None = None
        self.issued = 0  # collectives so far
        create = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # torch 2.9: the constructor itself
        self._inner = create(rank, entry.size)
        for kind in ("cpu", "cuda", "meta", *(k for k in backends if k not in ("cpu", "cuda", "meta"))):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, self._inner)

    def runs_on_host(self, device: torch.device) -> bool:
        """True for CPU tensors, and where the backend of the device is gloo or MPI."""
        return device.type == "cpu" or self.backends.get(device.type) in ("gloo", "mpi")

    def getBackendName(self) -> str:
        return "echo"  # never "gloo": DDP's logger would ask C++ for a real gloo backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.backends]

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """A tensor on a device that no backend of the group serves fails as in a real job."""
        kind = tensors[0].device.type if tensors else ""
        if self.world.check_devices and kind and kind not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        if self.world.values.in_place and kind == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "a collective captured in a CUDA graph is recorded once, not at each replay: use --timing profile"
            )
        if tensors and tensors[0].layout != torch.strided:
            raise NotImplementedError(f"collectives on {tensors[0].layout} tensors are not simulated")

    # ---- collectives ----

    @_own_time
    def allreduce(self, tensors, opts=None) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        op = reduce_name(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return calls.all_reduce(self.world, self, tensors, tensors, op, _asynchronous(opts))

    allreduce_coalesced = allreduce

    @_own_time
    def broadcast(self, tensors, opts=None) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        root = 0 if opts is None else opts.rootRank
        return calls.broadcast(self.world, self, tensors[0], tensors[0], root, _asynchronous(opts))

    @_own_time
    def reduce(self, tensors, opts=None) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        root, op = (0, "sum") if opts is None else (opts.rootRank, reduce_name(opts.reduceOp))
        return calls.reduce(self.world, self, tensors, root, op, _asynchronous(opts))

    @_own_time
    def allgather(self, outputs, inputs, opts=None) -> RecordedWork:
        inputs = _flat(inputs)
        self._check(inputs)
        lists = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else list(outputs)
        return calls.all_gather(self.world, self, inputs, lists, _asynchronous(opts))

    @_own_time
    def allgather_coalesced(self, output_lists, inputs, opts=None) -> RecordedWork:
        """``output_lists[member][i]`` receives that member's ``inputs[i]``."""
        inputs = _flat(inputs)
        self._check(inputs)
        return calls.all_gather(self.world, self, inputs, [list(o) for o in zip(*output_lists)], _asynchronous(opts))

    @_own_time
    def all_gather_single(self, output, input, opts=None) -> RecordedWork:
        inputs, outputs = _flat(input), _flat(output)
        self._check(inputs)
        return calls.all_gather(self.world, self, inputs, outputs, _asynchronous(opts))

    _allgather_base = all_gather_single
    all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    @_own_time
    def reduce_scatter(self, outputs, inputs, opts=None) -> RecordedWork:
        outputs = _flat(outputs)
        self._check(outputs)
        lists = [inputs] if isinstance(inputs[0], torch.Tensor) else list(inputs)
        op = reduce_name(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return calls.reduce_scatter(self.world, self, lists, outputs, op, _asynchronous(opts))

    @_own_time
    def reduce_scatter_single(self, output, input, opts=None) -> RecordedWork:
        inputs, outputs = _flat(input), _flat(output)
        self._check(outputs)
        op = reduce_name(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return calls.reduce_scatter(self.world, self, inputs, outputs, op, _asynchronous(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    @_own_time
    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, opts=None):
        self._check([output])
        splits = [[] if sizes is None else [int(n) for n in sizes] for sizes in (input_split_sizes, output_split_sizes)]
        return calls.all_to_all(self.world, self, [input], [output], splits[0], splits[1], _asynchronous(opts))

    alltoall_base = all_to_all_single

    @_own_time
    def alltoall(self, outputs, inputs, opts=None) -> RecordedWork:
        outputs, inputs = _flat(outputs), _flat(inputs)
        self._check(outputs)
        return calls.all_to_all(self.world, self, inputs, outputs, None, None, _asynchronous(opts))

    @_own_time
    def gather(self, outputs, inputs, opts=None) -> RecordedWork:
        inputs = _flat(inputs)
        self._check(inputs)
        root = 0 if opts is None else opts.rootRank
        return calls.gather(self.world, self, inputs[0], _flat(outputs or []), root, _asynchronous(opts))

    @_own_time
    def gather_single(self, output, input, opts=None) -> RecordedWork:
        self._check([input])
        root = 0 if opts is None else opts.rootRank
        outputs = [] if output is None or self.rank() != root else _flat(output)
        return calls.gather(self.world, self, input, outputs, root, _asynchronous(opts))

    gather_into_tensor = gather_single

    @_own_time
    def scatter(self, outputs, inputs, opts=None) -> RecordedWork:
        outputs = _flat(outputs)
        self._check(outputs)
        root = 0 if opts is None else opts.rootRank
        return calls.scatter(self.world, self, outputs[0], _flat(inputs or []), root, _asynchronous(opts))

    @_own_time
    def barrier(self, opts=None, **_) -> RecordedWork:
        opts = BarrierOptions() if opts is None else opts
        device = opts.device
        if device is None:
            device = torch.device("cpu") if "cpu" in self.backends else self._device_types[0]
        return calls.barrier(self.world, self, torch.device(device), _asynchronous(opts))

    @_own_time
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        calls.barrier(self.world, self, torch.device("cpu"), asynchronous=False)

    # ---- point to point ----

    @_own_time
    def send(self, tensors, dstRank: int, tag: int = 0) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        return calls.send(self.world, self, tensors[0], int(dstRank), int(tag))

    @_own_time
    def recv(self, tensors, srcRank: int, tag: int = 0) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        return calls.recv(self.world, self, tensors[0], int(srcRank), int(tag))

    @_own_time
    def recv_anysource(self, tensors, tag: int = 0) -> RecordedWork:
        tensors = _flat(tensors)
        self._check(tensors)
        return calls.recv(self.world, self, tensors[0], -1, int(tag))

    recvAnysource = recv_anysource

    # ---- coalescing ----

    @_own_time
    def _start_coalescing(self, device=None) -> None:
        self.bracket = Bracket(self.world.recorder)

    @_own_time
    def _end_coalescing(self, device=None) -> RecordedWork:
        bracket, self.bracket = self.bracket, None
        completion = Completion() if bracket is None else bracket.close()
        return RecordedWork(self.world.recorder, [], completion)

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    @contextmanager
    def batched(self, device: torch.device):
        """Calls inside form one kernel; yields a list that holds the batch's Work afterwards."""
        works: list[RecordedWork] = []
        self._start_coalescing(device)
        try:
            yield works
        finally:
            works.append(self._end_coalescing(device))

    # ---- the rest ----

    def split_group(  # type: ignore[override]
        self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, **_
    ):
        """``ranks``: group ranks of this group. The siblings are not known here: ``dist.split_group`` names them."""
        return self.world.split_group(self, [list(ranks)], timeout=timeout, group_desc=group_desc)

    splitGroup = split_group

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def _set_sequence_number_for_group(self) -> None:
        pass

    def merge_remote_group(self, *args, **kwargs):
        raise NotImplementedError("ProcessGroup.merge_remote_group is not simulated")

    def reconfigure(self, *args, **kwargs):
        raise NotImplementedError("ProcessGroup.reconfigure is not simulated")

    def get_reconfigure_handle(self, *args, **kwargs):
        raise NotImplementedError("ProcessGroup.get_reconfigure_handle is not simulated")

    def new_window(self, *args, **kwargs):
        raise NotImplementedError("ProcessGroup.new_window (one-sided communication) is not simulated")
