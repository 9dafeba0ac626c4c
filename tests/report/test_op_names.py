"""Classes of operations by ATen names and by kernel names, those of kernels as an H200's profiler gave them."""

from __future__ import annotations

import pytest

from echo_hooks.report.op_names import crosses, op_class

NATIVE = "void at::native::"


@pytest.mark.parametrize(
    ("aten", "kernel", "label"),
    [
        ("aten.mm.default", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix product"),
        ("aten.bmm.default", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt", "matrix product"),
        (
            "aten._scaled_dot_product_cudnn_attention.default",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
            "attention",
        ),
        (
            "aten._flash_attention_backward.default",
            "void cudnn::fusion::compute_dot_do_o_specialized<true>",
            "attention",
        ),
        (
            "aten._fused_adamw_.default",
            f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
            "optimizer (fused, foreach)",
        ),
        ("aten.native_layer_norm.default", f"{NATIVE}vectorized_layer_norm_kernel<c10::BFloat16>", "normalisation"),
        ("aten.native_layer_norm_backward.default", f"{NATIVE}GammaBetaBackwardCUDAKernelTemplate", "normalisation"),
        ("aten._softmax.default", "void (anonymous namespace)::softmax_warp_forward<float>", "softmax and loss"),
        ("aten._log_softmax.default", f"{NATIVE}cunn_SoftMaxForward<4, LogSoftMaxForward>", "softmax and loss"),
        ("aten.embedding.default", f"{NATIVE}vectorized_gather_kernel<16, long>", "embedding and indexing"),
        ("aten.masked_fill.Scalar", f"{NATIVE}gpu_kernel_impl_nocast<masked_fill_kernel>", "embedding and indexing"),
        ("aten._to_copy.default", f"{NATIVE}bfloat16_copy_kernel_cuda", "copies and casts on the device"),
        ("aten.cat.default", f"{NATIVE}CatArrayBatchedCopy<OpaqueType<2u>>", "copies and casts on the device"),
        ("aten.zero_.default", "Memset (Device)", "copies and casts on the device"),
        ("aten.sum.dim_IntList", f"{NATIVE}reduce_kernel<512, 1, ReduceOp<float>>", "reductions"),
        ("aten.convolution.default", "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc", "convolution"),
        (
            "aten.add.Tensor",
            f"{NATIVE}vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
            "elementwise and other",
        ),
    ],
)
def test_both_names_of_an_operation_are_of_one_class(aten, kernel, label):
    assert op_class(aten) == label
    assert op_class(kernel) == label


def test_compiled_kernels_are_what_they_fuse():
    assert op_class("triton_per_fused_native_layer_norm_add_0") == "normalisation"
    assert op_class("triton_poi_fused_gelu_1") == "elementwise and other"


def test_copies_on_the_device_do_not_cross():
    assert crosses("Memcpy HtoD (Pinned -> Device)") and crosses("aten.copy_.default")
    assert not crosses("Memcpy DtoD (Device -> Device)")


@pytest.mark.parametrize(
    ("op", "label"),
    [
        ("aten.mm.default", "matrix product"),
        ("aten.addmm.default", "matrix product"),
        ("aten._scaled_mm.default", "matrix product"),
        ("aten._scaled_dot_product_flash_attention_backward.default", "attention"),
        ("aten._fused_adamw_.default", "optimizer (fused, foreach)"),
        ("aten.native_layer_norm.default", "normalisation"),
        ("aten._log_softmax.default", "softmax and loss"),
        ("aten.embedding_dense_backward.default", "embedding and indexing"),
        ("aten.convolution_backward.default", "convolution"),
        ("prims.convert_element_type.default", "elementwise and other"),
        ("aten._to_copy.default", "copies and casts on the device"),
        ("aten.add.Tensor", "elementwise and other"),
        ("aten.sum.dim_IntList", "reductions"),
    ],
)
def test_classes_of_aten_ops(op, label):
    assert op_class(op) == label
