"""Tokens in the order of their experts and back: one kernel each, after one that works out where each goes."""

from __future__ import annotations

import torch

from echo_megatron.te import kernels


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, routing_map, rows, probs):
        places = kernels.row_map(routing_map)
        out = kernels.move_rows(tokens, places, rows)
        ctx.save_for_backward(places)
        ctx.shape, ctx.probs_shape = tokens.shape, None if probs is None else probs.shape
        permuted = None if probs is None else probs.new_empty(rows)
        return out, places, permuted

    @staticmethod
    def backward(ctx, grad, _places, probs_grad):
        (places,) = ctx.saved_tensors
        back = kernels.move_rows(grad, places, ctx.shape[0])
        return (
            back,
            None,
            None,
            None if ctx.probs_shape is None else grad.new_empty(ctx.probs_shape, dtype=probs_grad.dtype),
        )


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, places, probs, rows):
        ctx.save_for_backward(*([places] if probs is None else [tokens, places, probs]))
        ctx.rows = tokens.shape[0]
        return kernels.move_rows(tokens, places, rows)

    @staticmethod
    def backward(ctx, grad):
        *_, places = ctx.saved_tensors[:2]
        probs_grad = None
        if len(ctx.saved_tensors) == 3:
            _, places, probs = ctx.saved_tensors
            probs_grad = torch.empty_like(probs)
        return kernels.move_rows(grad, places, ctx.rows), None, probs_grad, None


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    """(tokens by expert [num_out_tokens, hidden], where each came from)."""
    out, places, _ = _Permute.apply(inp, routing_map, _rows(inp, routing_map, num_out_tokens), None)
    return out, places


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    out, places, permuted = _Permute.apply(inp, routing_map, _rows(inp, routing_map, num_out_tokens), probs)
    return out, permuted, places


def moe_permute_and_pad_with_probs(inp, probs, routing_map, tokens_per_expert, align_size):
    raise NotImplementedError("permutation with padding (moe_permute_and_pad_with_probs) is not simulated")


def moe_unpermute(
    inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None, pad_offsets=None
):
    """Tokens in their own order, each expert's result added up."""
    merging_probs = merging_probs if merging_probs is not None else probs
    rows = restore_shape[0] if restore_shape is not None else row_id_map.shape[0]
    return _Unpermute.apply(inp, row_id_map, merging_probs, rows)


class _Sort(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, probs):
        ctx.probs = probs is not None
        places = tokens.new_empty(tokens.shape[0], dtype=torch.int32)
        ctx.save_for_backward(places)
        return kernels.move_rows(tokens, places, tokens.shape[0]), None if probs is None else torch.empty_like(probs)

    @staticmethod
    def backward(ctx, grad, probs_grad):
        back = kernels.move_rows(grad, ctx.saved_tensors[0], grad.shape[0])
        return back, torch.empty_like(probs_grad) if ctx.probs else None


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    """Chunks of rows in another order."""
    return _Sort.apply(inp, None)[0]


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    return _Sort.apply(inp, probs)


def _rows(inp, routing_map, given: int) -> int:
    return int(given) if given is not None and given > 0 else int(routing_map.sum())
