"""What a CUDA kernel does, as far as its name and its duration tell: for operations that really ran, whose kernels are
known and whose tensors are not."""

from __future__ import annotations

import re
from functools import cache

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import op_class
from echo_hooks.timing.roofline import estimate

_ATEN = re.compile(r"\w+\.\w+(\.\w+)?")  # namespace, name, overload

# Attention before matrix products and convolutions, whose words its kernels have too (fprop, wgmma). cuDNN's and
# CUTLASS's convolutions are named after the three passes, cuBLAS's products nvjet, gemm, gemv or after a tile (s16816).
# Backward kernels before the forward ones of their family. Second: the class in the registry of operations.
_PATTERNS = (
    (r"Memcpy (HtoD|DtoH)", "host_link"),
    (r"(sdpa|flash|fmha|attention|attn).*(bprop|bwd|backward)|compute_dot_do_o|convert_dq", "attention_backward"),
    (r"sdpa|flash|fmha|attention|attn", "attention_forward"),
    (r"multi_tensor|FusedOptimizer|FusedAdam", "optimizer"),
    (r"convolve|conv_?[123]?d|winograd|implicit_|_(fprop|dgrad|wgrad)_", "convolution"),
    (r"nvjet|gemm|gemv|cublas|cutlass|xmma|splitKreduce|Cijk_|s16816|s1688", "gemm"),
    (r"(layer_?norm|rms_?norm|batch_?norm|group_?norm).*(grad|backward|bwd)|GammaBeta", "norm_backward"),
    (r"layer_?norm|rms_?norm|batch_?norm|group_?norm", "norm"),
    (r"softmax.*backward|nll_loss_backward|cross_?entropy.*backward", "softmax_backward"),
    (r"softmax|nll_loss|cross_?entropy|mse_", "softmax"),
    (r"embedding.*backward|compute_grad_weight|sum_and_scatter|krn_partial|scatter|index_(put|add)", "scatter"),
    (r"embedding|index|gather|masked", "gather"),
    (r"CatArray|chunk_cat|split_with_sizes", "concatenate"),
    (r"FillFunctor|Memset", "fill"),
    (r"bfloat16_copy|float16_copy|direct_copy|copy_kernel|Memcpy", "cast"),
    (r"radix_?sort|bitonic|topk|sort", "sort"),
    (r"reduce|reduction|scan", "reduction"),
    (r"distribution_|philox|random|dropout", "random"),
    (r"gelu|silu|sigmoid|tanh", "activation"),
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), name) for pattern, name in _PATTERNS)


def is_kernel(name: str) -> bool:
    """Whether an operation's name is a kernel's, not that of an op ("aten.mm.default") or of Echo's own."""
    return not _ATEN.fullmatch(name) and op_class(name) is None


@cache
def kernel_class(name: str) -> str:
    """A key of Accelerator.efficiency, or "convolution"; "elementwise" for what nothing in the name tells."""
    return next((label for pattern, label in _COMPILED if pattern.search(name)), "elementwise")


# An op of each class, and the share of its bytes that it writes.
_OPS = {
    "host_link": ("copy_host_to_device", 1.0),
    "optimizer": ("aten._fused_adamw_.default", 0.43),  # reads four lists, writes three
    "norm_backward": ("aten.native_layer_norm_backward.default", 0.33),
    "norm": ("aten.native_layer_norm.default", 0.5),
    "softmax_backward": ("aten._softmax_backward_data.default", 0.33),
    "softmax": ("aten._softmax.default", 0.5),
    "scatter": ("aten.embedding_dense_backward.default", 0.5),
    "gather": ("aten.embedding.default", 0.5),
    "concatenate": ("aten.cat.default", 0.5),
    "fill": ("aten.fill_.Scalar", 1.0),
    "cast": ("aten._to_copy.default", 0.5),
    "sort": ("aten.sort.default", 0.5),
    "reduction": ("aten.sum.dim_IntList", 0.0),
    "random": ("aten.normal_.default", 1.0),
    "activation": ("aten.gelu.default", 0.5),
    "elementwise": ("aten.add.Tensor", 0.33),
}
_HEAD = 128  # size of an attention's head
_SEQUENCE = 2048


def likely_op(kernel: str, run_us: float, accelerator: Accelerator) -> OpSignature:
    """An operation of the kernel's class that takes about ``run_us`` alone by the roofline.

    Products are taken as square ones in bfloat16, attention as causal over sequences of 2,048 with heads of 128.
    """
    name = kernel_class(kernel)
    make = _product if name in ("gemm", "convolution") else _attention if name.startswith("attention") else _moves
    scale = 1.0
    found = make(name, scale)
    for _ in range(_ROUNDS):
        scale *= run_us / max(estimate(found, accelerator).duration_us, 1e-3)
        found = make(name, scale)
    return found


_ROUNDS = 5
"""What a kernel takes grows a little slower than its work, so that each round brings the estimate closer."""


def _product(_: str, scale: float) -> OpSignature:
    """A square product of ``scale`` times 4,096 x 4,096 x 4,096."""
    n = max(round(4096 * scale ** (1 / 3)), 1)
    matrix = TensorMeta((n, n), "bfloat16")
    return OpSignature(
        "aten.mm.default",
        inputs=(matrix, matrix),
        outputs=(matrix,),
        flops=2 * n**3,
        bytes_read=4 * n * n,
        bytes_written=2 * n * n,
    )


def _attention(name: str, scale: float) -> OpSignature:
    """Attention of ``scale`` times 64 heads."""
    backward = name == "attention_backward"
    heads = max(round(64 * scale), 1)
    query = TensorMeta((1, heads, _SEQUENCE, _HEAD), "bfloat16")
    size = 2 * heads * _SEQUENCE * _HEAD
    return OpSignature(
        f"aten._scaled_dot_product_cudnn_attention{'_backward' if backward else ''}.default",
        inputs=(query,) * (4 if backward else 3),
        outputs=(query,) * (3 if backward else 1),
        flops=2 * (5 if backward else 2) * _SEQUENCE * _SEQUENCE * _HEAD * heads,
        bytes_read=size * (5 if backward else 3),
        bytes_written=size * (3 if backward else 1),
        attrs=(("causal", 1),),
    )


def _moves(name: str, scale: float) -> OpSignature:
    """An operation that moves ``scale`` times 64 MiB."""
    op, written = _OPS[name]
    bytes = scale * (64 << 20)
    elements = max(int(bytes * max(written, 1 - written)) // 2, 1)
    output = TensorMeta((elements,), "float32" if name == "cast" else "bfloat16")
    return OpSignature(
        op,
        inputs=(TensorMeta((elements,), "bfloat16"),),
        outputs=(output,),
        bytes_read=int(bytes * (1 - written)),
        bytes_written=int(bytes * written),
    )
