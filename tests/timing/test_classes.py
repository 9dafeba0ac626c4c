"""The registry against PyTorch's own op list and against the ops of real traces."""

import pytest

from echo_hooks.hardware.accelerator import EFFICIENCY
from echo_hooks.timing.classes import _OPS, op_class

# Leaf ATen ops with kernels in Kineto traces of DDP, FSDP2 with tensor parallelism and Megatron-core, and some more.
SEEN = """
_chunk_cat _cudnn_attention_backward _cudnn_attention_forward _foreach_add_ _foreach_addcdiv_ _foreach_addcmul_
_foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_norm _foreach_sqrt _fused_adamw_ _index_put_impl_
_local_scalar_dense _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data add add_ addcdiv_
addcmul_ arange baddbmm bmm cat clamp copy_ div div_ embedding_dense_backward eq exp fill_ gather ge gelu
gelu_backward index le lerp_ linalg_vector_norm log lt masked_fill_ max mean mm mul mul_ native_layer_norm
native_layer_norm_backward nll_loss_backward nll_loss_forward pow reciprocal sqrt sub sub_ sum zero_
native_dropout native_dropout_backward scatter_ scatter_add_ topk sort index_add_ index_select split_with_sizes_copy
"""


@pytest.mark.parametrize("name", SEEN.split())
def test_ops_of_real_traces_have_a_class(name):
    assert op_class(f"aten.{name}.default") is not None


def test_fsdp_ops_have_a_class():
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        assert op_class(f"fsdp.{name}.default").name == "concatenate"


def test_every_class_has_an_efficiency():
    assert {c.name for c in _OPS.values()} <= set(EFFICIENCY)


def test_unknown_ops_have_none():
    for name in ("mylib.my_op.default", "aten.no_such_op.default", "", "aten", "aten..", "gelu_gelu_backward"):
        assert op_class(name) is None


def test_variants_share_the_class():
    assert op_class("aten.add_.Tensor") is op_class("aten.add.Tensor") is op_class("aten.add.out")
    assert op_class("aten._fused_adamw_.tensor_lr").name == "optimizer"
    assert op_class("aten.gelu_backward.default").name == "activation"
    assert op_class("aten.sigmoid_backward.default").name == "elementwise"
    assert op_class("aten.special_erfcx.default").name == "elementwise"
    assert op_class("aten.native_layer_norm_backward.default").name == "norm_backward"


def aten_bases(torch, keep=lambda overload: True) -> set[str]:
    """Base names of the ATen ops that the installed torch has."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            if keep(getattr(getattr(torch.ops.aten, base), overload or "default")):
                found.add(base)
    return found


def test_every_pointwise_op_of_torch_has_a_class():
    torch = pytest.importorskip("torch")
    pointwise = aten_bases(torch, lambda overload: torch.Tag.pointwise in overload.tags)
    assert len(pointwise) > 200
    missing = sorted(name for name in pointwise if op_class(f"aten.{name}.default") is None)
    assert missing == []


def test_the_registry_names_real_ops():
    torch = pytest.importorskip("torch")
    real = {name.rstrip("_") if not name.startswith("__") else name for name in aten_bases(torch)}
    echo_names = {"copy_host_to_device", "copy_device_to_host"}
    elsewhere = {"all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "convert_element_type"}  # fsdp, prims
    fused = {"_fused_lamb", "quantize_groups", "dequantize_groups", "quantize_swizzled", "quantized_sum"}  # DeepSpeed's
    fused |= {"quantize", "gated_activation", "gated_activation_backward", "activation", "activation_backward"}
    fused |= {"softmax_statistics", "cross_entropy", "scale_rows", "rotary_embedding", "move_rows", "row_map"}
    fused |= {"update_scales", "scaled_dot_product_attention_backward"}  # Transformer Engine's
    unknown = {n for n in _OPS if n.removesuffix("_out") not in real} - echo_names - elsewhere - fused
    # Ops of other versions of torch (2.9 to 2.14) may be absent here.
    assert sorted(unknown) == []
