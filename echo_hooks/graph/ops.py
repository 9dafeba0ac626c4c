"""Op signatures: the distinct operations of a rank program, with what a cost model needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorMeta:
    """Shape (elements), dtype ("bfloat16", "int64", ...) and whether the memory is dense in the usual order."""

    shape: tuple[int, ...]
    dtype: str
    contiguous: bool = True


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype: "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype by its torch name."""
    if dtype == "bool":
        return 1
    for bits in (128, 64, 32, 16):
        if dtype.endswith(str(bits)):
            return bits // 8
    return 1  # int8, uint8, float8_e4m3fn and its kin


def meta_of(tensor: Any) -> TensorMeta:
    """Meta of a torch tensor (which this module need not import to read)."""
    return TensorMeta(tuple(int(n) for n in tensor.shape), dtype_name(tensor.dtype), tensor.is_contiguous())


@dataclass(frozen=True)
class OpSignature:
    """One distinct operation.

    ``name``: "aten.mm.default", "aten._fused_adamw_.default", or for communication the collective's name
    ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "barrier",
    "send", "recv"), for marks "step_begin"/"step_end".
    ``flops``: multiply-adds count two; 0 where the op is no matrix product or attention or convolution.
    ``bytes_read``/``bytes_written``: every distinct tensor once.
    ``attrs``: plain values (str, int, float, bool, None, lists of them). For communication: ``reduce`` ("sum", "avg",
    "max", ...), ``input_splits``/``output_splits`` (elements, uneven all-to-all), ``count`` (tensors in a coalesced
    call). For fused attention ``causal``, for foreach and fused optimizer ops ``tensors`` (how many), for float32
    products ``tf32`` (allowed or not), for copies ``direction``.
    ``call``: the arguments' structure, with which the op can be called again (echo_hooks/capture/calls.py); "" where
    the tracer could not tell.
    """

    name: str
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    attrs: tuple[tuple[str, Any], ...] = ()
    call: str = ""

    def attr(self, name: str, default: Any = None) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        return default


@dataclass
class OpTable:
    """Signatures in order of first use; ``add`` returns the index of an equal one."""

    signatures: list[OpSignature] = field(default_factory=list)
    _index: dict[OpSignature, int] = field(default_factory=dict, repr=False)

    def add(self, signature: OpSignature) -> int:
        index = self._index.get(signature)
        if index is None:
            index = self._index[signature] = len(self.signatures)
            self.signatures.append(signature)
        return index
