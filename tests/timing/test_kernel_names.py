"""What kernels' names tell, names as an H200's profiler gave them; and operations that would take as long."""

from __future__ import annotations

import pytest

from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.timing import estimate
from echo_hooks.timing.classes import op_class
from echo_hooks.timing.kernel_names import is_kernel, kernel_class, likely_op

H200 = load_accelerator("h200-sxm")
NATIVE = "void at::native::(anonymous namespace)::"
KERNELS = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "attention_forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1": "attention_backward",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)": "attention_backward",
    f"{NATIVE}vectorized_layer_norm_kernel<c10::BFloat16, float, false>": "norm",
    f"{NATIVE}layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, false>": "norm_backward",
    f"{NATIVE}cunn_SoftMaxForward<4, float, float, float>": "softmax",
    f"{NATIVE}cunn_SoftMaxBackward<4, float, float, float>": "softmax_backward",
    f"{NATIVE}multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>": "optimizer",
    f"{NATIVE}embedding_backward_feature_kernel<c10::BFloat16, float, long>": "scatter",
    f"{NATIVE}CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>": "concatenate",
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(at::Tensor": "activation",
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIt": "cast",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>": "reduction",
    "Memset (Device)": "fill",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_classes_by_name(name, kind):
    assert is_kernel(name) and kernel_class(name) == kind


def test_ops_are_no_kernels():
    assert not is_kernel("aten.mm.default") and not is_kernel("fsdp.all_gather_copy_in.default")


@pytest.mark.parametrize("run_us", [40.0, 300.0])
@pytest.mark.parametrize("name", KERNELS)
def test_a_likely_operation_takes_as_long(name, run_us):
    likely = likely_op(name, run_us, H200)
    step = 0.25 if kernel_class(name).startswith("attention") else 0.15  # whole heads, whole waves of tiles
    assert estimate(likely, H200).duration_us == pytest.approx(run_us, rel=step)
    assert op_class(likely.name).name in (kernel_class(name), "elementwise")


def test_copies_over_the_link_of_the_host_are_no_work_of_the_device():
    assert likely_op("Memcpy HtoD (Pinned -> Device)", 100.0, H200).name == "copy_host_to_device"


def test_a_product_of_a_known_time():
    """0.807 of 989.4 TFLOP/s (bench/calibrate_roofline.py) for 200 us less the ramp's 0.89 and the launch's."""
    likely = likely_op("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", 200.0, H200)
    n, busy_us = likely.inputs[0].shape[0], 200.0 - 0.89 - H200.launch_overhead_us
    assert n == pytest.approx((busy_us / 1e6 * 0.807 * 989.4e12 / 2) ** (1 / 3), rel=0.06)
    assert likely.flops == 2 * n**3 and likely.bytes_written == 2 * n * n
