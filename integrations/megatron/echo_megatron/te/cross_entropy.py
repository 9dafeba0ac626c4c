"""Cross entropy over a vocabulary that is cut among ranks: one gather of three numbers a token."""

from __future__ import annotations

import torch
import torch.distributed as dist

from echo_megatron.te import kernels
from echo_megatron.te.communication import size_of


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, reduce_loss, group):
        statistics = kernels.softmax_statistics(logits, targets)
        size = size_of(group)
        if size > 1:
            gathered = statistics.new_empty(size * statistics.numel())
            dist.all_gather_into_tensor(gathered, statistics, group=group)
            statistics = gathered
        losses = kernels.cross_entropy_(logits, targets, statistics)
        ctx.save_for_backward(logits.detach())
        return losses.sum() / targets.numel() if reduce_loss else losses.view(targets.shape)

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return kernels.scale_rows_(gradient, grad), None, None, None


def parallel_cross_entropy(
    inp, target, label_smoothing=0.0, reduce_loss=False, dist_process_group=None, ignore_idx=-100, *_, **__
):
    """Loss [sequence, batch] of logits [sequence, batch, vocabulary / ranks], or its mean."""
    return _CrossEntropy.apply(inp, target, reduce_loss, dist_process_group)
