"""Real CPU tensors for Echo's own use, made by torch's own factories whatever the script has put in their place.

Scripts change what `torch.empty(...)` means: a `torch.device` context moves it to the device, DeepSpeed's zero.Init
replaces the factories. Both would turn Echo's bookkeeping into recorded device work.
"""

from __future__ import annotations

import torch

_empty, _full, _tensor, _frombuffer = torch.empty, torch.full, torch.tensor, torch.frombuffer


def empty(shape, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """An uninitialised tensor."""
    return _empty(tuple(shape), dtype=dtype, device=device)


def full(shape, value, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor with ``value`` everywhere."""
    return _full(tuple(shape), value, dtype=dtype, device="cpu")


def zeros(shape, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros."""
    return full(shape, 0, dtype)


def tensor(data, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor of ``data``, as torch.tensor makes it."""
    return _tensor(data, dtype=dtype, device="cpu")


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The elements in ``data`` as a flat tensor of its own memory."""
    return _frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else empty((0,), dtype)
