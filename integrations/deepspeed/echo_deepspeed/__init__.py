"""DeepSpeed: which accelerator it should see, what it would compile for minutes, what it does once."""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from echo_hooks.integrations import Integration
from echo_hooks.patching import Patch


def _comm_torch(module: ModuleType) -> list[Patch]:
    """TorchBackend builds a shared-memory extension for CPU collectives with a compiler; nothing here would use it."""
    return [Patch(module, "build_shm_op", lambda _: lambda: None, "compiles an extension", "0.16")]


def _zero3_order(module: ModuleType) -> list[Patch]:
    """ZeRO-3 notes in which order the first step uses its parameters; as the next one begins, the ranks compare."""

    def compared_once(original):
        def compare(ints):
            with dist.group.WORLD.world.recorder.one_off():
                return original(ints)

        return compare

    return [Patch(module, "assert_ints_same_as_other_ranks", compared_once, "no part of a step that repeats", "0.16")]


def _no_nvml(module: ModuleType) -> list[Patch]:
    """The accelerator asks the driver's library, not torch, for free memory, by numbers from CUDA_VISIBLE_DEVICES."""
    why = "the GPU of the driver is not the script's, and hidden"
    return [Patch(module.CUDA_Accelerator, "_init_pynvml", lambda _: lambda self: None, why, "0.16")]


integration = Integration(
    name="deepspeed",
    frameworks=("deepspeed",),
    preload=("deepspeed",),
    patches={
        "deepspeed.accelerator.cuda_accelerator": _no_nvml,
        "deepspeed.comm.torch": _comm_torch,
        "deepspeed.runtime.zero.partitioned_param_coordinator": _zero3_order,
    },
    environment={"DS_ACCELERATOR": "cuda"},
)
