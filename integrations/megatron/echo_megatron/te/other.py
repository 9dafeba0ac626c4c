"""Names that scripts import and seldom call."""

from __future__ import annotations

import contextlib

import torch

from echo_megatron.te.products import mm


def general_gemm(A, B, workspace=None, out_dtype=None, layout="TN", out=None, bias=None, grad=False, **_):
    """[product, gradient of the bias, ...] of B and A as cuBLAS has them (column-major): "TN" is B A^T."""
    a = A.t() if layout[0] == "T" else A
    b = B.t() if layout[1] == "T" else B
    rows = b.reshape(-1, b.shape[-1])
    dtype = out_dtype or A.dtype
    product = mm(rows, a, A.dtype, bias).view(*b.shape[:-1], a.shape[-1])
    return [product if product.dtype == dtype else product.to(dtype), None, None, None]


def get_cpu_offload_context(
    enabled=False,
    num_layers=1,
    model_layers=1,
    offload_activations=True,
    offload_weights=False,
    double_buffering=False,
    *_,
):
    """(context, function called after each layer). Offloading itself is not simulated."""
    if enabled:
        raise NotImplementedError("offloading of activations to the host (cpu_offloading) is not simulated")
    return contextlib.nullcontext(), lambda tensor: tensor


def mark_activation_offload(*_tensors) -> None:
    pass


def make_graphed_callables(modules, *_, **__):
    """CUDA graphs replay the same kernels: the modules as they are."""
    return modules


def make_weak_ref(x):
    return x


def cast_master_weights_to_fp8(*_, **__):
    raise NotImplementedError("weights kept in 8 bits (--fp8-param-gather) are not simulated")


post_all_gather_processing = replace_raw_data = cast_to_fp8 = cast_master_weights_to_fp8


class _DType:
    """``transformer_engine_torch.DType``: names only."""

    kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kByte, kInt32, kInt64 = range(8)


DType = _DType
TE_DType = {
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.int64: DType.kInt64,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}


def thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank):
    """Places of a rank's two chunks of each sequence, [total_tokens / cp_size]."""
    chunk = total_tokens // (2 * cp_size)
    first = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk, dtype=torch.int32)
    last = torch.arange((2 * cp_size - 1 - cp_rank) * chunk, (2 * cp_size - cp_rank) * chunk, dtype=torch.int32)
    return torch.cat((first, last)).to(cu_seqlens.device)
