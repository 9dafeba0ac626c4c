"""The pretended CUDA device: native part, tables of patches, attention; put in together and taken out exactly."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

import torch

from echo_hooks.devices import selftest
from echo_hooks.devices.accelerator_api import accelerator_patches
from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.attention import AttentionKernels
from echo_hooks.devices.compilation import compilation_patches
from echo_hooks.devices.cuda import cuda_patches
from echo_hooks.devices.fused import FusedKernels
from echo_hooks.devices.memory import memory_patches
from echo_hooks.devices.native import NativeDevice
from echo_hooks.devices.random import random_patches
from echo_hooks.devices.recurrent import RecurrentKernels
from echo_hooks.devices.state import DeviceState, activate, is_active
from echo_hooks.devices.streams import stream_patches
from echo_hooks.devices.typed_tensors import typed_tensor_patches
from echo_hooks.errors import UsageError
from echo_hooks.graph.recorder import Recorder
from echo_hooks.patching import Patch, PatchSet

if TYPE_CHECKING:
    from echo_hooks.hardware.accelerator import Accelerator


def device_patches(device_count: int) -> list[Patch]:
    """Every Python name that the pretended device replaces."""
    return [
        *typed_tensor_patches(),  # first: it asks whether this torch was built with CUDA
        *cuda_patches(),
        *stream_patches(),
        *memory_patches(),
        *random_patches(device_count),
        *accelerator_patches(),
        *compilation_patches(),
    ]


class PretendedCuda:
    """``device_count`` GPUs of the kind ``accelerator``, of which this process drives number ``local_rank``.

    ``install`` belongs right after ``import torch``: frameworks keep what they find when they are imported. It raises
    UsageError where this torch or machine cannot be dealt with, and leaves nothing changed then.
    """

    def __init__(
        self,
        recorder: Recorder,
        accelerator: Accelerator,
        *,
        device_count: int,
        local_rank: int,
        allocator: CachingAllocator,
        nccl_version: str = "2.28.9",
    ):
        if accelerator.vendor not in ("nvidia", "amd"):
            raise NotImplementedError(f"{accelerator.name} is not a CUDA device: only nvidia and amd can be pretended")
        if not 0 <= local_rank < device_count <= 127:
            raise UsageError(f"local rank {local_rank} of {device_count} devices: a node has 1 to 127 devices")
        self._state = DeviceState(recorder, accelerator, device_count, local_rank, allocator, nccl_version)
        self._native = NativeDevice(device_count)
        self._patches = PatchSet(device_patches(device_count))
        self._kernels = (AttentionKernels(), FusedKernels(), RecurrentKernels())
        self._installed = False

    @property
    def current_device(self) -> int:
        """Index of the device that the script selected; 0 at first, as in CUDA."""
        return self._state.device

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._state.select(index)

    def install(self) -> None:
        """Put the device in; the script may be run afterwards. Raises RuntimeError when one is in already."""
        if is_active():
            raise RuntimeError("a pretended device is installed already")
        if torch.cuda.is_initialized():
            raise UsageError(
                "this process has used a real GPU already: "
                "start the simulation in a new process, with CUDA_VISIBLE_DEVICES set to nothing"
            )
        activate(self._state)
        self._state.on_select = self._native.select
        self._installed = True
        atexit.register(self.remove)  # C++ objects are torn down after Python's tables are gone
        try:
            self._native.install()
            self._patches.install()
            for kernels in self._kernels:
                kernels.install()
            selftest.check()
        except BaseException:
            self.remove()
            raise
        if self._state.accelerator.vendor == "amd":
            self._state.note(
                f"{self._state.accelerator.name} answers through torch.cuda as a CUDA device; "
                "branches of the script for ROCm (torch.version.hip) are not taken"
            )

    def retarget(self, recorder: Recorder, local_rank: int, allocator: CachingAllocator) -> None:
        """Serve another rank of the same kind of node, e.g. in a child forked after ``install``."""
        if not 0 <= local_rank < self._state.device_count:
            raise UsageError(f"local rank {local_rank} of {self._state.device_count} devices")
        self._state.retarget(recorder, local_rank, allocator)

    def remove(self) -> None:
        """Take everything out again: torch has the very objects that it had before. Does nothing the second time."""
        if not self._installed:
            return
        self._installed = False
        atexit.unregister(self.remove)
        for kernels in self._kernels:
            kernels.remove()
        self._patches.remove()
        self._native.remove()
        activate(None)
