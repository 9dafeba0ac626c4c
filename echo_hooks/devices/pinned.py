"""Which host memory the script asked to be pinned: nothing is page-locked here, but it must say that it is."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from echo_hooks.devices.pretended import Pretended, Storage

_pretended: WeakSet[Storage] = WeakSet()
_real: dict[int, StorageWeakRef] = {}
_PURGE_AT = 1024
"""So many remembered storages are looked through for those that are gone."""


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, whose storage counts as pinned from now on."""
    if isinstance(tensor, Pretended):
        _pretended.add(tensor.echo_storage)
        tensor.echo_storage.owner.pin(tensor.echo_storage)
        return tensor
    if len(_real) >= _PURGE_AT:
        for key in [key for key, reference in _real.items() if reference.expired()]:
            del _real[key]
    reference = StorageWeakRef(tensor.untyped_storage())
    _real[reference.cdata] = reference
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, Pretended):
        return tensor.echo_storage in _pretended
    reference = _real.get(tensor.untyped_storage()._cdata)
    return reference is not None and not reference.expired()
