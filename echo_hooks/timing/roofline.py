"""The roofline model of one op alone on a device: the slower of arithmetic and memory, plus what each kernel costs.

    duration = kernels * (launch_overhead + ramp) + max(FLOPs / (compute * peak), bytes / (bandwidth * peak))

``ramp`` is how long a kernel takes to fill and drain the device: with it the bandwidth reached at a size is
bytes / (bytes + half_size) of the full one, half_size = ramp * bandwidth. ``compute``, ``bandwidth`` and ``ramp``
are the accelerator's ``efficiency`` of the op's class (docs/timing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import OpClass, base_name, elements, op_class
from echo_hooks.timing.matmul import gemm_compute_us, gemms, peak_rate


@dataclass(frozen=True)
class Estimate:
    """``known``: false where the time is a guess: the op is in no class, its signature does not tell its work, or the
    device lacks its dtype."""

    duration_us: float
    known: bool


def estimate(signature: OpSignature, accelerator: Accelerator) -> Estimate:
    """Duration of one op alone on the device.

    An op in no class counts as one kernel that moves the signature's bytes at the "elementwise" rate.
    """
    opclass = op_class(signature.name)
    known = opclass is not None
    opclass = opclass or OpClass("elementwise")
    name = efficiency_class(opclass, signature)
    moved_us = _memory_us(signature, opclass, name, accelerator)
    arithmetic_us, has_dtype = _arithmetic_us(signature, name, accelerator)
    fixed_us = _kernels(signature, opclass) * (accelerator.launch_overhead_us + accelerator.efficiency[name]["ramp"])
    return Estimate(fixed_us + max(moved_us, arithmetic_us), known and has_dtype)


def efficiency_class(opclass: OpClass, signature: OpSignature) -> str:
    """The key of ``Accelerator.efficiency``: the op's class, pointwise ones by the kernel that PyTorch picks.

    Vectorised loads need one layout and one dtype throughout; mixed dtypes are converted one element at a time
    ("cast"), broadcast or permuted operands are indexed one element at a time ("strided"). Rounding float32 to 16
    bits has a vectorised kernel of its own (PyTorch, aten/src/ATen/native/cuda/CUDALoops.cuh and Copy.cu).
    """
    if opclass.name not in ("elementwise", "activation"):
        return opclass.name
    tensors = [t for t in (*signature.inputs, *signature.outputs) if t.shape]
    if any(not t.contiguous for t in tensors) or len({t.shape for t in tensors}) > 1:
        return "strided"
    dtypes = {t.dtype for t in tensors if t.dtype != "bool"}  # masks and comparisons need no conversion
    return "cast" if len(dtypes) > 1 and not _rounds_to_16_bits(signature) else opclass.name


def _rounds_to_16_bits(signature: OpSignature) -> bool:
    if base_name(signature.name) not in ("_to_copy", "copy_"):
        return False
    target = (signature.outputs or signature.inputs)[0].dtype
    return signature.inputs[-1].dtype == "float32" and target in ("bfloat16", "float16")


def _memory_us(signature: OpSignature, opclass: OpClass, name: str, accelerator: Accelerator) -> float:
    if opclass.traffic is not None:
        traffic = opclass.traffic(signature)
    elif name == "cast":  # one element at a time, whatever its size: each counts 8 bytes
        traffic = 8 * max((elements(t) for t in (*signature.inputs, *signature.outputs)), default=0)
    elif name == "host_link":
        traffic = max(signature.bytes_read, signature.bytes_written)
    else:
        traffic = signature.bytes_read + signature.bytes_written
    peak = (
        accelerator.host_link_bandwidth_bytes_per_s if name == "host_link" else accelerator.memory_bandwidth_bytes_per_s
    )
    return traffic / (peak / 1e6) / accelerator.efficiency[name]["bandwidth"]


def _arithmetic_us(signature: OpSignature, name: str, accelerator: Accelerator) -> tuple[float, bool]:
    """Time of the op's matrix products; false when they are not known or the device has no peak for their dtype."""
    if name not in ("gemm", "attention_forward", "attention_backward"):
        return 0.0, True
    peak, has_dtype = peak_rate(signature, accelerator)
    rate = peak * accelerator.efficiency[name]["compute"]
    if name == "gemm":
        products = gemms(signature)
        return sum(gemm_compute_us(g, accelerator, rate) for g in products or ()), has_dtype and products is not None
    flops, scores = attention_work(signature)
    exponentials_us = scores / accelerator.special_function_ops_per_s / accelerator.efficiency[name]["compute"] * 1e6
    return flops / rate * 1e6 + exponentials_us, has_dtype and flops > 0


def attention_work(signature: OpSignature) -> tuple[float, float]:
    """(FLOPs, scores) that a fused attention computes: its products, and one exponential per score.

    The two hardly overlap within a thread block (FlashAttention-3, arXiv 2407.08608, section 3: on an H100 the
    special function units do 3.9 T exponentials per second, so that with head dimension 128 they take half as many
    cycles as the products). The signature's FLOPs count every score; with ``causal`` half of them are skipped.
    (0, 0) when neither FLOPs nor shapes tell.
    """
    backward = base_name(signature.name).endswith("_backward")
    products = 5 if backward else 2  # of [s, d] by [d, s] or [s, s] by [s, d]
    query, key = (*signature.inputs[backward : backward + 2], TensorMeta((), ""), TensorMeta((), ""))[:2]
    flops = signature.flops
    if not flops and len(query.shape) == len(key.shape) == 4:  # [batch, heads, sequence, head dimension]
        flops = 2 * products * elements(query) * key.shape[2]
    if not flops or len(query.shape) < 3:
        return 0.0, 0.0
    computed = 0.5 if signature.attr("causal") else 1.0
    return computed * flops, computed * flops / (2 * products * query.shape[-1])


def _kernels(signature: OpSignature, opclass: OpClass) -> int:
    return multi_tensor_launches(signature) if opclass.name == "optimizer" else opclass.kernels


# Tensors per launch by number of tensor lists; blocks per launch; elements per block
# (PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
_BLOCKS_PER_LAUNCH = 320
_ELEMENTS_PER_BLOCK = 65536


def multi_tensor_launches(signature: OpSignature) -> int:
    """Kernels of a foreach or fused optimizer op over the lists of ``tensors`` tensors that its inputs form."""
    count = signature.attr("tensors") or 1
    lists = max(len(signature.inputs) // count, 1)
    first: tuple[TensorMeta, ...] = signature.inputs[:count]
    blocks = sum(-(-elements(t) // _ELEMENTS_PER_BLOCK) for t in first)
    per_launch = _TENSORS_PER_LAUNCH[min(lists, len(_TENSORS_PER_LAUNCH)) - 1]
    return max(-(-count // per_launch), -(-blocks // _BLOCKS_PER_LAUNCH), 1)
