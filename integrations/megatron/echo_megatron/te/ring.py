"""Ring attention: keys and values go round, each step's under the attention of the one before."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from echo_megatron.te import kernels
from echo_megatron.te.exchange import after_attention, before_attention


class RingAttention(torch.autograd.Function):
    """size - 1 exchanges of keys and values forward. Backward size: keys and values in all but the last, their
    gradients in all but the first. With ``inner`` heads are exchanged in that group first ("a2a+p2p")."""

    @staticmethod
    def forward(ctx, query, key, value, shape, causal, group, inner, stream):
        if inner is not None:
            query, key, value = before_attention([query, key, value], shape.dim, inner, stream)
        ring = _Ring(group, shape, causal, stream)
        buffer = torch.cat((key.reshape(-1), value.reshape(-1)))
        out, sums = None, None
        kept: list[torch.Tensor] = []
        works: list = []
        for step in range(ring.size):
            for work in works:
                work.wait()
            works = []
            received = None
            if step < ring.size - 1:
                received = torch.empty_like(buffer)
                works = ring.pass_on(buffer, received)
            with torch.cuda.stream(ring.stream_of(step)):
                q, k, v, half_of_square = ring.operands(step, query, buffer, key, value)
                part, part_sums = kernels.attention(q, k, v, q.shape[ring.dim], k.shape[ring.dim], half_of_square)
                if out is None:
                    out, sums = part, part_sums.clone()
                else:  # rescaled and added in one pass each
                    torch.logaddexp(ring.same_part(sums, part_sums), part_sums)
                    ring.same_part(out, part).add_(part)
            if received is not None:
                buffer = received
        torch.cuda.current_stream().wait_stream(stream)
        kept = [query, buffer, out, sums]
        ctx.save_for_backward(*kept)
        ctx.arguments = shape, causal, group, inner, stream
        ctx.like = key.shape, value.shape
        return out if inner is None else after_attention([out], shape.dim, inner, stream)[0]

    @staticmethod
    def backward(ctx, grad):
        shape, causal, group, inner, stream = ctx.arguments
        query, buffer, out, sums = ctx.saved_tensors
        grad = grad.contiguous()
        if inner is not None:
            (grad,) = before_attention([grad], shape.dim, inner, stream)
        ring = _Ring(group, shape, causal, stream)
        key_shape, value_shape = ctx.like
        k_numel = key_shape.numel()
        buffers = [buffer.new_empty((2, buffer.numel())) for _ in range(2)]
        buffers[0][0].copy_(buffer)
        dq = torch.empty_like(query)
        works: list = []
        for step in range(ring.size):
            for work in works:
                work.wait()
            own, other = buffers[step % 2], buffers[(step + 1) % 2]
            # Keys and values in all steps but the last, the gradients gathered so far in all but the first.
            first, last = step == 0, step == ring.size - 1
            works = ring.pass_on(*((b[0] if first else b[1] if last else b) for b in (own, other)))
            key, value = own[0][:k_numel].view(key_shape), own[0][k_numel:].view(value_shape)
            q, k, v, half_of_square = ring.operands_backward(step, query, key, value)
            own_out, own_sums, own_grad = (ring.part_of(x, q) for x in (out, sums, grad))
            a, b, c = kernels.attention_backward(
                own_grad, q, k, v, own_out, own_sums, q.shape[ring.dim], k.shape[ring.dim], half_of_square
            )
            if first:
                ring.same_part(dq, a).copy_(a)
            else:
                ring.same_part(dq, a).add_(a)
            for work in works:
                work.wait()
            works = []
            totals = other[1]
            dk, dv = totals[:k_numel].view(key_shape), totals[k_numel:].view(value_shape)
            for total, part in ((dk, b), (dv, c)):
                if first:
                    ring.same_part(total, part).copy_(part)
                else:
                    ring.same_part(total, part).add_(part)
        grads = [dq, dk, dv]
        if inner is not None:
            grads = after_attention(grads, shape.dim, inner, stream)
        return *grads, None, None, None, None, None


class _Ring:
    """Who comes next, and which part of the square of queries and keys a step computes."""

    def __init__(self, group, shape, causal: bool, stream):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        self.after, self.before = ranks[(self.rank + 1) % self.size], ranks[(self.rank - 1) % self.size]
        self.dim, self.causal, self.stream = shape.dim, causal, stream
        self.batched = bool(int(os.environ.get("NVTE_BATCH_MHA_P2P_COMM", "0"))) or self.size == 2

    def pass_on(self, own: torch.Tensor, received: torch.Tensor) -> list:
        send = (dist.isend, own, self.after)
        receive = (dist.irecv, received, self.before)
        calls = [send, receive] if self.rank % 2 == 0 else [receive, send]
        if self.batched:
            return dist.batch_isend_irecv([dist.P2POp(op, t, peer, self.group) for op, t, peer in calls])
        return [op(t, peer, self.group) for op, t, peer in calls]

    def stream_of(self, step: int):
        """Attention of two steps on two streams in turn."""
        if step % 2 == 0:
            return torch.cuda.current_stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.stream

    def operands(self, step: int, query, buffer, key, value):
        """(q, k, v, whether half of the square is masked) of a forward step."""
        k_numel = key.numel()
        k, v = buffer[:k_numel].view(key.shape), buffer[k_numel:].view(value.shape)
        return self._cut(query, k, v, own=step == 0, earlier=step <= self.rank)

    def operands_backward(self, step: int, query, key, value):
        """Backward goes on from where forward has ended: the rank's own keys come last."""
        own = step == self.size - 1
        return self._cut(query, key, value, own=own, earlier=step >= self.size - self.rank - 1)

    def _cut(self, q, k, v, *, own: bool, earlier: bool):
        if not self.causal or own:
            return q, k, v, self.causal
        half = k.shape[self.dim] // 2
        if earlier:  # keys of an earlier rank: their first chunk comes before all queries, their second after all
            return q, k.narrow(self.dim, 0, half), v.narrow(self.dim, 0, half), False
        half = q.shape[self.dim] // 2
        return q.narrow(self.dim, half, q.shape[self.dim] - half), k, v, False

    def part_of(self, whole: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Of a tensor of all queries, those that ``q`` has."""
        return self.same_part(whole, q)

    def same_part(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        count = part.shape[self.dim]
        return whole if whole.shape[self.dim] == count else whole.narrow(self.dim, whole.shape[self.dim] - count, count)
