"""``torch.cuda.FloatTensor`` and its kin on a torch built without CUDA."""

from __future__ import annotations

import torch

from echo_hooks.devices.tables import always
from echo_hooks.patching import Patch

_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class _TypedTensor(type):
    """A class whose instances are all CUDA tensors of one dtype, whatever their Python type."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args):
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        size = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device="cuda")


def typed_tensor_patches() -> list[Patch]:
    """Nothing for a torch with CUDA, whose own classes recognise pretended tensors and make them."""
    if torch.backends.cuda.is_built():
        return []
    why = "frameworks put these into isinstance() tuples when they are imported"
    patches = [Patch(torch.cuda, name, always(_make(name, dtype)), why) for name, dtype in _DTYPES.items()]
    return [*patches, Patch(torch, "set_default_tensor_type", _default_tensor_type, why)]


def _make(name: str, dtype: torch.dtype) -> type:
    # Tensor.type(cls) goes by the class's name in C++, so that name has to be the whole of it.
    return _TypedTensor(f"torch.cuda.{name}", (), {"dtype": dtype, "__module__": "torch.cuda"})


def _default_tensor_type(original):
    def set_default_tensor_type(t, /):
        found = getattr(torch.cuda, t.rsplit(".", 1)[1], t) if isinstance(t, str) and t.startswith("torch.cuda.") else t
        if isinstance(found, _TypedTensor):
            torch.set_default_dtype(found.dtype)
            torch.set_default_device("cuda")
        else:
            torch.set_default_device(None)
            original(t)

    return set_default_tensor_type
