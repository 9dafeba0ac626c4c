"""Memory statistics of the pretended device, answered by the allocator model."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.allocator_blocks import Block
from echo_hooks.devices.state import active
from echo_hooks.devices.tables import bindings, everywhere
from echo_hooks.patching import Patch

_WHY = "answered by the allocator model"


def allocator_of(device: int | None = None) -> CachingAllocator:
    """The allocator of a device: the rank's own; an empty one for devices that belong to other ranks."""
    state = active()
    if device is None or device < 0 or device == state.local_rank or state.device_count == 1:
        return state.allocator
    return CachingAllocator(state.accelerator.memory_bytes)


def memory_info(device: int | None = None) -> tuple[int, int]:
    """(free, total) bytes of a device as cudaMemGetInfo counts them, without the CUDA context."""
    total = active().accelerator.memory_bytes
    return max(0, total - allocator_of(device).reserved_bytes), total


def memory_patches() -> list[Patch]:
    """The functions of ``torch._C`` below ``torch.cuda.memory``, and its pools."""
    return bindings(
        {
            "_cuda_memoryStats": lambda device=None: nested(allocator_of(device).stats()),
            "_cuda_resetPeakMemoryStats": lambda device=None: allocator_of(device).reset_peak(),
            "_cuda_resetAccumulatedMemoryStats": lambda device=None: allocator_of(device).reset_accumulated(),
            "_cuda_emptyCache": lambda *_: active().allocator.empty_cache(),
            "_cuda_setMemoryFraction": _set_memory_fraction,
            "_cuda_getMemoryFraction": lambda device=None: 1.0,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_cudaCachingAllocator_raw_alloc": _raw_allocate,
            "_cuda_cudaCachingAllocator_raw_delete": _raw_free,
            "_cuda_cudaCachingAllocator_enable": _nothing,
            "_cuda_hostMemoryStats": lambda: {},
            "_cuda_resetPeakHostMemoryStats": _nothing,
            "_cuda_resetAccumulatedHostMemoryStats": _nothing,
            "_host_emptyCache": _nothing,
            "_cuda_record_memory_history": _no_history,
            "_cuda_record_memory_history_legacy": _no_history,
            "_cuda_memorySnapshot": _empty_snapshot,
            "_cuda_attach_out_of_memory_observer": _nothing,
            "_cuda_isHistoryEnabled": lambda: False,
        },
        _WHY,
    ) + everywhere(
        (torch.cuda.memory, torch.cuda),
        {"MemPool": MemPool, "use_mem_pool": use_mem_pool},
        "private memory pools do not change the program",
    )


class MemPool:
    """Stands in for torch.cuda.MemPool: accepted and without effect."""

    _made = 0

    def __init__(self, *args, **kwargs):
        MemPool._made += 1
        self.id = (0, MemPool._made)
        active().note("private memory pools (torch.cuda.MemPool) are counted as part of the common pool")

    def use_count(self) -> int:
        return 1

    def snapshot(self, *args, **kwargs) -> list:
        return []


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None):
    """Stands in for torch.cuda.use_mem_pool."""
    yield


def nested(flat: dict[str, int]) -> dict[str, Any]:
    """{"a.b.c": 1} as {"a": {"b": {"c": 1}}}: the form in which torch's own code expects the statistics."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        inner = result
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return result


_raw_blocks: dict[int, Block] = {}


def _raw_allocate(size: int, stream: int = 0) -> int:
    state = active()
    block = state.allocator.allocate(size, state.stream_number(state.device, int(stream)))
    _raw_blocks[block.address] = block
    return block.address


def _raw_free(address: int) -> None:
    active().allocator.free(_raw_blocks.pop(address))


def _set_memory_fraction(fraction: float, device: int | None = None) -> None:
    active().note(f"set_per_process_memory_fraction({fraction:g}) is left out of account")


def _no_history(*args, **kwargs) -> None:
    active().note("CUDA memory history is not recorded: Echo's own memory report takes its place")


def _empty_snapshot(*args, **kwargs) -> dict[str, list]:
    _no_history()
    return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}  # type: ignore


def _nothing(*args, **kwargs) -> None:
    return None
