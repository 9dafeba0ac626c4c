"""Products that run in chunks while chunks are communicated: the user buffers of Transformer Engine.

User buffers copy between GPUs of a node with kernels of their own. Here a gather is the ring that they form (each step
multiplies one chunk while it passes the chunk on) and a scatter a pipeline of chunks, with messages and reductions
that are priced as NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
import torch.distributed as dist

from echo_megatron.te.communication import reduce_scatter_along_first_dim, size_of, wait

SCATTER_CHUNKS = 4
"""Transformer Engine's default of ``num_splits`` for pipelined products."""

_buffers: dict[str, torch.Tensor] = {}


class UserBufferQuantizationMode(Enum):
    NONE = "none"
    FP8 = "fp8"


def initialize_ub(shape, tp_size, use_fp8=False, quantization_modes=None, dtype=torch.bfloat16, **_) -> None:
    """Buffers of [tokens, hidden] for each product that communicates, kept to the end of the run."""
    layers = ("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad")
    layers += ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad")
    for name in layers:
        _buffers[name] = torch.empty(tuple(shape), dtype=dtype, device=torch.cuda.current_device())


def destroy_ub() -> None:
    _buffers.clear()


def initialized() -> bool:
    return bool(_buffers)


def gathered_mm(product: Callable[[torch.Tensor], torch.Tensor], own: torch.Tensor, group) -> torch.Tensor:
    """product(all ranks' chunks) without waiting for all of them: size - 1 exchanges with the neighbours."""
    size, rank = size_of(group), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
    parts, chunk, works = [], own, []
    for step in range(size):
        for work in works:
            work.wait()
        if step < size - 1:
            following = torch.empty_like(chunk)
            raw = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (chunk, following)]
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, raw[0], after, group), dist.P2POp(dist.irecv, raw[1], before, group)]
            )
        parts.append(product(chunk))
        if step < size - 1:
            chunk = following
    # The chunks' products land where they belong; nothing is copied.
    return parts[0].new_empty((size * own.shape[0], parts[0].shape[1]))


def scattered_mm(product: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor, group) -> torch.Tensor:
    """product(whole) summed over ranks and scattered, one chunk's reduction under the next one's product."""
    parts, works = [], []
    chunks = SCATTER_CHUNKS if whole.shape[0] % (SCATTER_CHUNKS * size_of(group)) == 0 else 1
    for chunk in whole.chunk(chunks):
        part, work = reduce_scatter_along_first_dim(product(chunk), group, async_op=True)
        parts.append(part)
        works.append(work)
    for work in works:
        wait(work)
    return parts[0].new_empty((whole.shape[0] // size_of(group), parts[0].shape[1]))
