"""The class of an operation by its name: ATen's where ops were recorded, the kernel's where they really ran."""

from __future__ import annotations

import re

from echo_hooks.timing.kernel_names import is_kernel, kernel_class

ATTENTION = "attention"
MATRIX = "matrix product"
ON_DEVICE = "copies and casts on the device"
OTHER = "elementwise and other"

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

_CLASSES = {
    "attention_forward": ATTENTION,
    "attention_backward": ATTENTION,
    "optimizer": "optimizer (fused, foreach)",
    "convolution": "convolution",
    "gemm": MATRIX,
    "norm": "normalisation",
    "norm_backward": "normalisation",
    "softmax": "softmax and loss",
    "softmax_backward": "softmax and loss",
    "scatter": "embedding and indexing",
    "gather": "embedding and indexing",
    "concatenate": ON_DEVICE,
    "fill": ON_DEVICE,
    "cast": ON_DEVICE,
    "sort": "reductions",
    "reduction": "reductions",
}


def op_class(name: str) -> str:
    """The class of a compute op: "aten.mm.default" and "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT" are both a
    "matrix product"."""
    if is_kernel(name):
        return _CLASSES.get(kernel_class(name), OTHER)
    return next((label for label, pattern in _OPS if pattern.search(name)), OTHER)


def crosses(copy: str) -> bool:
    """Whether a copy, by its name, is between host and device; profilers name those on the device alone."""
    return not re.search(r"DtoD|Device -> Device", copy)
