"""What the learned model sees of an operation: sizes, intensity, tiles and waves, layout, alignment.

Sizes are logarithms; times and counts of waves are relative to the device, so that a model learned on one device says
something about another. Features that an operation has no meaning for are NaN, which the trees pass on.
"""

from __future__ import annotations

import re
from math import log2, nan, prod

from echo_hooks.graph.ops import OpSignature, TensorMeta, itemsize
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import PRODUCTS, base_name, op_class
from echo_hooks.timing.matmul import gemms
from echo_hooks.timing.roofline import attention_work, efficiency_class, estimate, multi_tensor_launches

TILES = ((128, 256), (256, 128), (192, 192), (320, 128), (192, 128), (128, 128))
"""Output tiles seen in the names of cuBLAS's kernels on Hopper (nvjet_sm90_..._128x256_...)."""

ALIGNMENT_MOST = 64

CLASSES = (
    "gemm",
    "attention_forward",
    "attention_backward",
    "elementwise",
    "cast",
    "strided",
    "activation",
    "norm",
    "norm_backward",
    "softmax",
    "softmax_backward",
    "reduction",
    "optimizer",
    "gather",
    "scatter",
    "concatenate",
    "fill",
    "random",
    "sort",
)
"""Classes that a model is learned for; copies between host and device depend on the host, not on the operation."""

NAMES = (
    *("class", "op", "loaded", "log_estimate", "log_bytes", "log_read_share", "log_flops", "log_intensity"),
    *("log_elements", "log_rows", "log_columns", "log_outputs", "tensors", "kernels", "launches"),
    *("item_in", "item_out", "is_float16", "is_bfloat16", "strided_inputs", "broadcast", "in_l2"),
    *("far_inner", "keeps_columns", "flags", "worded"),
    *("m", "n", "k", "batch", "align_m", "align_n", "align_k", "transposed_a", "transposed_b", "addend", "tf32"),
    "ignores_addend",
    *(f"{what}_{m}x{n}" for m, n in TILES for what in ("waves", "fullness")),
    *("heads", "queries", "keys", "head_size", "causal", "log_blocks", "arithmetic_share"),
)


_LAST_STRIDE = re.compile(r'\["T"(?:,\d+)*,(\d+)\]')


def feature_class(signature: OpSignature) -> str | None:
    """The class that the roofline prices it in, None for an operation that no model is learned for."""
    opclass = op_class(signature.name)
    name = efficiency_class(opclass, signature) if opclass is not None else None
    return name if name in CLASSES else None


def shape_of(signature: OpSignature) -> tuple:
    """What must not be split between training and hold-out: all operations of one class and size.

    A product's forward and both gradients have the same three sizes, and so the same shape here.
    """
    name = feature_class(signature)
    if name == "gemm" and (products := gemms(signature)):
        p = products[0]
        return name, p.batch, *sorted((p.m, p.n, p.k))
    if name in ("attention_forward", "attention_backward"):
        query = signature.inputs[name == "attention_backward"]
        return "attention", *query.shape
    if name == "optimizer":
        return name, sum(prod(t.shape) for t in signature.inputs[: signature.attr("tensors") or 1])
    largest = max((*signature.inputs, *signature.outputs), key=lambda t: prod(t.shape), default=TensorMeta((), ""))
    return name, prod(largest.shape), largest.shape[-1] if largest.shape else 1


