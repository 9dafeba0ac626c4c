"""Matrix products: the shapes inside an op, and the time of a tiled kernel on so many multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from echo_hooks.graph.ops import OpSignature
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import base_name

# Output tiles of one thread block that CUTLASS and cuBLAS use on Ampere and later (CUTLASS documentation, "Efficient
# GEMM": 128x128, 256x128, 128x256, 64x64 threadblock tiles).
TILES = ((128, 256), (256, 128), (128, 128), (64, 64))

# Work along k may be split over so many blocks, whose float32 partial sums are added up (CUTLASS split-k and stream-k).
SPLITS = (1, 2, 4, 8)

# Below 128x128 a tile brings too few operations per byte loaded: a Hopper SM does 4096 dense bfloat16 FLOP per cycle
# and loads 64 bytes per cycle from L2 (CUDA programming guide; H100 whitepaper), so it needs 64 FLOP per byte, which
# 128 x 128 just gives.
_FULL_RATE_HARMONIC = 128


@dataclass(frozen=True)
class Gemm:
    """``batch`` products of [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int


def gemms(signature: OpSignature) -> list[Gemm] | None:
    """The matrix products that an op of class "gemm" does; None when the signature does not tell.

    Plain products are read from the operands' shapes. A convolution becomes the product with as many FLOPs (implicit
    GEMM, cuDNN developer guide).
    """
    base = base_name(signature.name)
    if base in _PLAIN.split():
        return _plain(base, signature)
    if signature.flops <= 0 or not signature.outputs:
        return None
    if base.endswith("_backward"):  # one product for the input's gradient, one for the weight's
        return [_implicit(signature.outputs[0].shape, signature.flops // 2)] * 2
    return [_implicit(signature.outputs[0].shape, signature.flops)]


_PLAIN = "mm bmm addmm baddbmm addbmm linear matmul _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation"


def _plain(base: str, signature: OpSignature) -> list[Gemm] | None:
    has_addend = base in ("addmm", "baddbmm", "addbmm", "_addmm_activation")
    operands = signature.inputs[1:3] if has_addend else signature.inputs[:2]
    if len(operands) < 2 or min(len(t.shape) for t in operands) < 2:
        return None
    a, b = (t.shape for t in operands)
    if base == "linear":  # the weight is [n, k]
        b = (b[1], b[0])
    if "grouped" in base and len(b) == 3:  # the rows of one matrix are shared out among the groups
        product = Gemm(b[0], -(-a[0] // max(b[0], 1)), b[2], b[1])
    elif len(b) == 2:
        product = Gemm(1, prod(a[:-1]), b[1], b[0])
    else:
        product = Gemm(prod(max(a[:-2], b[:-2], key=prod)), a[-2], b[-1], b[-2])
    return [product] if product.batch * product.m * product.n * product.k else []


def _implicit(output: tuple[int, ...], flops: int) -> Gemm:
    """n output channels, m the output's other elements, k from the FLOPs."""
    n = max(output[1] if len(output) > 1 else 1, 1)
    m = max(prod(output) // n, 1)
    return Gemm(1, m, n, -(-flops // (2 * m * n)))


def peak_rate(signature: OpSignature, accelerator: Accelerator) -> tuple[float, bool]:
    """Dense peak in FLOP/s for the operands' dtype, and whether the device has one for that dtype.

    float32 runs on CUDA cores unless the signature's ``tf32`` is true; a device without TF32 ignores that.
    """
    dtype = signature.inputs[min(1, len(signature.inputs) - 1)].dtype if signature.inputs else "float32"
    dtype = "float8" if dtype.startswith("float8") else "int8" if dtype == "uint8" else dtype
    peaks = accelerator.peak_flops
    if dtype == "float32" and signature.attr("tf32") and "tf32" in peaks:
        dtype = "tf32"
    if dtype in peaks:
        return peaks[dtype], True
    return peaks.get("bfloat16", peaks["float32"]) if dtype == "float8" else peaks["float32"], False


def gemm_compute_us(gemm: Gemm, accelerator: Accelerator, flops_per_s: float) -> float:
    """Time of the best tile and split with ``flops_per_s`` of the whole device, without memory and fixed parts.

    Tiles run in waves of one per multiprocessor, so the last, partly filled wave takes as long as a full one
    (NVIDIA Deep Learning Performance Guide, "Tile and Wave Quantization").
    """
    per_multiprocessor = flops_per_s / 1e6 / accelerator.multiprocessors
    bytes_per_us = accelerator.memory_bandwidth_bytes_per_s / 1e6
    best = float("inf")
    for tile_m, tile_n in TILES:
        rate = per_multiprocessor * min(1.0, 2 * tile_m * tile_n / (tile_m + tile_n) / _FULL_RATE_HARMONIC)
        tiles = gemm.batch * -(-gemm.m // tile_m) * -(-gemm.n // tile_n)
        for split in SPLITS:
            waves = -(-tiles * split // accelerator.multiprocessors)
            time_us = waves * 2 * tile_m * tile_n * -(-gemm.k // split) / rate
            if split > 1:  # each part is written and read back in float32
                time_us += 8 * split * gemm.batch * gemm.m * gemm.n / bytes_per_us
            best = min(best, time_us)
    return best
