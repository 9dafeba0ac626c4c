"""The wrapper tensor: says it lives on a device, holds no data, knows its storage and, when small, its true value."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from echo_hooks import host_tensors

SHADOW_MAX_ELEMENTS = 256
"""Pretended tensors of up to this many elements carry their true value for as long as it is known."""


_base_data: Any = torch._C.TensorBase.data


class StorageOwner(Protocol):
    """Who allocates: the capture's memory."""

    def free(self, storage: Storage) -> None: ...

    def resize(self, storage: Storage, bytes: int) -> None: ...

    def pin(self, storage: Storage) -> None: ...


class Storage:
    """Stands for one device allocation; shared by a tensor and its views, freed when the last of them goes."""

    __slots__ = ("__weakref__", "bytes", "device", "handle", "number", "owner", "stream", "version")

    def __init__(self, number: int, bytes: int, device: torch.device, stream: int, owner: StorageOwner):
        self.number = number
        self.bytes = bytes
        self.device = device
        self.stream = stream
        self.owner = owner
        self.handle: Any = None  # the block of device or host memory
        self.version = 0  # bumped by writes whose result is not known

    def __del__(self):
        if self.handle is not None:
            self.owner.free(self)


class StorageView:
    """What ``untyped_storage()`` of a pretended tensor answers: sizes, an address, and resizing (FSDP frees by it)."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def size(self) -> int:
        return self._storage.bytes

    nbytes = size
    __len__ = size

    def resize_(self, bytes: int) -> StorageView:
        self._storage.owner.resize(self._storage, bytes)
        return self

    def data_ptr(self) -> int:
        # Unique per storage, 0 once freed, as programs that look for shared or freed memory expect.
        return self._storage.number << 42 if self._storage.bytes else 0

    @property
    def _cdata(self) -> int:
        return self._storage.number

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def is_cuda(self) -> bool:
        return self._storage.device.type == "cuda"


class TypedStorageView:
    """What ``_typed_storage()`` answers: the same storage in elements (FullyShardedDataParallel frees by it)."""

    def __init__(self, storage: Storage, dtype: torch.dtype):
        self._untyped_storage = StorageView(storage)
        self.dtype = dtype

    def untyped(self) -> StorageView:
        return self._untyped_storage

    def _size(self) -> int:
        return self._untyped_storage.size() // self.dtype.itemsize

    size = __len__ = _size

    def _resize_(self, elements: int) -> TypedStorageView:
        self._untyped_storage.resize_(elements * self.dtype.itemsize)
        return self

    resize_ = _resize_

    def _data_ptr(self) -> int:
        return self._untyped_storage.data_ptr()

    data_ptr = _data_ptr

    @property
    def device(self) -> torch.device:
        return self._untyped_storage.device

    @property
    def is_cuda(self) -> bool:
        return self._untyped_storage.is_cuda


class Pretended(torch.Tensor):
    """A tensor on ``device`` without data.

    Attributes:
        echo_storage: its Storage.
        echo_shadow: a real CPU tensor with the true value, or None when the value is not known.
        echo_stamp: the storage's version for which the shadow holds.
    """

    echo_storage: Storage
    echo_shadow: torch.Tensor | None
    echo_stamp: int

    @staticmethod
    def __new__(cls, size, stride, offset, dtype, device, storage, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor.echo_storage = storage
        tensor.echo_shadow = None
        tensor.echo_stamp = 0
        return tensor

    # Ops reach the capture's dispatch mode; this is only met in a thread where the mode is not active.
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # stub: no classmethod
        handler = _HANDLER[0]
        if handler is None:
            raise RuntimeError(f"{func}: a pretended tensor was used outside a simulation")
        return handler(func, types, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # stub: a method

    # ---- what C++ would read from memory ----

    def tolist(self):
        return self._on_host().tolist() if self.dim() else self.item()

    def numpy(self, *, force: bool = False):
        if self.device.type != "cpu" and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self._on_host().numpy()

    def _on_host(self) -> torch.Tensor:
        """A real CPU tensor; of one too large to know its value: zeros."""
        host = self.detach().to("cpu")
        if not isinstance(host, Pretended):
            return host
        return host_tensors.zeros((), host.dtype).expand(host.shape).clone()  # a large factory would be pretended again

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents=None):  # printing must neither read nor record
        return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype})"

    # ---- storage ----

    def echo_become(self, other: Pretended) -> Pretended:
        """Become what ``other`` is, with its storage, and stay the same Python object."""
        _base_data.__set__(self, other)
        self.echo_storage = other.echo_storage
        return self

    def untyped_storage(self):
        return StorageView(self.echo_storage)

    def _typed_storage(self):
        return TypedStorageView(self.echo_storage, self.dtype)

    storage = _typed_storage

    def data_ptr(self) -> int:
        base = StorageView(self.echo_storage).data_ptr()
        return base + int(self.storage_offset()) * self.dtype.itemsize if base else 0

    def record_stream(self, _stream) -> None:
        """Lengthens the life of the block to what the stream has reached at the free; the allocator model frees at
        the moment of the free, so nothing is to do."""

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copy = self.clone()
        copy.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if not name.startswith("echo_"):
                copy.__dict__[name] = value
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, _protocol):
        parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (tuple(self.shape), self.stride(), self.dtype, str(self.device), self.requires_grad, parameter)


def rebuild(shape, stride, dtype, device, requires_grad, parameter):
    """A pretended tensor read back from a checkpoint: the same metadata, no values."""
    device = torch._utils._get_restore_location(device)  # torch.load's map_location
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


_HANDLER: list = [None]


def set_handler(handler) -> None:
    """``handler(func, types, args, kwargs)`` serves ops on pretended tensors where no dispatch mode is active."""
    _HANDLER[0] = handler
