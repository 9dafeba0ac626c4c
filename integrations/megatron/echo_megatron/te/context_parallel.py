"""Attention over a sequence that is cut among ranks: ring ("p2p"), "all_gather", "a2a", and a ring of "a2a" groups.

Each rank holds two chunks of the 2 * size that the sequence is cut into, one from each end, so that a causal mask gives
all ranks the same work. Which tensors travel, when, and what is saved follows Transformer Engine 2.9
(pytorch/attention/dot_product_attention/context_parallel.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from echo_megatron.te.communication import gather_along_first_dim, reduce_scatter_along_first_dim
from echo_megatron.te.exchange import after_attention, before_attention
from echo_megatron.te.ring import RingAttention


def ranks(group) -> int:
    """Ranks of a context-parallel group, or of the pair of groups of "a2a+p2p"."""
    if isinstance(group, (list, tuple)):
        return dist.get_world_size(group[0]) * dist.get_world_size(group[1])
    return dist.get_world_size(group)


def attention(query, key, value, shape, causal, window, group, stream, kind):
    """Output of the rank's own queries over the whole sequence. Raises ValueError for a kind nobody knows."""
    if kind == "p2p":
        return RingAttention.apply(query, key, value, shape, causal, group, None, stream)
    if kind == "a2a+p2p":
        inner, outer = group
        return RingAttention.apply(query, key, value, shape, causal, outer, inner, stream)
    if kind == "all_gather":
        return _Gathered.apply(query, key, value, shape, causal, window, group, stream)
    if kind == "a2a":
        return _Exchanged.apply(query, key, value, shape, causal, window, group, stream)
    raise ValueError(f"cp_comm_type {kind!r} is none of p2p, all_gather, a2a, a2a+p2p")


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks are gathered, in backward again; their gradients reduced and scattered."""

    @staticmethod
    def forward(ctx, query, key, value, shape, causal, window, group, stream):
        key, value = (x.movedim(shape.dim, 0).contiguous() for x in (key, value))
        q = _halves(query, shape.dim)
        parts = _parts(key, value, shape, causal, window, group)
        out, kept = torch.empty_like(q), []
        for i, part in enumerate(parts):
            with torch.cuda.stream(torch.cuda.current_stream() if i == 0 else _after_current(stream)):
                own = q.select(shape.dim, i).contiguous()
                k, v = (x[part.keys].movedim(0, shape.dim).contiguous() for x in (part.key, part.value))
                result, sums = part.attend(own, k, v, shape)
                out.select(shape.dim, i).copy_(result)
                kept += [result, sums]
        torch.cuda.current_stream().wait_stream(stream)
        ctx.save_for_backward(q, key, value, *kept)
        ctx.arguments = shape, causal, window, group, stream
        return out.view(*query.shape[: shape.dim], -1, *query.shape[shape.dim + 1 : -1], value.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        shape, causal, window, group, stream = ctx.arguments
        q, key, value, *kept = ctx.saved_tensors
        grad = _halves(grad.contiguous(), shape.dim)
        dq = torch.empty_like(q)
        parts = _parts(key, value, shape, causal, window, group)
        dk, dv = (torch.zeros_like(x) for x in (parts[0].key, parts[0].value))
        for i, part in enumerate(parts):
            with torch.cuda.stream(torch.cuda.current_stream() if i == 0 else _after_current(stream)):
                own, g = (x.select(shape.dim, i).contiguous() for x in (q, grad))
                k, v = (x[part.keys].movedim(0, shape.dim).contiguous() for x in (part.key, part.value))
                a, b, c = part.attend_backward(g, own, k, v, kept[2 * i], kept[2 * i + 1], shape)
                dq.select(shape.dim, i).copy_(a)
                for total, own_part in ((dk, b), (dv, c)):
                    total[part.keys].add_(own_part.movedim(shape.dim, 0))
        torch.cuda.current_stream().wait_stream(stream)
        order = _chunk_order(dist.get_world_size(group), dk.device)
        dk, dv = (_reordered(x, order) for x in (dk, dv))
        dk, _ = reduce_scatter_along_first_dim(dk, group)
        dv, _ = reduce_scatter_along_first_dim(dv, group)
        dq = dq.view(*dq.shape[: shape.dim], -1, *dq.shape[shape.dim + 2 :])
        dk, dv = (x.movedim(0, shape.dim).contiguous() for x in (dk, dv))
        return dq, dk, dv, None, None, None, None, None


class _Part:
    """One of the rank's two chunks of queries and the keys that it sees."""

    def __init__(self, key, value, keys: slice, causal: bool, window):
        self.key, self.value, self.keys, self.causal, self.window = key, value, keys, causal, window

    def attend(self, q, k, v, shape):
        from echo_megatron.te import kernels

        queries, keys, causal = self._work(q, k, shape)
        return kernels.attention(q, k, v, queries, keys, causal)

    def attend_backward(self, grad, q, k, v, out, sums, shape):
        from echo_megatron.te import kernels

        queries, keys, causal = self._work(q, k, shape)
        return kernels.attention_backward(grad, q, k, v, out, sums, queries, keys, causal)

    def _work(self, q, k, shape) -> tuple[int, int, bool]:
        """Queries, keys seen on average, and whether half of a square is skipped."""
        queries, keys = q.shape[shape.dim], k.shape[shape.dim]
        if self.window is not None and self.window < keys:
            return queries, self.window, False
        # The last chunk of keys is the queries' own: half of it is masked.
        return queries, keys - queries // 2 if self.causal else keys, False


