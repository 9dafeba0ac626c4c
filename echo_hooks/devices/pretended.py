"""The wrapper tensor: says it lives on a device, holds no data, knows its storage and, when small, its true value."""

from __future__ import annotations

import torch

SHADOW_MAX_ELEMENTS = 256
"""Pretended tensors of up to this many elements carry their true value for as long as it is known."""


class Storage:
    """Stands for one device allocation; shared by a tensor and its views, freed when the last of them goes.

    ``on_free(storage)`` is called once, on garbage collection or resize to 0.
    """

    __slots__ = ("__weakref__", "bytes", "device", "handle", "holder", "number", "on_free", "stream")

    def __init__(self, number: int, bytes: int, device: torch.device, stream: int, on_free=None):
        self.number = number
        self.bytes = bytes
        self.device = device
        self.stream = stream
        self.on_free = on_free
        self.holder = 0
        self.handle = None

    def __del__(self):
        if self.on_free is not None and self.bytes:
            self.on_free(self)


class Pretended(torch.Tensor):
    """A tensor on ``device`` without data.

    Attributes:
        echo_storage: its Storage.
        echo_shadow: a real CPU tensor with the true value, or None when the value is not known.
    """

    echo_storage: Storage
    echo_shadow: torch.Tensor | None

    @staticmethod
    def __new__(cls, size, stride, offset, dtype, device, storage, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor.echo_storage = storage
        tensor.echo_shadow = None
        return tensor

    # Ops reach the capture's dispatch mode; this is only met in a thread where the mode is not active.
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _HANDLER[0]
        if handler is None:
            raise RuntimeError(f"{func}: a pretended tensor was used outside a simulation")
        return handler(func, types, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


_HANDLER: list = [None]


def set_handler(handler) -> None:
    """``handler(func, types, args, kwargs)`` serves ops on pretended tensors where no dispatch mode is active."""
    _HANDLER[0] = handler
