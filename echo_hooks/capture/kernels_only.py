"""Metadata of ops that torch describes by their kernels alone: no meta kernel, no decomposition.

Shapes and dtypes as in aten/src/ATen/native/cuda/Normalization.cu (synchronised batch norm) and RNN.cu (GRU cell).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

FALLBACK_MAX_ELEMENTS = 1 << 24
"""An op with a CPU kernel alone runs once on zeros of its arguments' shapes; beyond so many elements it is refused."""


def rule(func: Any) -> Callable | None:
    """What gives the outputs of ``func`` from fake arguments, None where torch knows."""
    return _RULES.get(func)


def run_on_cpu(fake_mode: FakeTensorMode, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Outputs of an op that FakeTensor refuses, as its CPU kernel gives them for zeros, on the arguments' device.

    Raises NotImplementedError where there is no such kernel either.
    """
    device: list[torch.device] = []
    originals: dict[int, FakeTensor] = {}

    def zeros(fake: FakeTensor) -> torch.Tensor:
        if fake.numel() > FALLBACK_MAX_ELEMENTS:
            raise NotImplementedError(f"{func} on {fake.numel()} elements: its result's shape is not known to torch")
        device.append(fake.device)
        extent = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride())) if fake.numel() else 0
        real = torch.zeros(extent, dtype=fake.dtype, device="cpu").as_strided(fake.shape, fake.stride())
        originals[id(real)] = fake
        return real

    def fake(real: torch.Tensor) -> torch.Tensor:
        known = originals.get(id(real))
        if known is not None:
            return known
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return FakeTensor(fake_mode, meta, device[0] if device else torch.device("cpu"))

    args, kwargs = tree_map_only(FakeTensor, zeros, (args, kwargs))
    return tree_map_only(torch.Tensor, fake, func(*args, **kwargs))


# ---- rules ----


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """Statistics of half precision are kept in single."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _per_channel(input: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    size, dtype = (input.shape[1],), _accumulated(input.dtype)
    return tuple(input.new_empty(size, dtype=dtype) for _ in range(count))


def _backward_reduce(_grad, input, mean, _invstd, weight, input_g, weight_g, bias_g):
    like = mean if weight is None else weight
    return (
        torch.empty_like(mean) if input_g else None,
        torch.empty_like(mean) if input_g else None,
        torch.empty_like(like) if weight_g else None,
        torch.empty_like(like) if bias_g else None,
    )


def _gru_cell(_input_gates, _hidden_gates, hidden, *_biases):
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], hidden.shape[1] * 5))


def _gru_cell_backward(grad, _workspace, has_bias):
    gates = [grad.new_empty((grad.shape[0], grad.shape[1] * 3)) for _ in range(2)]
    biases = [grad.new_empty((grad.shape[1] * 3,)) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


_RULES: dict[Any, Callable] = {
    aten.batch_norm_stats.default: lambda input, _eps: _per_channel(input, 2),
    aten.batch_norm_update_stats.default: lambda input, *_: _per_channel(input, 2),
    aten.batch_norm_gather_stats.default: lambda input, *_: _per_channel(input, 2),
    aten.batch_norm_gather_stats_with_counts.default: lambda input, *_: _per_channel(input, 2),
    aten.batch_norm_elemt.default: lambda input, *_: torch.empty_like(input),
    aten.batch_norm_backward_reduce.default: _backward_reduce,
    aten.batch_norm_backward_elemt.default: lambda _grad, input, *_: torch.empty_like(input),
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
