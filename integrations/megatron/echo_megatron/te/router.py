"""Fused routing: choice of experts and their loss in one kernel each."""

from __future__ import annotations

import torch


def fused_topk_with_score_function(
    logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
):
    """(probabilities, routing map), both [tokens, experts]: the experts that topk of the scores gives."""
    scores = torch.sigmoid(logits) if score_function == "sigmoid" else torch.softmax(logits, dim=-1)
    chosen = torch.topk(scores, topk, dim=-1)
    probs = torch.zeros_like(logits).scatter(1, chosen.indices, chosen.values)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen.indices, True)


def fused_compute_score_for_moe_aux_loss(logits, topk, score_function):
    scores = torch.sigmoid(logits) if score_function == "sigmoid" else torch.softmax(logits, dim=-1)
    chosen = torch.topk(scores, topk, dim=-1)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen.indices, True), scores


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
    share = tokens_per_expert.to(probs.dtype)
    return (probs.sum(0) * share).sum() * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))
