"""The registry of operation classes: which cost formula an ATen op takes, and what its signature does not tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

from echo_hooks.graph.ops import OpSignature, TensorMeta, itemsize

PRODUCTS = ("gemm", "attention_forward", "attention_backward")
"""The classes made of matrix products."""


@dataclass(frozen=True)
class OpClass:
    """``name``: a key of Accelerator.efficiency ("elementwise" is refined by dtypes and layout, see roofline.py).

    ``kernels``: how many the op launches, one after the other. ``traffic``: bytes it moves where these are not the
    signature's ``bytes_read + bytes_written``.
    """

    name: str
    kernels: int = 1
    traffic: Callable[[OpSignature], int] | None = None


def op_class(op: str) -> OpClass | None:
    """Class of an op by its full name ("aten.add_.Tensor"), None for one the registry does not know.

    Overloads, in-place and out= variants cost what the plain op costs.
    """
    return _by_base(base_name(op))


def base_name(op: str) -> str:
    """ "aten.add_.Tensor" gives "add_"; a name of another namespace stays whole, so that it matches nothing."""
    parts = op.split(".")
    return parts[1] if parts[0] in ("aten", "fsdp", "fused", "prims") and len(parts) > 1 else op


@cache
def _by_base(base: str) -> OpClass | None:
    plain = base if base.startswith("__") else base.rstrip("_")
    for name in (plain, plain.removesuffix("_out")):
        if name in _OPS:
            return _OPS[name]
    if plain.startswith(("_foreach_", "_fused_adam", "_fused_lion", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")):
        return OpClass("optimizer")
    if plain.startswith("special_"):
        return OpClass("elementwise")
    # A pointwise function's backward is pointwise; the others are in the registry under their own name.
    forward = _OPS.get(plain.removesuffix("_backward"))
    return forward if forward is not None and forward.name in ("elementwise", "activation", "random") else None


def tensor_bytes(meta: TensorMeta) -> int:
    """Bytes of all elements."""
    return itemsize(meta.dtype) * elements(meta)


def elements(meta: TensorMeta) -> int:
    """Product of the shape."""
    return prod(meta.shape)


def _written(signature: OpSignature) -> int:
    return signature.bytes_written


def _targets(signature: OpSignature) -> int:
    """nll_loss looks up one log-probability per row: a memory sector of 32 bytes, and its target."""
    return sum(40 * meta.shape[0] for meta in signature.inputs[:1] if meta.shape)


def _as_float32(signature: OpSignature) -> int:
    """Softmax computes in float32 whatever it reads, and is bound by that: each output element counts 8 bytes."""
    return sum(8 * elements(t) for t in signature.outputs[:1])


def _slices_four_times(signature: OpSignature) -> int:
    """topk and kthvalue: radix selection reads its input once per 8 bits of a 32-bit key (TensorTopK.cu)."""
    return 4 * signature.bytes_read + signature.bytes_written


def _radix_sort(signature: OpSignature) -> int:
    """A least-significant-digit radix sort reads and writes keys and 8-byte values once per 8 bits of the key (CUB)."""
    meta = max(signature.inputs, key=tensor_bytes, default=None)
    if meta is None:
        return signature.bytes_read + signature.bytes_written
    width = itemsize(meta.dtype)
    return 2 * width * elements(meta) * (width + 8)


def _family(opclass: OpClass, names: str) -> dict[str, OpClass]:
    return dict.fromkeys(names.split(), opclass)


_OPS: dict[str, OpClass] = {
    # Matrix products; formulas in matmul.py.
    **_family(
        OpClass("gemm"),
        "mm bmm addmm baddbmm addbmm linear matmul _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm"
        " _addmm_activation convolution _convolution cudnn_convolution convolution_overrideable",
    ),
    **_family(
        OpClass("gemm", kernels=2),
        "convolution_backward convolution_backward_overrideable linear_backward matmul_backward",
    ),
    # Attention. cuDNN's backward: dot(dO, O), the products, the conversion of dQ; flash and efficient alike.
    **_family(
        OpClass("attention_forward"),
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
        " _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward"
        " _scaled_dot_product_attention_math scaled_dot_product_attention",
    ),
    **_family(
        OpClass("attention_backward", kernels=3),
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward"
        " _flash_attention_backward _efficient_attention_backward _cudnn_attention_backward"
        " scaled_dot_product_attention_backward",
    ),
    # Fused kernels of frameworks, recorded where their package cannot run. Row by row, vectorised: as norms.
    **_family(
        OpClass("norm"),
        "quantize gated_activation gated_activation_backward activation activation_backward softmax_statistics"
        " cross_entropy scale_rows rotary_embedding",
    ),
    **_family(OpClass("concatenate"), "transpose"),
    **_family(OpClass("gather"), "move_rows"),
    **_family(OpClass("sort", kernels=3), "row_map"),
    **_family(OpClass("reduction"), "update_scales"),
    # Pointwise, one kernel each (the ops tagged pointwise in PyTorch, copies and casts).
    **_family(
        OpClass("elementwise"),
        "abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift"
        " bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone"
        " conj_physical _conj_physical contiguous copy copysign cos cosh deg2rad digamma div elu eq exp exp2"
        " expm1 float_power floor floor_divide fmax fmin fmod frac frexp gcd ge glu gt hardshrink hardsigmoid"
        " hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf lcm"
        " ldexp le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not"
        " logical_or logical_xor logit lt masked_fill maximum minimum mul multiply mvlgamma nan_to_num"
        " native_dropout_backward _masked_scale ne neg nextafter not_equal polygamma positive pow prelu"
        " _prelu_kernel rad2deg reciprocal relu relu6 remainder round rrelu rrelu_with_noise rsqrt rsub selu sgn"
        " sigmoid sign signbit sin sinc sinh softplus softshrink sqrt square sub subtract tan threshold _to_copy"
        " triu tril true_divide trunc where xlogy __ilshift__ __irshift__ __lshift__ __rshift__ __iand__ __ior__"
        " __ixor__ __and__ __or__ __xor__ mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"
        " binary_cross_entropy_with_logits _autocast_to_reduced_precision _autocast_to_full_precision flip roll"
        " repeat pixel_shuffle constant_pad_nd reflection_pad2d upsample_nearest2d upsample_bilinear2d"
        " convert_element_type expand_copy slice_backward"
        " select_backward diagonal_backward unfold_backward im2col col2im",
    ),
    # Pointwise with a polynomial per element: bound by arithmetic in 16-bit dtypes.
    **_family(OpClass("activation"), "gelu erf erfc erfinv tanh silu mish log_sigmoid_forward log_sigmoid"),
    # Rows.
    **_family(
        OpClass("norm"),
        "native_layer_norm layer_norm rms_norm _fused_rms_norm native_group_norm group_norm renorm _weight_norm"
        " _weight_norm_interface",
    ),
    **_family(OpClass("norm", kernels=2), "native_batch_norm _native_batch_norm_legit cudnn_batch_norm batch_norm"),
    # The parts of a synchronised batch norm, each a kernel of its own.
    **_family(
        OpClass("norm"),
        "batch_norm_stats batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts"
        " batch_norm_elemt",
    ),
    **_family(OpClass("norm_backward"), "batch_norm_backward_reduce batch_norm_backward_elemt"),
    **_family(
        OpClass("norm_backward", kernels=2),
        "native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward native_batch_norm_backward"
        " cudnn_batch_norm_backward _weight_norm_interface_backward",
    ),
    **_family(
        OpClass("softmax", traffic=_as_float32),
        "_softmax _log_softmax softmax log_softmax _safe_softmax _masked_softmax",
    ),
    **_family(
        OpClass("softmax_backward"), "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"
    ),
    **_family(
        OpClass("reduction"),
        "sum nansum mean prod max min amax amin aminmax argmax argmin any all count_nonzero norm"
        " linalg_vector_norm linalg__powsum frobenius_norm std std_mean var var_mean median nanmedian mode equal"
        " logsumexp histc mv addmv dot vdot avg_pool2d max_pool2d_with_indices adaptive_avg_pool2d _adaptive_avg_pool2d"
        " trace avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward",
    ),
    **_family(OpClass("reduction", kernels=2), "cumsum cumprod cummax cummin logcumsumexp"),
    # Loss of class indices. The backward fills its output with zeros, then scatters.
    **_family(OpClass("gather", traffic=_targets), "nll_loss_forward nll_loss2d_forward nll_loss nll_loss_nd"),
    **_family(OpClass("fill", kernels=2, traffic=_written), "nll_loss_backward nll_loss2d_backward"),
    # Rows picked and put by index.
    **_family(
        OpClass("gather"),
        "embedding gather index index_select take take_along_dim masked_select nonzero _unsafe_index embedding_bag"
        " _embedding_bag _embedding_bag_forward_only searchsorted bucketize one_hot",
    ),
    **_family(
        OpClass("scatter"),
        "scatter scatter_add scatter_reduce index_put _index_put_impl _unsafe_index_put index_add index_copy"
        " index_fill masked_scatter slice_scatter select_scatter index_reduce put",
    ),
    # Backward of embedding: zero fill, sort of the indices (one kernel per 8 bits), segments, sums (Embedding.cu).
    **_family(
        OpClass("scatter", kernels=16),
        "embedding_dense_backward embedding_backward _embedding_bag_dense_backward _embedding_bag_backward",
    ),
    **_family(OpClass("scatter", kernels=2), "bincount"),
    # Many tensors into one or one into many.
    **_family(
        OpClass("concatenate"),
        "cat stack _chunk_cat chunk_cat split_with_sizes_copy split_copy unbind_copy all_gather_copy_in block_diag",
    ),
    **_family(
        OpClass("fill"),
        "fill zero zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange linspace eye"
        " scalar_tensor tril_indices triu_indices logspace",
    ),
    **_family(
        OpClass("random"),
        "normal uniform random randn rand randint randn_like rand_like randint_like bernoulli native_dropout dropout"
        " _fused_dropout exponential geometric log_normal cauchy multinomial poisson",
    ),
    **_family(OpClass("sort", kernels=9, traffic=_radix_sort), "sort argsort msort unique_dim unique_consecutive"),
    **_family(OpClass("sort", kernels=12, traffic=_radix_sort), "_unique2 _unique randperm repeat_interleave"),
    **_family(OpClass("sort", kernels=3, traffic=_slices_four_times), "topk kthvalue"),
    # DeepSpeed's compiled ops: LAMB (update, two sums of norms, its application); values in groups that share a scale.
    **_family(OpClass("reduction", kernels=3), "_fused_lamb"),
    **_family(OpClass("norm"), "quantize_groups dequantize_groups quantize_swizzled quantized_sum"),
    # Multi-tensor kernels that unscale gradients and check them; the others match by prefix.
    **_family(OpClass("optimizer"), "_amp_update_scale"),
    **_family(
        OpClass("host_link"), "copy_host_to_device copy_device_to_host _local_scalar_dense _pin_memory pin_memory"
    ),
}
