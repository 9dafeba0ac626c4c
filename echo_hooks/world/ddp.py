"""DistributedDataParallel: torch's own C++ reducer (bucketing, rebuild, hooks, order), helped where it needs data.

`broadcast_coalesced` is replaced for all tensors, since the C++ one never reaches a Python process group; the rest
passes through to torch when the tensors are real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echo_hooks import host_tensors
from echo_hooks.world import calls

if TYPE_CHECKING:
    from echo_hooks.world.virtual_world import VirtualWorld


def reducer_class(world: VirtualWorld, original: Any) -> Any:
    """torch's Reducer, whose timer is not started where tensors are pretended."""

    class Reducer(original):
        def __init__(self, params, *args, **kwargs):
            super().__init__(params, *args, **kwargs)
            self.echo_pretended = any(world.values.pretended(p) for p in params)

        def prepare_for_forward(self) -> None:
            # It would start a timer made of CUDA events.
            if not self.echo_pretended:
                super().prepare_for_forward()

        def _rebuild_buckets(self) -> bool:
            # Once, when the second step begins: rank 0's order of the buckets goes to all (reducer.cpp).
            with world.recorder.one_off():
                return super()._rebuild_buckets()

    return Reducer


def logger_class(world: VirtualWorld, original: Any) -> Any:
    """torch's Logger, which does not read that timer then."""

    class Logger(original):
        def __init__(self, reducer):
            super().__init__(reducer)
            self.echo_pretended = getattr(reducer, "echo_pretended", False)

        def set_runtime_stats_and_log(self) -> None:
            # It reads the timer that prepare_for_forward has not started.
            if not self.echo_pretended:
                super().set_runtime_stats_and_log()

    return Logger


def verify_params(world: VirtualWorld, original: Any) -> Any:
    """torch/csrc/distributed/c10d/reducer.cpp, verify_params_across_processes: the number of parameters is gathered,
    then the sizes and strides of rank 0 are broadcast, both as int64 on the parameters' device."""

    def verify(process_group, tensors, logger=None):
        if not any(world.values.pretended(t) for t in tensors):
            return original(process_group, tensors, logger)
        numbers = sum(2 * t.dim() for t in tensors)
        with world.recorder.own_time():
            count = world.values.empty(tensors[0], (1,), torch.int64)
            slots = [world.values.empty(tensors[0], (1,), torch.int64) for _ in range(process_group.size())]
            world.values.set(count, host_tensors.tensor([len(tensors)]))
            calls.all_gather(world, process_group, [count], [slots], True).wait()
            world.recorder.sync(stream=world.recorder.stream)
            sizes = world.values.empty(tensors[0], (numbers,), torch.int64)
            world.values.set(sizes, host_tensors.tensor([n for t in tensors for n in (*t.shape, *t.stride())]))
            calls.broadcast(world, process_group, sizes, sizes, 0, True).wait()
            world.recorder.sync(stream=world.recorder.stream)
        return None

    return verify


def broadcast_coalesced() -> Any:
    """torch/csrc/distributed/c10d/comm.cpp: one flattened broadcast per bucket, at most two in flight."""

    def broadcast(process_group, tensors, buffer_size=256 << 20, src=0):
        buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [buffer_size])
        opts = dist.BroadcastOptions()
        opts.rootRank = src
        in_flight: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        with torch.no_grad():
            for bucket in buckets:
                members = [tensors[i] for i in bucket]
                flat = torch._utils._flatten_dense_tensors(members)
                in_flight.append((process_group.broadcast([flat], opts), flat, members))
                if len(in_flight) == 2:
                    _finish(*in_flight.pop(0))
            for entry in in_flight:
                _finish(*entry)
        return None

    return broadcast


def _finish(work: Any, flat: torch.Tensor, members: list[torch.Tensor]) -> None:
    work.wait()
    for tensor, value in zip(members, torch._utils._unflatten_dense_tensors(flat, members)):
        tensor.copy_(value)
