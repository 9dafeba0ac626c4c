"""Ways to write tables of patches that hold for every torch from 2.9 on, with and without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from echo_hooks.patching import Patch


def always(value: Any) -> Callable[[Any], Any]:
    """The ``make`` of a patch that does not look at the original."""
    return lambda original: value


def everywhere(owners: Iterable[ModuleType], names: Mapping[str, Any], why: str) -> list[Patch]:
    """Replace each name in the first owner, and in the other owners where they have a reference of their own."""
    first, *others = owners
    patches = []
    for name, value in names.items():
        patches.append(Patch(first, name, always(value), why))
        patches += [Patch(owner, name, always(value), why) for owner in others if name in vars(owner)]
    return patches


def bindings(names: Mapping[str, Any], why: str) -> list[Patch]:
    """Replace functions of ``torch._C``, most of which the CPU wheel does not have."""
    return [Patch(torch._C, name, always(value), why, create=True) for name, value in names.items()]


def choose_by_device(original: type, make_cuda: Callable[..., Any], default: str = "cuda") -> type:
    """A class that makes ``make_cuda(device, ...)`` for CUDA devices and ``original(...)`` for all others.

    ``default``: the device meant when none is given. The class is usable in isinstance() like the original, of which
    it is a subclass.
    """

    class Choose(type(original)):  # type: ignore[misc]
        def __call__(cls, *args, **kwargs):
            device = kwargs.get("device", args[0] if args else None)
            return (make_cuda if _is_cuda(default if device is None else device) else original)(*args, **kwargs)

        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass) -> bool:
            return issubclass(subclass, original)

    return Choose(original.__name__, (original,), {"__doc__": original.__doc__, "__module__": original.__module__})


def _is_cuda(device) -> bool:
    """A bare index means the accelerator."""
    return isinstance(device, int) or torch.device(device).type == "cuda"
