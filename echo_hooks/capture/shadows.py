"""True values of small pretended tensors, for as long as they are known."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from echo_hooks.devices.pretended import SHADOW_MAX_ELEMENTS, Pretended

INTEGERS_MAX_ELEMENTS = 1 << 20
"""Integers and booleans (token ids, routing maps, counts, indices) keep their value up to this size: shapes and
control flow depend on them. A routing map of 4096 tokens by 256 experts has that many."""


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The true value as a real CPU tensor, or None. A real CPU tensor is its own value."""
    if not isinstance(tensor, Pretended):
        return tensor if tensor.device.type == "cpu" else None
    shadow = tensor.echo_shadow
    # A write to the storage through another tensor may have changed this one: the stamp tells.
    return shadow if shadow is not None and tensor.echo_stamp == tensor.echo_storage.version else None


def remember(tensor: Pretended, value: torch.Tensor | None) -> None:
    """Set (or with None forget) a tensor's value; other tensors on its storage forget theirs."""
    if value is not None and value.numel() > INTEGERS_MAX_ELEMENTS:
        value = None
    tensor.echo_storage.version += 1
    tensor.echo_shadow = value
    tensor.echo_stamp = tensor.echo_storage.version


def writable(value: torch.Tensor) -> torch.Tensor:
    """``value`` in memory of its own when it is small, so that views of it can be written one by one."""
    return value.clone(memory_format=torch.contiguous_format) if value.numel() <= SHADOW_MAX_ELEMENTS else value


def written_in_place(tensor: Pretended) -> None:
    """The shadow has just been written: views of a small storage share its memory, those of a large one do not."""
    if _partial(tensor):
        tensor.echo_storage.version += 1
        tensor.echo_stamp = tensor.echo_storage.version


def _partial(tensor: Pretended) -> bool:
    """The storage is larger than a shadow: tensors on it do not share one real memory."""
    return tensor.echo_storage.bytes > SHADOW_MAX_ELEMENTS * tensor.dtype.itemsize


def limit(dtype: torch.dtype) -> int:
    """Elements up to which a value of this dtype is kept."""
    return SHADOW_MAX_ELEMENTS if dtype.is_floating_point or dtype.is_complex else INTEGERS_MAX_ELEMENTS


def small_enough(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this size and dtype keeps its value."""
    return tensor.numel() <= limit(tensor.dtype)


def run_on_shadows(func, args, kwargs, tensors: list[torch.Tensor]) -> Any:
    """Result of the op on the true values, or None when some are unknown or the CPU cannot compute it."""
    values: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        value = known(tensor)
        if value is None or value.numel() > INTEGERS_MAX_ELEMENTS:
            return None
        values[id(tensor)] = value

    def real(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return values[id(item)]
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return None if isinstance(item, torch.Generator) else item

    try:
        return func(*tree_map(real, args), **tree_map(real, kwargs))
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return None
