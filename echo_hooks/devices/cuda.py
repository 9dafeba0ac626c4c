"""``torch.cuda`` on a machine without a GPU: presence, current device, properties, and the small odds and ends.

Most of ``torch.cuda`` is Python above functions of ``torch._C``. Those functions are replaced, and torch's own Python
is left to run; few names of ``torch.cuda`` itself are touched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from echo_hooks.devices.libraries import cuda_version
from echo_hooks.devices.memory import allocator_of, memory_info
from echo_hooks.devices.properties import capability, properties
from echo_hooks.devices.state import active
from echo_hooks.devices.tables import always, bindings, everywhere
from echo_hooks.patching import Patch


def cuda_patches() -> list[Patch]:
    """Everything of ``torch.cuda`` that has no file of its own."""
    return [*_presence(), *_device(), *_measurements(), *_libraries()]


def _presence() -> list[Patch]:
    why = "the script must find its GPUs"
    owners = (torch.cuda, torch.cuda.memory, torch.cuda.random)
    return [
        *everywhere(owners, {"device_count": lambda: active().device_count}, why),
        Patch(torch.cuda, "_initialized", always(True), "nothing is left to initialise"),
        Patch(torch.cuda, "_is_in_bad_fork", always(_no), "a fork server may have started this process"),
        Patch(torch.backends.cuda, "is_built", always(_yes), why),
        Patch(torch.version, "cuda", lambda found: found or cuda_version(), "version checks"),
        *bindings(
            {
                "_cuda_getDeviceCount": lambda: active().device_count,
                "_cuda_isInBadFork": _no,
                "_cuda_init": _nothing,
                "_cuda_hasPrimaryContext": lambda index: True,
                "_cuda_getCompiledVersion": lambda: int(cuda_version().replace(".", "")) * 100,
                "_cuda_getArchFlags": lambda: "sm_{}{}".format(*capability(active().accelerator)),
            },
            why,
        ),
    ]


def _device() -> list[Patch]:
    why = "the current device is the rank's own affair"
    return [
        Patch(torch.cuda, "_exchange_device", always(_exchange), why),
        Patch(torch.cuda, "_maybe_exchange_device", always(_exchange), why),
        Patch(torch.cuda, "_get_device_properties", always(_properties), "from the accelerator's file", create=True),
        *bindings(
            {
                "_cuda_getDevice": lambda: active().device,
                "_cuda_setDevice": _exchange,
                "_cuda_exchangeDevice": _exchange,
                "_cuda_maybeExchangeDevice": _exchange,
                "_cuda_synchronize": _synchronize,
                "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
                "_cuda_ipc_collect": _nothing,
                "_cuda_sleep": _nothing,
                "_cuda_get_sync_debug_mode": lambda: 0,
                "_cuda_set_sync_debug_mode": _nothing,
                "_cuda_getCurrentBlasHandle": lambda: 0,
                "_cuda_getCurrentSolverHandle": lambda: 0,
                "_cuda_clearCublasWorkspaces": _nothing,
            },
            why,
        ),
    ]


def _measurements() -> list[Patch]:
    """What a driver measures cannot be known: answered with 0, each answer counted as an assumption."""
    names = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
    why = "there is no driver to ask"
    patches = [Patch(torch.cuda, name, always(_measured(name)), why, create=True) for name in names]
    return [*patches, Patch(torch.cuda, "device_memory_used", always(_memory_used), why, create=True)]


def _libraries() -> list[Patch]:
    return [
        Patch(torch.cuda, "_cudart", always(_RUNTIME), "profiler and host-register calls"),
        Patch(torch.cuda.nvtx, "_nvtx", always(_Ranges()), "ranges are for a profiler"),
        *bindings(
            {"_nccl_version": _nccl_version, "_nccl_version_suffix": lambda: b""},
            "feature checks of scripts and frameworks; answered by the version that the simulation assumes",
        ),
    ]


def _exchange(index: int) -> int:
    """Select a device; returns the former one. A negative index changes nothing."""
    return active().select(index) if index >= 0 else -1


def _synchronize() -> int:
    active().recorder.sync()
    return 0


def _properties(index: int):
    return properties(active().accelerator, index)


def _measured(name: str):
    def answer(device: Any = None) -> int:
        active().recorder.assume(f"torch.cuda.{name}", 0)
        return 0

    return answer


def _memory_used(device: Any = None) -> int:
    return allocator_of(_index(device)).reserved_bytes


def _nccl_version() -> int:
    """Packed as torch.cuda.nccl.version unpacks it."""
    major, minor, patch = (int(part) for part in active().nccl_version.split("."))
    return major << 32 | minor << 16 | patch


def _index(device: Any) -> int | None:
    return device if device is None or isinstance(device, int) else torch.device(device).index


def _yes(*args, **kwargs) -> bool:
    return True


def _no(*args, **kwargs) -> bool:
    return False


def _nothing(*args, **kwargs) -> None:
    return None


def _success(*args, **kwargs) -> int:
    return 0


class _Runtime(SimpleNamespace):
    """Stands in for the CUDA runtime module (torch.cuda.cudart())."""

    cudaError = SimpleNamespace(success=0)
    cudaGetErrorString = staticmethod(lambda code: f"CUDA error {code}")
    cudaMemGetInfo = staticmethod(memory_info)
    cudaProfilerStart = cudaProfilerStop = staticmethod(_success)
    cudaHostRegister = cudaHostUnregister = staticmethod(_success)
    cudaDeviceSynchronize = staticmethod(_synchronize)


_RUNTIME = _Runtime()


class _Ranges:
    """Stands in for the NVTX module: keeps the depth, as rangePushA answers it."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth = max(0, self._depth - 1)
        return self._depth

    rangeStartA = rangeEnd = markA = deviceRangeStart = deviceRangeEnd = staticmethod(_success)
