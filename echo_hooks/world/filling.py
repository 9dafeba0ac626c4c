"""What a collective leaves in real tensors on a device, written where it belongs: no copy of a large buffer is made.

The rules are those of `values.reduce_values` for members that all hold what this rank holds.
"""

from __future__ import annotations

import torch

from echo_hooks.world.values import RECEIVED_STD, RealValues, is_control, policy_value, reduce_values

_BIG = 1 << 16
"""Up to so many elements the general rules serve; beyond, a sum of integers and the like would copy too much."""


class DeviceValues(RealValues):
    """Values of tensors that live on a real device; bulk data is filled in place."""

    in_place = True


def reduced(own: torch.Tensor, out: torch.Tensor, op: str, size: int) -> None:
    """``out`` holds the reduction of ``size`` tensors equal to ``own`` (which may be ``out`` itself)."""
    with torch.no_grad():
        own, out = own.detach(), out.detach()
        if op not in ("sum", "avg", "premul_sum", "max", "min", "band", "bor") and own.numel() <= _BIG:
            out.copy_(reduce_values(op, own, size, {}).reshape(out.shape))
            return
        if out.data_ptr() != own.data_ptr():
            out.copy_(own.reshape(out.shape))
        if op == "sum" and size > 1 and own.dtype != torch.bool:
            out.mul_(size)


def gathered(own: torch.Tensor, out: torch.Tensor, size: int) -> None:
    """``out`` holds ``own`` ``size`` times."""
    with torch.no_grad():
        own, out = own.detach(), out.detach()
        if not out.is_contiguous() or own.numel() * size != out.numel():
            out.copy_(own.reshape(-1).repeat(size)[: out.numel()].reshape(out.shape))
            return
        slots = out.view(size, -1)
        flat = own.reshape(-1)
        for slot in slots:
            if slot.data_ptr() != flat.data_ptr():  # a member's own slot is often the input itself
                slot.copy_(flat)


def fitted(own: torch.Tensor, out: torch.Tensor) -> None:
    """The common prefix of ``own``, then zeros."""
    with torch.no_grad():
        own, out = own.detach().reshape(-1), out.detach()
        if own.numel() == out.numel():
            out.copy_(own.reshape(out.shape))
        elif out.numel():
            common = min(own.numel(), out.numel())
            flat = out.reshape(-1)
            flat[:common].copy_(own[:common])
            flat[common:].zero_()
            if not out.is_contiguous():
                out.copy_(flat.reshape(out.shape))


def made_up(out: torch.Tensor, answer: int | None, generator: torch.Generator | None) -> str | int:
    """Fill ``out`` with what a peer may have sent; returns how, for the assumptions. ``answer``: to an integer."""
    with torch.no_grad():
        out = out.detach()
        if is_control(out.dtype):
            value = policy_value(out.dtype) if answer is None else answer
            out.fill_(value)
            return value
        if out.dtype.itemsize == 1:  # no float8 kernel draws numbers
            wide = torch.ops.aten.empty_like.default(out, dtype=torch.float32)
            out.copy_(wide.normal_(0, RECEIVED_STD, generator=generator))
            return f"N(0, {RECEIVED_STD})"
        out.normal_(0, RECEIVED_STD, generator=generator)
        return f"N(0, {RECEIVED_STD})"