def _parts(key, value, shape, causal, window, group) -> list[_Part]:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    order = _chunk_order(size, key.device)
    whole = [_reordered(gather_along_first_dim(x, group)[0], order) for x in (key, value)]
    chunk = whole[0].shape[0] // (2 * size)
    parts = []
    for number in (rank, 2 * size - 1 - rank):
        end = (number + 1) * chunk if causal else whole[0].shape[0]
        begin = max(0, end - chunk - window) if window is not None else 0
        parts.append(_Part(*whole, slice(begin, end), causal, window))
    return parts


def _chunk_order(size: int, device) -> torch.Tensor:
    order = [n for rank in range(size) for n in (rank, 2 * size - 1 - rank)]
    return torch.tensor(order, dtype=torch.int32, device=device)


def _reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    chunks = x.view(order.numel(), -1, *x.shape[1:])
    return torch.index_select(chunks, 0, order).view(x.shape)


def _halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.view(*x.shape[:dim], 2, x.shape[dim] // 2, *x.shape[dim + 1 :])


def _after_current(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    stream.wait_stream(torch.cuda.current_stream())
    return stream


class _Exchanged(torch.autograd.Function):
    """Heads are exchanged for sequence: four all-to-alls forward, four backward; the kernel sees the whole sequence."""

    @staticmethod
    def forward(ctx, query, key, value, shape, causal, window, group, stream):
        from echo_megatron.te.attention import attend

        _check_heads(query, key, group)
        query, key, value = before_attention([query, key, value], shape.dim, group, stream)
        out, sums = attend(query, key, value, shape, causal, window)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.arguments = shape, causal, window, group, stream
        return after_attention([out], shape.dim, group, stream)[0]

    @staticmethod
    def backward(ctx, grad):
        from echo_megatron.te.attention import attend_backward

        shape, causal, window, group, stream = ctx.arguments
        query, key, value, out, sums = ctx.saved_tensors
        (grad,) = before_attention([grad.contiguous()], shape.dim, group, stream)
        grads = attend_backward(grad, query, key, value, out, sums, shape, causal, window)
        return *after_attention(list(grads), shape.dim, group, stream), None, None, None, None, None


def _check_heads(query, key, group) -> None:
    size = dist.get_world_size(group)
    if query.shape[-2] % size or key.shape[-2] % size:
        raise AssertionError(
            f"The number of attention heads needs to be divisible by CP size: {query.shape[-2]} heads of query,"
            f" {key.shape[-2]} of key and value, {size} ranks"
        )
