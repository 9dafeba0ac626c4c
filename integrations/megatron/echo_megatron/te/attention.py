"""DotProductAttention: one fused kernel forward and backward, or one of four ways to share a sequence among ranks."""

from __future__ import annotations

import torch
from torch import nn

from echo_megatron.te import context_parallel, kernels


class Shape:
    """Where the sequence is in query, key and value, and how long one sequence counts.

    ``packed``: many sequences in one row ("thd"); their lengths are on the device, so the longest counts for all.
    """

    def __init__(self, layout: str, longest_q: int | None = None, longest_kv: int | None = None):
        self.layout = layout
        self.packed = layout == "thd"
        self.dim = {"sbhd": 0, "bshd": 1, "thd": 0}[layout]
        self._longest = longest_q, longest_kv

    def lengths(self, query, key) -> tuple[int, int]:
        """Queries and keys of one sequence."""
        q, kv = self._longest
        return int(q or query.shape[self.dim]), int(kv or key.shape[self.dim])


def attend(query, key, value, shape: Shape, causal: bool, window: int | None):
    """(output, log-sum-exp) of the fused kernel. A window narrower than the sequence bounds what is computed."""
    queries, keys = shape.lengths(query, key)
    if window is not None and window < keys:
        keys, causal = window, False
    return kernels.attention(query, key, value, queries, keys, causal)


def attend_backward(grad, query, key, value, out, sums, shape: Shape, causal: bool, window: int | None):
    queries, keys = shape.lengths(query, key)
    if window is not None and window < keys:
        keys, causal = window, False
    return kernels.attention_backward(grad, query, key, value, out, sums, queries, keys, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, shape, causal, window):
        out, sums = attend(query, key, value, shape, causal, window)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.arguments = shape, causal, window
        return out

    @staticmethod
    def backward(ctx, grad):
        return *attend_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.arguments), None, None, None


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        **_,
    ):
        super().__init__()
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        self.layer_number = layer_number
        self.softmax_type = softmax_type
        self.return_max_logit = return_max_logit
        self.softmax_scale = softmax_scale
        self.softmax_offset = None
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, device=torch.cuda.current_device()))
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p") -> None:
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        **_,
    ):
        layout = qkv_format or self.qkv_format
        mask = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        causal = "causal" in mask
        window = window_size if window_size is not None else self.window_size
        width = window[0] + 1 if window is not None and window[0] >= 0 else None
        shape = Shape(layout, max_seqlen_q, max_seqlen_kv)
        if self.cp_group is None or context_parallel.ranks(self.cp_group) == 1:
            out = _Attention.apply(query_layer, key_layer, value_layer, shape, causal, width)
        else:
            out = context_parallel.attention(
                query_layer,
                key_layer,
                value_layer,
                shape,
                causal,
                width,
                self.cp_group,
                self.cp_stream,
                self.cp_comm_type,
            )
        out = out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1])
        if not self.return_max_logit:
            return out
        return out, torch.zeros(query_layer.shape[-2], dtype=torch.float32, device=out.device)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        pass
