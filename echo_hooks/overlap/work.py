"""What kernels and calls demand of a device: blocks, waves, arithmetic, memory traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_hooks.graph.ops import OpSignature
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.samples import Launch
from echo_hooks.timing.classes import elements, op_class
from echo_hooks.timing.matmul import gemms, peak_rate
from echo_hooks.timing.roofline import attention_work, efficiency_class

# Limits of an SM from compute capability 8.0 on, 9.0's where they differ (CUDA C++ Programming Guide, table of
# technical specifications per compute capability).
_SM_THREADS = 2048
_SM_BLOCKS = 32
_SM_REGISTERS = 65536
_SM_SHARED_BYTES = 228 << 10
_SHARED_RESERVED_BYTES = 1 << 10  # of every block
_REGISTERS_UNIT = 256  # allocated per warp

# Output tile of a block where no profiler saw the launch: the large tiles of cuBLAS on Hopper, 128 rows of queries.
_GEMM_TILE = (128, 256)
_ATTENTION_ROWS = 128
_THREADS = 128  # of a pointwise block, 8 elements each of 16 bits
_VECTOR = 8

_MATRIX = ("gemm", "attention_forward", "attention_backward")


@dataclass(frozen=True)
class Demand:
    """Of a kernel. ``group``: class of the op. ``blocks``: independent pieces of work; ``per_sm``: of them on one SM at
    once. ``persistent``: one block per SM walks over the tiles. ``bytes_share``, ``written_share`` of it, and
    ``flops_share``: of the device's peaks while it runs alone (may exceed 1 where operands stay in the cache)."""

    group: str
    blocks: float
    per_sm: float
    persistent: bool
    bytes: float
    flops: float
    bytes_share: float
    written_share: float
    flops_share: float


def demand(kernel: Kernel, accelerator: Accelerator) -> Demand:
    """What a kernel asks of the device."""
    signature = kernel.signature
    known = op_class(signature.name)
    group = efficiency_class(known, signature) if known is not None else "elementwise"
    flops = attention_work(signature)[0] if group.startswith("attention") else float(signature.flops)
    bytes = float(signature.bytes_read + signature.bytes_written)
    blocks, per_sm, persistent = _blocks(group, signature, kernel.launch, accelerator)
    run_us = max(kernel.run_us, 1e-3)
    peak_flops = peak_rate(signature, accelerator)[0] / 1e6
    return Demand(
        group=group,
        blocks=blocks,
        per_sm=per_sm,
        persistent=persistent,
        bytes=bytes,
        flops=flops,
        bytes_share=bytes / run_us / (accelerator.memory_bandwidth_bytes_per_s / 1e6),
        written_share=signature.bytes_written / run_us / (accelerator.memory_bandwidth_bytes_per_s / 1e6),
        flops_share=flops / run_us / peak_flops,
    )


def blocks_per_sm(launch: Launch) -> int:
    """Blocks of a launch that fit on one SM by threads, registers and shared memory; 0 where that is not known."""
    if not launch.blocks or not launch.threads:
        return 0
    warps = -(-launch.threads // 32)
    fits = [_SM_BLOCKS, _SM_THREADS // (32 * warps)]
    if launch.registers:
        per_warp = -(-launch.registers * 32 // _REGISTERS_UNIT) * _REGISTERS_UNIT
        fits.append(_SM_REGISTERS // (per_warp * warps))
    if launch.shared_bytes:
        fits.append(_SM_SHARED_BYTES // (launch.shared_bytes + _SHARED_RESERVED_BYTES))
    return max(min(fits), 1)


def _blocks(group: str, signature: OpSignature, launch: Launch, accelerator: Accelerator) -> tuple[float, float, bool]:
    """(pieces of work, of them on an SM at once, persistent)."""
    per_sm = float(blocks_per_sm(launch))
    tiles = _tiles(group, signature)
    if per_sm:
        fills = launch.blocks <= accelerator.multiprocessors * per_sm
        if group in _MATRIX and fills and tiles > launch.blocks:
            return tiles, per_sm, True
        return float(launch.blocks), per_sm, fills
    if group in _MATRIX:
        return tiles, 1.0, tiles > accelerator.multiprocessors
    return tiles, float(_SM_THREADS // _THREADS), False


def _tiles(group: str, signature: OpSignature) -> float:
    shapes = [t for t in (*signature.inputs, *signature.outputs) if t.shape]
    largest = max((elements(t) for t in shapes), default=1)
    if group == "gemm":
        products = gemms(signature) or []
        tiles = sum(g.batch * -(-g.m // _GEMM_TILE[0]) * -(-g.n // _GEMM_TILE[1]) for g in products)
        return float(max(tiles, 1))
    if group.startswith("attention") and signature.inputs:
        query = signature.inputs[group == "attention_backward"] if len(signature.inputs) > 1 else signature.inputs[0]
        if len(query.shape) == 4:
            return float(query.shape[0] * query.shape[1] * -(-query.shape[2] // _ATTENTION_ROWS))
    return max(largest / (_THREADS * _VECTOR), 1.0)


def wave_factor(blocks: float, per_sm: float, multiprocessors: int, taken: int) -> float:
    """By how much longer ``blocks`` take when ``taken`` of the SMs are gone: waves on what is left over waves on all.

    Work of many waves takes the ratio of the SMs.
    """
    free = max(multiprocessors - taken, 1)
    here, there = blocks / (per_sm * multiprocessors), blocks / (per_sm * free)
    return math.ceil(there) / math.ceil(here)


def sms_taken(call: Call, accelerator: Accelerator) -> int:
    """SMs that a call's kernel holds. HCCL moves data by engines of its own (SDMA, RDMA), so that an Ascend device's
    cores stay free (AIV mode, in which vector cores do it, is not told apart)."""
    return 0 if accelerator.vendor == "huawei" else min(call.channels, accelerator.multiprocessors - 1)


_BUS_FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0,
               "scatter": 1.0}  # fmt: skip


def bus_bytes(call: Call) -> float:
    """Bytes that each rank sends to another (nccl-tests, doc/PERFORMANCE.md: bus bandwidth times the time)."""
    factor = _BUS_FACTOR.get(call.name)
    if factor is None:
        return float(call.bytes)  # broadcast, reduce, send, receive, exchange
    return factor * call.bytes * (call.ranks - 1) / max(call.ranks, 1)


def bus_share(call: Call, accelerator: Accelerator) -> float:
    """Bus bandwidth over the device's own to its neighbours."""
    return bus_bytes(call) / max(call.run_us, 1e-3) / (accelerator.scaleup_bandwidth_bytes_per_s / 1e6)


def call_bytes_share(call: Call, accelerator: Accelerator) -> float:
    """Share of the device's memory bandwidth that a call takes: three times the bus bandwidth for what it reduces or
    passes on (read the input, read and write the buffers), twice for what it sends or gathers. AlltoAll and sends copy
    from one memory to another."""
    times = 3.0 if call.name in ("all_reduce", "reduce_scatter", "reduce") else 2.0
    if "nvls" in call.algorithm.lower():  # the switch reduces: 4 S over T (notes of the formula, docs/overlap.md)
        return 4.0 * call.bytes / max(call.run_us, 1e-3) / (accelerator.memory_bandwidth_bytes_per_s / 1e6)
    return times * bus_bytes(call) / max(call.run_us, 1e-3) / (accelerator.memory_bandwidth_bytes_per_s / 1e6)
