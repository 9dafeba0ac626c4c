"""DeepSpeed: which accelerator it should see, what it would compile for minutes, what it does once."""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from echo_deepspeed import config, groups, layout, op_builders
from echo_hooks.integrations import Integration
from echo_hooks.patching import Patch


def _comm_torch(module: ModuleType) -> list[Patch]:
    """TorchBackend builds a shared-memory extension for CPU collectives with a compiler; nothing here would use it."""
    return [
        *groups.patches(module),
        Patch(module, "build_shm_op", lambda _: lambda: None, "compiles an extension", "0.16"),
    ]


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


def _zero_utils(module: ModuleType) -> list[Patch]:
    """Rank 0's numbers (the order of ZeRO-3's parameters): a list too long to be kept from its trace is unknown."""

    def known_or_own(original):
        def from_rank0(lst):
            answer = original(lst)
            return list(lst) if lst and all(n == -1 for n in answer) else answer  # what the buffer held before

        return from_rank0

    return [Patch(module, "get_lst_from_rank0", known_or_own, "a list nobody knows is as this rank's own", "0.16")]


def _throughput_timer(module: ModuleType) -> list[Patch]:
    """The timer synchronises the device twice a step from its third step on; Echo measures the second."""

    def from_the_first(original):
        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.start_step = 0

        return init

    return [Patch(module.ThroughputTimer, "__init__", from_the_first, "later steps synchronise, so must all", "0.16")]


integration = Integration(
    name="deepspeed",
    frameworks=("deepspeed",),
    preload=("deepspeed",),
    patches={
        "deepspeed.accelerator.cuda_accelerator": _no_nvml,
        "deepspeed.comm.torch": _comm_torch,
        "deepspeed.ops.op_builder.builder": op_builders.patches,
        "deepspeed.runtime.config": config.patches,
        "accelerate.utils.dataclasses": config.plugin_patches,
        "deepspeed.utils.timer": _throughput_timer,
        "deepspeed.runtime.zero.utils": _zero_utils,
        "deepspeed.runtime.zero.partitioned_param_coordinator": _zero3_order,
    },
    environment={"DS_ACCELERATOR": "cuda"},
    explain=layout.explain,
    pretended_only=frozenset({"deepspeed.ops.op_builder.builder"}),
)
