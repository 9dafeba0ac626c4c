"""A small accelerator and a small dispatch mode: enough of what capture does to run scripts on the pretended device."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from echo_hooks.devices.pretended import Pretended, Storage

H100 = SimpleNamespace(
    name="h100-sxm",
    vendor="nvidia",
    product="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    multiprocessors=132,
    memory_bytes=80 * 2**30,
    l2_bytes=50 * 2**20,
)


class Pretend(TorchDispatchMode):
    """Ops that touch cuda are asked of FakeTensor and answered with Pretended tensors; the rest runs for real.

    ``ops``: names of the ops seen on the device, in order.
    """

    def __init__(self):
        super().__init__()
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self.ops: list[str] = []

    def __enter__(self):
        self._saved = (fake_tensor.init_gpu_context, fake_tensor.FakeTensorMode.__dict__["avoid_device_init"])
        fake_tensor.init_gpu_context = lambda *_: None
        fake_tensor.FakeTensorMode.avoid_device_init = True
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(1, device="cuda") makes its CPU tensor for real
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        fake_tensor.init_gpu_context, fake_tensor.FakeTensorMode.avoid_device_init = self._saved
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == "cuda" and device.index is None:
                kwargs["device"] = torch.device("cuda", torch.cuda.current_device())
        on_device = torch.device(kwargs["device"]).type == "cuda" if kwargs.get("device") is not None else False
        if not on_device and not any(issubclass(t, Pretended) for t in types):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        self.ops.append(func.overloadpacket.__name__)
        if "generator" in kwargs:  # a meta kernel takes none
            kwargs["generator"] = None
        seen: dict[int, Pretended] = {}

        def unwrap(value):
            if isinstance(value, Pretended):
                seen[id(value.twin)] = value
                return value.twin
            if isinstance(value, torch.Tensor):
                with self.fake:
                    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            return value

        def wrap(value):
            if not isinstance(value, torch.Tensor):
                return value
            return seen[id(value)] if id(value) in seen else pretended(value)

        results = self.fake.dispatch(func, types, tree_map(unwrap, args), tree_map(unwrap, kwargs))
        return tree_map(wrap, results)


class NoMemory:
    """An owner of storages that keeps no books."""

    def free(self, storage: Storage) -> None: ...

    def resize(self, storage: Storage, bytes: int) -> None: ...


def pretended(twin: torch.Tensor) -> Pretended:
    storage = Storage(0, twin.numel() * twin.element_size(), twin.device, 0, NoMemory())
    tensor = Pretended(twin.size(), twin.stride(), twin.storage_offset(), twin.dtype, twin.device, storage)
    tensor.twin = twin.detach()
    return tensor
