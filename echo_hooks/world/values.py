"""What tensors contain, as far as anyone knows: the one door through which the world reads and writes values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from echo_hooks import host_tensors

RECEIVED_STD = 0.02
"""Standard deviation of made-up received activations: the usual initialisation scale, so norms stay finite and no
LayerNorm sees a constant (a constant input gives zero gradients)."""


class Values(Protocol):
    """How the world reads and writes tensor contents, whatever kind of tensors the run uses.

    ``in_place``: bulk data is filled where it lies (`world.filling`) instead of passing through ``known`` and ``set``.
    """

    in_place: bool

    def known(self, t: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the value (not to be written to), or None: nobody knows it."""
        ...

    def set(self, t: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write ``value`` (same number of elements) into ``t``; None: the value is no longer known."""
        ...

    def pretended(self, t: torch.Tensor) -> bool:
        """True when the tensor holds no data."""
        ...

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor of the same kind and device as ``like`` (pretended stays pretended)."""
        ...


class RealValues:
    """Values of real tensors: everything is known, nothing can be forgotten."""

    in_place = False

    def known(self, t: torch.Tensor) -> torch.Tensor | None:
        return t.detach()

    def set(self, t: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None:
            with torch.no_grad():
                t.detach().copy_(value.reshape(t.shape))

    def pretended(self, t: torch.Tensor) -> bool:
        return False

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return host_tensors.empty(shape, dtype or like.dtype, str(like.device))


def storage_key(t: torch.Tensor) -> object:
    """What a tensor and its views have in common: ``echo_storage`` of pretended tensors, else the storage's address."""
    storage = getattr(t, "echo_storage", None)
    return storage if storage is not None else t.untyped_storage()._cdata


def is_control(dtype: torch.dtype) -> bool:
    """Integers and booleans steer programs (sizes, flags, counts, seeds); floats are data."""
    return not dtype.is_floating_point and not dtype.is_complex


def policy_value(dtype: torch.dtype) -> int:
    """The answer to an integer nobody knows: 1 (0 often means "do not train"), but 0 for flags (overflow, nan)."""
    return 0 if dtype in (torch.bool, torch.uint8) else 1


def reduce_values(op: str, own: torch.Tensor, size: int, peers: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The result of reducing ``own`` with the known values of ``peers`` over a group of ``size`` members.

    Members whose value is unknown are taken to hold what this rank holds (uniform ranks): a sum of equal values
    multiplies by their number, a product raises to that power, averages, extremes and bitwise and/or keep. A
    pre-multiplied sum is taken for an average, which is what FSDP2's gradient divide factor makes of it.
    """
    same = size - len(peers)
    if op == "premul_sum":
        op = "avg"
    if own.dtype == torch.bool and op in ("sum", "product"):
        op = {"sum": "max", "product": "min"}[op]
    if op in ("sum", "avg"):
        total = own * same
        for value in peers.values():
            total = total + value
        if op != "avg":
            return total.to(own.dtype)
        return own.clone() if not peers else (total / size).to(own.dtype)
    if op == "product":
        result = own**same
        for value in peers.values():
            result = result * value
        return result.to(own.dtype)
    if op == "bxor":
        result = own if same % 2 else torch.zeros_like(own)
        for value in peers.values():
            result = result ^ value
        return result
    fold = {"max": torch.maximum, "min": torch.minimum, "band": torch.bitwise_and, "bor": torch.bitwise_or}.get(op)
    if fold is None:
        raise NotImplementedError(f"reduce op {op!r} is not one the virtual world knows")
    result = own.clone()
    for value in peers.values():
        result = fold(result, value)
    return result


_REDUCE_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def reduce_name(op: object) -> str:
    """ "sum", "avg", ... of a ``ReduceOp``, of its enum, or of the string that functional collectives carry.

    Raises NotImplementedError naming an op it does not know.
    """
    if isinstance(op, str):
        if op.upper() in _REDUCE_NAMES:
            return op.lower()
        raise NotImplementedError(f"reduce op {op!r} is not one the virtual world knows")
    for name in _REDUCE_NAMES:
        if op == getattr(torch.distributed.ReduceOp, name):
            return name.lower()
    raise NotImplementedError(f"reduce op {op!r} is not one the virtual world knows")
