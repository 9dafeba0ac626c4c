"""The one interface behind which a kind of device hides from the rest of Echo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.graph.recorder import Recorder

if TYPE_CHECKING:
    from echo_hooks.hardware.accelerator import Accelerator


class Device(Protocol):
    """What the session asks of a device; nobody else asks which kind it is."""

    current_device: int

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def retarget(self, recorder: Recorder, local_rank: int, allocator: CachingAllocator) -> None: ...


class Cpu:
    """Scripts that train on the CPU: their tensors are real, there is nothing to install."""

    current_device = 0

    def install(self) -> None:
        return None

    def remove(self) -> None:
        return None

    def retarget(self, recorder: Recorder, local_rank: int, allocator: CachingAllocator) -> None:
        return None


def open_device(
    kind: str,
    recorder: Recorder,
    accelerator: Accelerator,
    *,
    device_count: int,
    local_rank: int,
    allocator: CachingAllocator,
    nccl_version: str = "2.28.9",
) -> Device:
    """The device of a kind: "pretended" (a CUDA device that is not there) or "cpu".

    Raises NotImplementedError for "cuda" and "npu", the real ones.
    """
    if kind == "cpu":
        return Cpu()
    if kind == "pretended":
        from echo_hooks.devices.pretended_cuda import PretendedCuda

        return PretendedCuda(
            recorder,
            accelerator,
            device_count=device_count,
            local_rank=local_rank,
            allocator=allocator,
            nccl_version=nccl_version,
        )
    if kind in ("cuda", "npu"):
        raise NotImplementedError(f"running local ops on a real {kind} device is not built: use the pretended device")
    raise ValueError(f'device kind {kind!r}: "pretended", "cpu", "cuda" or "npu"')
