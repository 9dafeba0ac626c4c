"""What an accelerator answers when a script asks for its properties."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echo_hooks.hardware.accelerator import Accelerator

_GFX942 = (9, 4)  # what torch.cuda.get_device_capability answers on MI300 (HIP maps gfx942 to 9.4)

# Shared memory per multiprocessor and the most that one block may ask for, in KiB. CUDA C++ Programming Guide 13.0,
# "Technical Specifications per Compute Capability"; CDNA 3 ISA guide for gfx942.
_SHARED_MEMORY_KIB = {
    (7, 0): (96, 96),
    (7, 5): (64, 64),
    (8, 0): (164, 163),
    (8, 6): (100, 99),
    (8, 7): (164, 163),
    (8, 9): (100, 99),
    (9, 0): (228, 227),
    _GFX942: (64, 64),
    (10, 0): (228, 227),
    (10, 3): (228, 227),
    (12, 0): (100, 99),
}
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True)
class DeviceProperties:
    """The attributes of ``torch._C._CudaDeviceProperties``; sizes in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    max_threads_per_multi_processor: int
    gcnArchName: str
    uuid: uuid.UUID
    pci_bus_id: int
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    max_threads_per_block: int = 1024
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


def capability(accelerator: Accelerator) -> tuple[int, int]:
    """(major, minor) as torch.cuda.get_device_capability answers it."""
    return accelerator.compute_capability or _GFX942


def properties(accelerator: Accelerator, index: int) -> DeviceProperties:
    """Properties of device ``index`` of a node."""
    version = capability(accelerator)
    # A device newer than the table has at least the shared memory of the newest that it knows.
    known = max((v for v in _SHARED_MEMORY_KIB if v <= version), default=(7, 0))
    per_multiprocessor, per_block = _SHARED_MEMORY_KIB[known]
    amd = accelerator.vendor == "amd"
    return DeviceProperties(
        name=accelerator.product,
        major=version[0],
        minor=version[1],
        total_memory=accelerator.memory_bytes,
        multi_processor_count=accelerator.multiprocessors,
        L2_cache_size=accelerator.l2_bytes,
        shared_memory_per_multiprocessor=per_multiprocessor << 10,
        shared_memory_per_block_optin=per_block << 10,
        max_threads_per_multi_processor=_THREADS_PER_MULTIPROCESSOR.get(version, 2048),
        gcnArchName="gfx942" if amd else accelerator.product,
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"{accelerator.name}/{index}"),
        pci_bus_id=index,
        warp_size=64 if amd else 32,
    )
