"""Collectives of tensor parallelism along the first dimension, and what identifies a group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def size_of(group) -> int:
    """Ranks of a group; 1 where there is none."""
    return dist.get_world_size(group) if group is not None and dist.is_initialized() else 1


def gather_along_first_dim(tensor, process_group, async_op=False, quantizer=None):
    """[n, ...] of each rank to [size * n, ...]; the result and the work to wait for (None when done or alone)."""
    size = size_of(process_group)
    if size == 1:
        return tensor, None
    eight_bits = tensor.dtype.itemsize == 1  # NCCL has no name for them
    out = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    to, own = (t.view(torch.uint8) if eight_bits else t for t in (out, tensor.contiguous()))
    work = dist.all_gather_into_tensor(to, own, group=process_group, async_op=async_op)
    return out, work


def reduce_scatter_along_first_dim(tensor, tp_group, async_op=False):
    """[size * n, ...] of each rank, summed, to [n, ...]."""
    size = size_of(tp_group)
    if size == 1:
        return tensor, None
    if tensor.shape[0] % size:
        raise AssertionError(f"First dimension of the tensor ({tensor.shape[0]}) should be divisible by {size}")
    out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    work = dist.reduce_scatter_tensor(out, tensor.contiguous(), group=tp_group, async_op=async_op)
    return out, work


def allreduce(tensor, tp_group=None, async_op=False):
    """In place."""
    if size_of(tp_group) == 1:
        return tensor, None
    return tensor, dist.all_reduce(tensor, group=tp_group, async_op=async_op)


def wait(work) -> None:
    if work is not None:
        work.wait()
