"""Checkpoints read onto the pretended device: torch.load makes device storages, from which it builds tensors.

A real storage that is sent to the device becomes a pretended tensor of bytes; the tensors built on it are views of
that. So a resumed run holds what a real one would, shared storages once, from the load until the script lets go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.storage import _StorageBase

from echo_hooks import host_tensors
from echo_hooks.devices.pretended import Pretended
from echo_hooks.patching import Patch


def patches() -> list[Patch]:
    """What is replaced below torch.load, and why."""
    return [
        Patch(_StorageBase, "to", _to, "map_location of torch.load makes device storages with it", "2.9"),
        Patch(torch._utils, "_rebuild_tensor", _rebuild_tensor, "builds torch.load's tensors on storages", "2.9"),
    ]


class DeviceStorage(torch.UntypedStorage):
    """Stands for a storage on the device; ``echo_bytes`` is what it holds, a pretended tensor of uint8."""

    echo_bytes: Pretended

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.echo_bytes.device

    def nbytes(self) -> int:
        return self.echo_bytes.numel()

    size = nbytes


def _to(original):
    def to(self, *, device: Any, non_blocking: bool = False):
        target = torch.device(device)
        if isinstance(self, DeviceStorage):
            return self if target.type == self.device.type else torch.UntypedStorage(self.nbytes())
        if target.type != "cuda" or self.device.type != "cpu":
            return original(self, device=device, non_blocking=non_blocking)
        data = host_tensors.empty((0,), torch.uint8).set_(self)
        storage = DeviceStorage(1)  # torch.load takes a storage without an address for an empty one
        storage.echo_bytes = data.to(target, non_blocking=non_blocking)  # type: ignore[assignment]
        return storage

    return to


def _rebuild_tensor(original):
    def rebuild_tensor(storage, storage_offset, size, stride):
        held = storage._untyped_storage
        if not isinstance(held, DeviceStorage):
            return original(storage, storage_offset, size, stride)
        with torch.no_grad():
            return held.echo_bytes.view(storage.dtype).as_strided(size, stride, storage_offset)

    return rebuild_tensor
