"""Patches of torch's tensors, modules and optimizers that pretended tensors need (the table is `patches`)."""

from __future__ import annotations

from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch._weights_only_unpickler as weights_only
import torch.optim.optimizer as optimizer
import torch.utils._device
import torch.utils._foreach_utils as foreach_utils

from echo_hooks.devices.pinned import is_pinned, pin
from echo_hooks.devices.pretended import Pretended, rebuild
from echo_hooks.patching import Patch

_base_data: Any = torch._C.TensorBase.data  # the descriptor; stubs know only the attribute behind it
# Filled while torch.tensor is torch's own: by this list a `torch.device` context knows what to send to its device.
torch.utils._device._device_constructors()


def patches() -> list[Patch]:
    """What is replaced in torch for pretended tensors, and why."""
    with_pretended = lambda types: [*types, Pretended]  # noqa: E731
    return [
        Patch(torch.nn.Module, "_apply", lambda _: _apply, "parameters keep their identity on the device", "2.9"),
        Patch(torch.Tensor, "data", lambda _: _data, "`p.data = q` takes q's storage along", "2.9", create=True),
        Patch(torch, "tensor", _tensor, "reads the items of pretended scalars in C++, below any mode", "2.9"),
        Patch(torch, "as_tensor", _as_tensor, "as torch.tensor", "2.9"),
        Patch(torch.Tensor, "new_tensor", _new_tensor, "as torch.tensor", "2.9", create=True),
        Patch(torch.Tensor, "pin_memory", lambda _: _pin_memory, "needs a driver", "2.9", create=True),
        Patch(torch.Tensor, "is_pinned", lambda _: _is_pinned, "needs a driver", "2.9", create=True),
        Patch(optimizer, "_foreach_supported_types", with_pretended, "else optimizers loop over single tensors", "2.9"),
        Patch(foreach_utils, "_foreach_supported_types", with_pretended, "gradient clipping likewise", "2.9"),
        Patch(
            fake_tensor.FakeTensorMode,
            "avoid_device_init",
            lambda _: property(lambda self: True),
            "is_available() answers True, which switches real device initialisation on",
            "2.9",
            create=True,
        ),
        Patch(
            weights_only,
            "_marked_safe_globals_set",
            lambda known: known | {rebuild},
            "torch.load refuses what it does not know; a saved pretended tensor is only metadata",
            "2.9",
        ),
        Patch(fake_tensor.log, "disabled", lambda _: True, "it logs what is raised into the script anyway", "2.9"),
        Patch(fake_tensor, "init_gpu_context", lambda _: lambda device: None, "initialises a device", "2.9"),
    ]


# ---- modules ----


def _apply(self, fn, recurse=True):
    """nn.Module._apply that keeps each parameter the same object whatever it becomes."""
    if recurse:
        for child in self.children():
            child._apply(fn, recurse)
    for parameter in self._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            new = fn(parameter)
            grad = None if parameter.grad is None else fn(parameter.grad)
        if new is not parameter:
            parameter.grad = None
            if new.is_meta == parameter.is_meta:
                _set_data(parameter, new)
            else:
                _become(parameter, new)
        if grad is not None:
            parameter.grad = grad
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


# ---- Tensor.data ----


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, Pretended) and isinstance(value, Pretended) and tensor.device == value.device:
        tensor.echo_become(value)
        tensor.echo_shadow, tensor.echo_stamp = value.echo_shadow, value.echo_stamp
    elif type(tensor) is type(value) and not isinstance(tensor, Pretended):
        _base_data.__set__(tensor, value)
    elif isinstance(tensor, Pretended) or isinstance(value, Pretended) or type(tensor) is not torch.nn.Parameter:
        _become(tensor, value)
    else:
        _base_data.__set__(tensor, value)


_data = property(_base_data.__get__, _set_data)


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor`` takes the class, device and storage of ``value`` and stays the same Python object.

    Attributes that frameworks hang on parameters (tensor_model_parallel, ...) stay with it.
    """
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new = value.detach()
    new = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new.requires_grad_(tensor.requires_grad)
    for name, attribute in tensor.__dict__.items():
        if not name.startswith("echo_"):
            new.__dict__.setdefault(name, attribute)
    _swap(tensor, new)


def _swap(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """torch.utils.swap_tensors for objects that nobody else refers to from C++, weak references allowed.

    Its refusal of weak references guards memos keyed by tensor identity; the identity stays here.
    """
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, new)


# ---- construction from lists ----


def _plain(data):
    """Pretended entries of a (nested) list as numbers; the rest as it is."""
    if isinstance(data, Pretended):
        return data.tolist()
    if isinstance(data, (list, tuple)) and any(isinstance(x, (Pretended, list, tuple)) for x in data):
        return type(data)([_plain(x) for x in data]) if type(data) in (list, tuple) else data
    return data


def _tensor(original):
    def tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
        if isinstance(data, Pretended):
            copy = data.detach().clone().to(device=device, dtype=dtype)
            return copy.requires_grad_(requires_grad)
        return original(_plain(data), dtype=dtype, device=device, requires_grad=requires_grad)

    return tensor


def _as_tensor(original):
    def as_tensor(data, dtype=None, device=None):
        if isinstance(data, torch.Tensor):
            return data.to(device=data.device if device is None else device, dtype=dtype or data.dtype)
        return original(_plain(data), dtype=dtype, device=device)

    return as_tensor


def _new_tensor(original):
    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
        device = self.device if device is None else device
        return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)

    return new_tensor


def _pin_memory(self, *_args, **_kwargs):
    return pin(self)


def _is_pinned(self, *_args, **_kwargs):
    return is_pinned(self)
