"""Durations against values worked out by hand on a device of round numbers."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hooks.graph.ops import OpSignature, TensorMeta, itemsize
from echo_hooks.hardware.accelerator import EFFICIENCY, accelerator_names, load_accelerator
from echo_hooks.timing import estimate
from echo_hooks.timing.classes import op_class, tensor_bytes
from echo_hooks.timing.matmul import Gemm, gemm_compute_us, gemms, peak_rate
from echo_hooks.timing.roofline import efficiency_class, multi_tensor_launches

# 100 multiprocessors, 1e14 FLOP/s (1e6 per multiprocessor and us), 1 TB/s (1e6 bytes per us), 10 GB/s to the host,
# all shares 1/2, 2 us between kernels and 1 us to fill and drain.
DEVICE = dataclasses.replace(
    load_accelerator("h100-sxm"),
    multiprocessors=100,
    memory_bandwidth_bytes_per_s=1e12,
    host_link_bandwidth_bytes_per_s=1e10,
    peak_flops={"bfloat16": 1e14, "float32": 1e13, "tf32": 5e13},
    special_function_ops_per_s=1e12,
    launch_overhead_us=2.0,
    efficiency={c: {key: 1.0 if key == "ramp" else 0.5 for key in keys} for c, keys in EFFICIENCY.items()},
)


def tensor(dtype: str, *shape: int, contiguous: bool = True) -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous)


def signature(name: str, inputs, outputs, flops: int = 0, **attrs) -> OpSignature:
    read, written = sum(map(tensor_bytes, inputs)), sum(map(tensor_bytes, outputs))
    return OpSignature(name, tuple(inputs), tuple(outputs), flops, read, written, tuple(attrs.items()))


def mm(m: int, n: int, k: int, dtype: str = "bfloat16", **attrs) -> OpSignature:
    operands = [tensor(dtype, m, k), tensor(dtype, k, n)]
    return signature("aten.mm.default", operands, [tensor(dtype, m, n)], 2 * m * n * k, **attrs)


def us(sig: OpSignature, device=DEVICE) -> float:
    found = estimate(sig, device)
    assert found.known, sig.name
    return found.duration_us


# ---- memory-bound ----


def test_pointwise():
    # reads and writes 4 MB each: 8e6 bytes at half of 1e6 bytes/us = 16 us, and 3 us for the kernel
    sig = signature("aten.relu.default", [tensor("float32", 1_000_000)], [tensor("float32", 1_000_000)])
    assert us(sig) == pytest.approx(19)


def test_nothing_to_move_costs_a_kernel():
    assert us(signature("aten.relu.default", [tensor("float32", 0)], [tensor("float32", 0)])) == pytest.approx(3)


def test_cast_counts_elements():
    # 1e6 elements as 8 bytes each: 16 us, though 6e6 bytes move
    sig = signature("aten._to_copy.default", [tensor("bfloat16", 1_000_000)], [tensor("float32", 1_000_000)])
    assert efficiency_class(op_class(sig.name), sig) == "cast"
    assert us(sig) == pytest.approx(19)


@pytest.mark.parametrize(
    ("inputs", "output", "name", "expected"),
    [
        ([tensor("float32", 8)], tensor("bfloat16", 8), "_to_copy.default", "elementwise"),  # a kernel of its own
        ([tensor("float32", 8)], tensor("float16", 8), "_to_copy.default", "elementwise"),
        ([tensor("bfloat16", 8), tensor("float32", 8)], tensor("bfloat16", 8), "copy_.default", "elementwise"),
        ([tensor("float32", 8), tensor("bfloat16", 8)], tensor("float32", 8), "copy_.default", "cast"),
        ([tensor("float32", 8), tensor("bfloat16", 8)], tensor("float32", 8), "add.Tensor", "cast"),
        ([tensor("float32", 8), tensor("float32")], tensor("float32", 8), "mul.Tensor", "elementwise"),  # 0-dim scale
        ([tensor("float32", 8, 4), tensor("float32", 4)], tensor("float32", 8, 4), "add.Tensor", "strided"),
        ([tensor("float32", 8, contiguous=False)], tensor("float32", 8), "clone.default", "strided"),
        ([tensor("float32", 8)], tensor("bool", 8), "gt.Scalar", "elementwise"),
        ([tensor("bfloat16", 8)], tensor("bfloat16", 8), "gelu.default", "activation"),
        ([tensor("bfloat16", 8, contiguous=False)], tensor("bfloat16", 8), "gelu.default", "strided"),
    ],
)
def test_pointwise_kernels_by_layout_and_dtype(inputs, output, name, expected):
    sig = signature(f"aten.{name}", inputs, [output])
    assert efficiency_class(op_class(sig.name), sig) == expected


def test_softmax_counts_as_float32():
    sig = signature("aten._softmax.default", [tensor("bfloat16", 1000, 1000)], [tensor("bfloat16", 1000, 1000)])
    assert us(sig) == pytest.approx(3 + 16)


def test_loss_touches_its_targets_only():
    logits, targets = tensor("float32", 1000, 50_000), tensor("int64", 1000)
    forward = signature("aten.nll_loss_forward.default", [logits, targets], [tensor("float32"), tensor("float32")])
    assert us(forward) == pytest.approx(3 + 40_000 / 0.5e6)
    backward = signature("aten.nll_loss_backward.default", [tensor("float32"), logits, targets], [logits])
    assert us(backward) == pytest.approx(2 * 3 + 200e6 / 0.5e6)


def test_norm_backward_is_two_kernels():
    x = tensor("float32", 1000, 1000)
    assert us(signature("aten.native_layer_norm_backward.default", [x, x], [x])) == pytest.approx(2 * 3 + 24)


def test_copies_over_the_host_link():
    # 1 MB at half of 1e4 bytes/us
    block = tensor("uint8", 1_000_000)
    for direction in ("host_to_device", "device_to_host"):
        sig = signature(f"copy_{direction}", [block], [block], direction=direction)
        assert us(sig) == pytest.approx(3 + 200)


def test_sort_passes_over_keys_and_values():
    # int64: 8 passes that read and write 8-byte keys and 8-byte values: 2 * 8 * 16 bytes per element
    keys = tensor("int64", 10_000)
    assert us(signature("aten.sort.default", [keys], [keys, keys])) == pytest.approx(9 * 3 + 2.56e6 / 0.5e6)


# ---- multi-tensor kernels ----


@pytest.mark.parametrize(
    ("count", "lists", "elements", "launches"),
    [
        (1, 1, 1, 1),
        (110, 1, 10, 1),  # up to 110 tensors of one list
        (111, 1, 10, 2),
        (36, 4, 10, 1),  # 36 of four lists
        (37, 4, 10, 2),
        (1, 4, 320 * 65536, 1),  # 320 blocks of 65536 elements
        (1, 4, 320 * 65536 + 1, 2),
        (100, 1, 65536 * 32, 10),  # 3200 blocks
    ],
)
def test_multi_tensor_launches(count, lists, elements, launches):
    sig = signature("aten._fused_adamw_.default", [tensor("float32", elements)] * (count * lists), [], tensors=count)
    assert multi_tensor_launches(sig) == launches
    traffic_us = count * lists * elements * 4 / 0.5e6
    assert us(sig) == pytest.approx(3 * launches + traffic_us)


# ---- matrix products ----


def test_one_full_wave():
    # 10 x 10 tiles of 256 x 128, one on each multiprocessor at half of 1e6 FLOP/us; memory is faster.
    product = mm(2560, 1280, 1000)
    assert us(product) == pytest.approx(3 + 2 * 256 * 128 * 1000 / 0.5e6)


def test_one_tile_more_is_a_wave_more():
    full, more = (gemm_compute_us(Gemm(batch, 128, 256, 64), DEVICE, 1e14) for batch in (100, 101))
    assert full == pytest.approx(2 * 128 * 256 * 64 / 1e6)
    # the second wave is of the smaller tiles that waste least: 202 of 128 x 128 are three waves of half the work
    assert more == pytest.approx(1.5 * full)


def test_a_deep_product_with_few_tiles_is_split():
    # One tile of 64 x 64 (half rate) and k = 1e6: in 8 parts, whose float32 sums are written and read back.
    assert gemm_compute_us(Gemm(1, 64, 64, 1_000_000), DEVICE, 1e14) == pytest.approx(
        2 * 64 * 64 * 125_000 / 0.5e6 + 8 * 8 * 64 * 64 / 1e6
    )


def test_thin_products_are_bound_by_memory():
    slow = dataclasses.replace(DEVICE, memory_bandwidth_bytes_per_s=1e11)
    product = mm(16, 4096, 4096)
    moved = 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert us(product, slow) == pytest.approx(3 + moved / 0.5e5)


def test_rate_follows_the_dtype():
    assert peak_rate(mm(8, 8, 8), DEVICE) == (1e14, True)
    assert peak_rate(mm(8, 8, 8, "float32"), DEVICE) == (1e13, True)
    assert peak_rate(mm(8, 8, 8, "float32", tf32=False), DEVICE) == (1e13, True)
    assert peak_rate(mm(8, 8, 8, "float32", tf32=True), DEVICE) == (5e13, True)
    assert peak_rate(mm(8, 8, 8, "float8_e4m3fn"), DEVICE) == (1e14, False)
    assert peak_rate(mm(8, 8, 8, "float16"), DEVICE) == (1e13, False)
    no_tf32 = dataclasses.replace(DEVICE, peak_flops={"float32": 1e13})
    assert peak_rate(mm(8, 8, 8, "float32", tf32=True), no_tf32) == (1e13, True)


def test_what_is_a_guess():
    assert not estimate(mm(8, 8, 8, "float8_e4m3fn"), DEVICE).known
    assert not estimate(mm(8, 8, 8, "complex64"), DEVICE).known
    images, weight = tensor(BF16, 2, 3, 6, 6), tensor(BF16, 8, 3, 3, 3)
    sig = signature("aten.cudnn_convolution.default", [images, weight], [tensor(BF16, 2, 8, 4, 4)])
    assert not estimate(sig, DEVICE).known


BF16 = "bfloat16"


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "flops", "expected"),
    [
        ("mm.default", [(2, 3), (3, 5)], [(2, 5)], 60, [Gemm(1, 2, 5, 3)]),
        ("bmm.default", [(7, 2, 3), (7, 3, 5)], [(7, 2, 5)], 420, [Gemm(7, 2, 5, 3)]),
        ("addmm.default", [(5,), (2, 3), (3, 5)], [(2, 5)], 60, [Gemm(1, 2, 5, 3)]),
        ("baddbmm.default", [(7, 2, 5), (7, 2, 3), (7, 3, 5)], [(7, 2, 5)], 420, [Gemm(7, 2, 5, 3)]),
        ("linear.default", [(4, 2, 3), (5, 3)], [(4, 2, 5)], 240, [Gemm(1, 8, 5, 3)]),
        ("_grouped_mm.default", [(10, 3), (4, 3, 5), (4,)], [(10, 5)], 300, [Gemm(4, 3, 5, 3)]),
        # 2 images, 3 to 8 channels, 4 x 4 outputs, 3 x 3 kernel: m = 2 * 16, n = 8, k = 27
        ("convolution.default", [(2, 3, 6, 6), (8, 3, 3, 3)], [(2, 8, 4, 4)], 2 * 32 * 8 * 27, [Gemm(1, 32, 8, 27)]),
        ("matmul.default", [(6, 7, 2, 3), (7, 3, 5)], [(6, 7, 2, 5)], 2520, [Gemm(42, 2, 5, 3)]),
        ("_scaled_mm.default", [(2, 3), (3, 5), (), ()], [(2, 5)], 60, [Gemm(1, 2, 5, 3)]),
        ("mm.default", [(0, 3), (3, 5)], [(0, 5)], 0, []),
        ("cudnn_convolution.default", [(2, 3, 6, 6), (8, 3, 3, 3)], [(2, 8, 4, 4)], 0, None),
    ],
)
def test_products_inside_ops(name, inputs, outputs, flops, expected):
    sig = signature(f"aten.{name}", [tensor(BF16, *s) for s in inputs], [tensor(BF16, *s) for s in outputs], flops)
    assert gemms(sig) == expected


def test_backward_of_a_convolution_is_two_products():
    shapes = [(2, 8, 4, 4), (2, 3, 6, 6), (8, 3, 3, 3)]
    inputs = [tensor(BF16, *s) for s in shapes]
    sig = signature("aten.convolution_backward.default", inputs, inputs[1:], 2 * 2 * 32 * 8 * 27)
    products = gemms(sig)
    assert len(products) == 2
    assert sum(2 * g.m * g.n * g.k for g in products) >= sig.flops


# ---- attention ----


def attention(causal: bool, backward: bool = False) -> OpSignature:
    qkv = tensor(BF16, 10, 10, 1000, 50)
    flops = 2 * 100 * 1000 * 1000 * 50
    name = "aten._scaled_dot_product_flash_attention"
    if backward:
        return signature(f"{name}_backward.default", [qkv] * 5, [qkv] * 3, 5 * flops, causal=causal)
    return signature(f"{name}.default", [qkv] * 3, [qkv], 2 * flops, causal=causal)


def test_attention():
    # 2e10 FLOP at 1e8 per us = 200 us, 1e8 exponentials at 1e6 per us = 100 us; together at half rate
    assert us(attention(causal=False)) == pytest.approx(3 + 600)
    assert us(attention(causal=True)) == pytest.approx(3 + 300)
    # five products: 500 us, the exponentials once more
    assert us(attention(causal=False, backward=True)) == pytest.approx(3 * 3 + 1200)


def test_attention_whose_signature_has_no_flops():
    for backward in (False, True):
        counted = attention(False, backward)
        assert us(dataclasses.replace(counted, flops=0)) == us(counted)
    packed = tensor(BF16, 5000, 10, 50)  # variable lengths: only FLOPs could tell
    assert not estimate(signature("aten._flash_attention_forward.default", [packed] * 3, [packed]), DEVICE).known


# ---- every preset ----


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(accelerator_names()),
    st.tuples(*[st.integers(1, 5000)] * 3),
    st.tuples(*[st.integers(0, 5000)] * 3),
    st.integers(0, 3),
)
def test_a_larger_product_is_never_faster(name, size, more, batch):
    device = load_accelerator(name)
    small = Gemm(1 + batch, *size)
    large = Gemm(1 + 2 * batch, *(a + b for a, b in zip(size, more, strict=True)))
    assert gemm_compute_us(small, device, 1e14) <= gemm_compute_us(large, device, 1e14)
    assert us(mm(small.m, small.n, small.k), device) <= us(mm(large.m, large.n, large.k), device)


OPS = [
    "aten.add.Tensor",
    "aten.gelu.default",
    "aten._softmax.default",
    "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default",
    "aten.sum.dim_IntList",
    "aten.sort.default",
    "aten.topk.default",
    "aten.embedding.default",
    "aten.index_put_.default",
    "aten.cat.default",
    "aten.fill_.Scalar",
    "aten.native_dropout.default",
    "aten._foreach_add_.Scalar",
    "aten.nll_loss_backward.default",
    "copy_host_to_device",
    "mylib.my_op.default",
]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(accelerator_names()),
    st.sampled_from(OPS),
    st.sampled_from(["float32", "bfloat16", "int64"]),
    st.tuples(st.integers(1, 10**5), st.integers(1, 10**4)),
    st.tuples(st.integers(0, 10**5), st.integers(0, 10**4)),
)
def test_more_elements_are_never_faster(name, op, dtype, size, more):
    device = load_accelerator(name)

    def duration(shape) -> float:
        x = tensor(dtype, *shape)
        return estimate(signature(op, [x, x], [x], tensors=1), device).duration_us

    small = duration(size)
    assert 0 < small <= duration([a + b for a, b in zip(size, more, strict=True)])


def test_a_faster_device_is_faster():
    product, sum_ = mm(4096, 4096, 4096), signature("aten.sum.default", [tensor(BF16, 4096, 4096)], [tensor(BF16)])
    a100, h100, b200 = (load_accelerator(n) for n in ("a100-80gb", "h100-sxm", "b200"))
    for sig in (product, sum_):
        assert us(sig, a100) > us(sig, h100) > us(sig, b200)


def test_measured_on_an_h200():
    """Kernels timed by torch.profiler on an H200 (torch 2.11, CUDA 13.0), within the classes' fitted errors."""
    device = dataclasses.replace(load_accelerator("h200-sxm"), launch_overhead_us=0.0)
    assert us(mm(8192, 2048, 2048), device) == pytest.approx(90, rel=0.05)
    assert us(mm(4096, 2048, 8192), device) == pytest.approx(182.6, rel=0.05)
    assert us(mm(4096, 4096, 4096, "float32"), device) == pytest.approx(2719, rel=0.05)
    add = signature("aten.add.Tensor", [tensor("float32", 1 << 27)] * 2, [tensor("float32", 1 << 27)])
    assert us(add, device) == pytest.approx(371, rel=0.05)
    x = tensor(BF16, 16384, 4096)
    assert us(signature("aten.gelu.default", [x], [x]), device) == pytest.approx(89.3, rel=0.1)
    assert us(signature("aten.native_layer_norm.default", [x], [x]), device) == pytest.approx(94.9, rel=0.1)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("bool", 1), ("float8_e5m2", 1), ("complex64", 8)],
)
def test_itemsize(dtype, size):
    assert itemsize(dtype) == size