def features(signature: OpSignature, accelerator: Accelerator, ops: dict[str, int], loaded: bool) -> list[float]:
    """One value per name of NAMES. ``ops``: numbers of the operations' base names, as the model's schema has them."""
    name = feature_class(signature) or ""
    tensors = [t for t in signature.inputs if t.shape]
    largest = max((*tensors, *signature.outputs), key=lambda t: prod(t.shape), default=TensorMeta((), "float32"))
    elements = prod(largest.shape)
    columns = largest.shape[-1] if largest.shape else 1
    opclass = op_class(signature.name)
    moved = signature.bytes_read + signature.bytes_written
    if opclass is not None and opclass.traffic is not None:
        moved = opclass.traffic(signature)
    first = signature.inputs[0] if signature.inputs else largest
    last = signature.outputs[0] if signature.outputs else first
    is_product = name in PRODUCTS
    found: dict[str, float] = {
        "class": float(CLASSES.index(name)) if name else nan,
        "op": float(ops.get(base_name(signature.name).rstrip("_"), -1)),
        "loaded": float(loaded) if is_product else nan,
        "log_estimate": _log(estimate(signature, accelerator).duration_us),
        "log_bytes": _log(moved),
        "log_read_share": _log(signature.bytes_read / moved if moved else 1.0),
        "log_flops": _log(signature.flops),
        "log_intensity": _log(signature.flops / moved) if moved and signature.flops else nan,
        "log_elements": _log(elements),
        "log_rows": _log(elements / max(columns, 1)),
        "log_columns": _log(columns),
        "log_outputs": _log(sum(prod(t.shape) for t in signature.outputs)),
        "tensors": float(len(signature.inputs)),
        "kernels": float(opclass.kernels if opclass is not None else 1),
        "launches": float(multi_tensor_launches(signature)) if name == "optimizer" else nan,
        "item_in": float(itemsize(first.dtype)),
        "item_out": float(itemsize(last.dtype)),
        "is_float16": float(first.dtype == "float16"),
        "is_bfloat16": float(first.dtype == "bfloat16"),
        "strided_inputs": float(sum(not t.contiguous for t in tensors)),
        "broadcast": float(len({t.shape for t in tensors})),
        "in_l2": min(moved / accelerator.l2_bytes, 8.0),
        # Operands whose neighbours in memory are not neighbours in their last dimension.
        "far_inner": float(sum(stride not in ("0", "1") for stride in _LAST_STRIDE.findall(signature.call))),
        "keeps_columns": float(last.shape[-1:] == largest.shape[-1:]),
        "flags": float(signature.call.count("true")),
        "worded": float(signature.call.count('"text"')),
    }
    if name == "gemm":
        found |= _product(signature, accelerator)
    elif is_product:
        found |= _attention(signature, accelerator)
    return [found.get(n, nan) for n in NAMES]


def _product(signature: OpSignature, accelerator: Accelerator) -> dict[str, float]:
    products = gemms(signature)
    if not products:
        return {}
    p = products[0]
    base = base_name(signature.name)
    addend = "add" in base
    a, b = (*signature.inputs[addend : addend + 2], TensorMeta((), ""), TensorMeta((), ""))[:2]
    found = {
        "m": _log(p.m),
        "n": _log(p.n),
        "k": _log(p.k),
        "batch": _log(p.batch),
        "align_m": _alignment(p.m),
        "align_n": _alignment(p.n),
        "align_k": _alignment(p.k),
        "transposed_a": float(not a.contiguous),
        "transposed_b": float(not b.contiguous),
        "addend": float(addend),
        "tf32": float(bool(signature.attr("tf32"))),
        "ignores_addend": float('"beta":0' in signature.call),
    }
    for m, n in TILES:
        waves = p.batch * -(-p.m // m) * -(-p.n // n) / accelerator.multiprocessors
        found[f"waves_{m}x{n}"] = _log(waves)
        found[f"fullness_{m}x{n}"] = waves / -(-waves // 1)
    return found


def _attention(signature: OpSignature, accelerator: Accelerator) -> dict[str, float]:
    backward = base_name(signature.name).endswith("_backward")
    query, key = (*signature.inputs[backward : backward + 2], TensorMeta((), ""), TensorMeta((), ""))[:2]
    if len(query.shape) != 4 or len(key.shape) != 4:
        return {}
    batch, heads, queries, size = query.shape
    flops, _ = attention_work(signature)
    moved = signature.bytes_read + signature.bytes_written
    return {
        "batch": _log(batch),
        "heads": _log(heads),
        "queries": _log(queries),
        "keys": _log(key.shape[2]),
        "head_size": float(size),
        "causal": float(bool(signature.attr("causal"))),
        "log_blocks": _log(batch * heads * -(-queries // 128) / accelerator.multiprocessors),
        "arithmetic_share": _log(flops / moved) if moved and flops else nan,
    }


def _log(value: float) -> float:
    return log2(value) if value > 0 else nan


def _alignment(n: int) -> float:
    """The largest power of two that divides ``n``, up to ALIGNMENT_MOST, as its logarithm."""
    return log2(min(n & -n, ALIGNMENT_MOST)) if n else nan
