"""The class of an operation by its name: ATen's where ops were recorded, the kernel's where they really ran."""

from __future__ import annotations

import re

ATTENTION = "attention"
MATRIX = "matrix product"
ON_DEVICE = "copies and casts on the device"
OTHER = "elementwise and other"

_ATEN = re.compile(r"\w+\.\w+(\.\w+)?")  # namespace, name, overload

_OPS = (
    (ATTENTION, re.compile(r"scaled_dot_product|flash_att|efficient_attention|attention")),
    ("optimizer (fused, foreach)", re.compile(r"_fused_adam|_fused_sgd|_fused_adagrad|_foreach_|multi_tensor")),
    ("normalisation", re.compile(r"layer_norm|rms_?norm|batch_norm|group_norm")),
    ("convolution", re.compile(r"convolution|\bconv\d")),
    (MATRIX, re.compile(r"\b(mm|addmm|bmm|baddbmm|matmul|linear|dot|addmv|mv)\b|_(scaled|grouped)_mm|gemm")),
    ("softmax and loss", re.compile(r"softmax|nll_loss|cross_entropy|mse_loss")),
    ("embedding and indexing", re.compile(r"embedding|index|gather|scatter|masked")),
    (ON_DEVICE, re.compile(r"_to_copy|copy_|clone|\bcat\b|contiguous|\bfill_|zero_|zeros|ones")),
    ("reductions", re.compile(r"vector_norm|\b(sum|mean|norm|amax|amin|max|min|argmax|topk|sort|cumsum)\b")),
)

# Attention before matrix products and convolutions, whose words its kernels have too (fprop, wgmma). cuDNN's and
# CUTLASS's convolutions are named after the three passes, cuBLAS's products nvjet, gemm, gemv or after a tile (s16816).
_KERNELS = (
    (ATTENTION, r"sdpa|flash|fmha|attention|attn|compute_dot_do_o|convert_dq"),
    ("optimizer (fused, foreach)", r"multi_tensor|FusedOptimizer|FusedAdam"),
    ("convolution", r"convolve|conv_?[123]?d|winograd|implicit_|_(fprop|dgrad|wgrad)_"),
    (MATRIX, r"nvjet|gemm|gemv|cublas|cutlass|xmma|splitKreduce|Cijk_|s16816|s1688"),
    ("normalisation", r"layer_?norm|rms_?norm|batch_?norm|group_?norm|GammaBeta"),
    ("softmax and loss", r"softmax|nll_loss|cross_?entropy|mse_"),
    ("embedding and indexing", r"embedding|index|gather|scatter|masked|compute_grad_weight"),
    (ON_DEVICE, r"copy_kernel|CatArray|chunk_cat|copy_out|FillFunctor|Memcpy|Memset"),
    ("reductions", r"reduce|reduction|radix_?sort|bitonic|topk|scan"),
)
_KERNEL_PATTERNS = tuple((label, re.compile(pattern, re.IGNORECASE)) for label, pattern in _KERNELS)


def op_class(name: str) -> str:
    """The class of a compute op: "aten.mm.default" and "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT" are both a
    "matrix product"."""
    for label, pattern in _OPS if _ATEN.fullmatch(name) else _KERNEL_PATTERNS:
        if pattern.search(name):
            return label
    return OTHER


def crosses(copy: str) -> bool:
    """Whether a copy, by its name, is between host and device; profilers name those on the device alone."""
    return not re.search(r"DtoD|Device -> Device", copy)
