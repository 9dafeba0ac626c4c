"""Heads for sequence: the all-to-alls around attention, each tensor's under the reordering of the one before."""

from __future__ import annotations

import torch
import torch.distributed as dist


def before_attention(tensors: list[torch.Tensor], dim: int, group, stream) -> list[torch.Tensor]:
    """Each [.., sequence / size, .., heads, d] to [.., sequence, .., heads / size, d]; ``dim`` is the sequence's."""
    size = dist.get_world_size(group)

    def pack(x):
        return x.view(*x.shape[:-2], size, x.shape[-2] // size, x.shape[-1]).movedim(-3, 0).contiguous()

    def unpack(x):  # [size, .., sequence / size, ..]; the two chunks of each rank go to their places
        return x.movedim(0, dim).contiguous().view(*x.shape[1 : dim + 1], -1, *x.shape[dim + 2 :])

    return _exchange(tensors, pack, unpack, group, stream)


def after_attention(tensors: list[torch.Tensor], dim: int, group, stream) -> list[torch.Tensor]:
    """The way back."""
    size = dist.get_world_size(group)

    def pack(x):
        return x.view(*x.shape[:dim], size, -1, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()

    def unpack(x):
        x = x.movedim(0, -3).contiguous()
        return x.view(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])

    return _exchange(tensors, pack, unpack, group, stream)


def _exchange(tensors, pack, unpack, group, stream) -> list[torch.Tensor]:
    sent, works = [], []
    for tensor in tensors:
        packed = pack(tensor)
        received = torch.empty_like(packed)
        works.append(dist.all_to_all_single(received, packed, group=group, async_op=True))
        sent.append(received)
    results = []
    for received, work in zip(sent, works):
        with torch.cuda.stream(stream):
            work.wait()
            results.append(unpack(received))
    torch.cuda.current_stream().wait_stream(stream)
    return results
