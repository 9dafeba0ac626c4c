"""Matrix products: the shapes inside an op, and the time of a tiled kernel on so many multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hooks.graph.ops import OpSignature
from echo_hooks.hardware.accelerator import Accelerator

# Output tiles of one thread block that CUTLASS and cuBLAS use on Ampere and later (CUTLASS documentation, "Efficient
# GEMM": 128x128, 256x128, 128x256, 64x64 threadblock tiles).
TILES = ((128, 256), (256, 128), (128, 128), (64, 64))

# Work along k may be split over so many blocks, whose float32 partial sums are added up (CUTLASS split-k and stream-k).
SPLITS = (1, 2, 4, 8)

# Below 128x128 a tile brings too few operations per byte loaded: a Hopper SM does 4096 dense bfloat16 FLOP per cycle
# and loads 64 bytes per cycle from L2 (CUDA programming guide; H100 whitepaper), so it needs 64 FLOP per byte, which
# 128 x 128 just gives.
_FULL_RATE_HARMONIC = 128

_DTYPE_OF = {"complex64": "float32", "complex128": "float64", "uint8": "int8"}


@dataclass(frozen=True)
class Gemm:
    """``batch`` products of [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int


def gemms(signature: OpSignature) -> list[Gemm]:
    """The matrix products that an op of class "gemm" does.

    Read from the operands' shapes for the plain products; convolutions and what else carries FLOPs become the
    implicit GEMM with as many (cuDNN's developer guide). Empty when there is no work.
    """
    base = signature.name.split(".")[1] if "." in signature.name else signature.name
    operands = [t for t in signature.inputs if len(t.shape) >= 2]
    if base in ("addmm", "baddbmm", "addbmm", "_addmm_activation") and len(signature.inputs) >= 3:
        operands = list(signature.inputs[1:3])
    if base in _PLAIN and len(operands) >= 2:
        a, b = operands[0].shape, operands[1].shape
        if base == "linear":  # the weight is [n, k]
            b = (*b[:-2], b[-1], b[-2])
        if len(a) == 2 and len(b) == 3:  # grouped: the rows of one matrix are shared out among the groups
            groups = max(b[0], 1)
            return _nonempty([Gemm(groups, -(-a[0] // groups), b[2], b[1])])
        batch = 1
        for size in a[:-2] if len(b) > 2 else ():
            batch *= size
        rows = a[-2]
        for size in a[:-2] if len(b) == 2 else ():
            rows *= size
        return _nonempty([Gemm(batch, rows, b[-1], a[-1])])
    if signature.flops and base.endswith("_backward"):  # two products of equal size
        return [_implicit(signature, signature.flops // 2)] * 2
    return [_implicit(signature, signature.flops)] if signature.flops else []


_PLAIN = (
    "mm bmm addmm baddbmm addbmm linear matmul _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation"
).split()


def _nonempty(products: list[Gemm]) -> list[Gemm]:
    return [g for g in products if g.batch and g.m and g.n and g.k]


def _implicit(signature: OpSignature, flops: int) -> Gemm:
    """A convolution as a product: n output channels, k from the FLOPs, m the output's other elements."""
    shape = signature.outputs[0].shape if signature.outputs else ()
    n = shape[1] if len(shape) >= 3 else shape[-1] if shape else 1
    elements = 1
    for size in shape:
        elements *= size
    m = max(elements // max(n, 1), 1)
    return Gemm(1, m, max(n, 1), max(-(-flops // (2 * m * max(n, 1))), 1))


def peak_rate(signature: OpSignature, accelerator: Accelerator) -> tuple[float, bool]:
    """Dense peak in FLOP/s for the operands' dtype, and whether the device has one for that dtype.

    float32 runs on CUDA cores unless the signature's ``tf32`` is true; a device without TF32 ignores that.
    """
    dtype = signature.inputs[min(1, len(signature.inputs) - 1)].dtype if signature.inputs else "float32"
    dtype = _DTYPE_OF.get(dtype, "float8" if dtype.startswith("float8") else dtype)
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
