"""Rotary position embeddings in one kernel."""

from __future__ import annotations

import torch

from echo_megatron.te import kernels


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, angles):
        ctx.save_for_backward(angles)
        return kernels.rotary_embedding(x, angles)

    @staticmethod
    def backward(ctx, grad):
        return kernels.rotary_embedding(grad, ctx.saved_tensors[0]), None


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=False, fused=False, *_, **__):
    """``t`` with its last dimension (or the part that ``freqs`` covers) rotated."""
    return _Rotary.apply(t, freqs)


def apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, qkv_split_arg_list, *_, **__):
    """Query and key of [sequence, batch, groups, sum of the split] rotated, the value split off."""
    q, k, v = torch.split(qkv, list(qkv_split_arg_list), dim=3)
    heads = qkv_split_arg_list[0] // qkv_split_arg_list[1]
    q = q.reshape(*q.shape[:2], q.shape[2] * heads, -1)
    return _Rotary.apply(q, q_freqs), _Rotary.apply(k.contiguous(), k_freqs), v.contiguous()


class _SplitAlongDim(torch.autograd.Function):
    """Split without copies; the gradients are put together again with one."""

    @staticmethod
    def forward(ctx, mixed, split_dim, sizes, squeeze=False):
        ctx.dim, ctx.squeeze = split_dim, squeeze
        parts = torch.split(mixed, sizes if isinstance(sizes, int) else list(sizes), dim=split_dim)
        return tuple(p.squeeze(split_dim) for p in parts) if squeeze else tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        grads = [g.unsqueeze(ctx.dim) if ctx.squeeze else g for g in grads]
        return torch.cat(grads, dim=ctx.dim), None, None, None
