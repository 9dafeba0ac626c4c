"""Megatron: names of its groups, and stand-ins for the packages that it needs a real device for."""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from echo_hooks.integrations import Integration
from echo_hooks.patching import Patch
from echo_megatron import layout
from echo_megatron.stand_ins import STAND_INS

GROUP_NAMES = {
    # group_desc given by megatron.core.parallel_state -> the name Megatron's users have for it
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_GLOO": "dp-gloo",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp-cp-gloo",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp-cp-ag",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp-intra",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp-cp-intra-gloo",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "cp-a2a",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1": "cp-p2p",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos-embd",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "ep-dp",
    "EXPERT_DATA_PARALLEL_GROUP_GLOO": "ep-dp-gloo",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra-dist-opt",
}


def _torch_norm(module: ModuleType) -> list[Patch]:
    """WrappedTorchNorm refuses sequence parallelism, which Transformer Engine's and Apex's norms serve.

    The norm itself is the same; only its parameters must carry the mark by which their gradients are reduced over
    the tensor-parallel group.
    """

    def make(original):
        def new(cls, config, hidden_size, *args, **kwargs):
            if not config.sequence_parallel:
                return original.__func__(cls, config, hidden_size, *args, **kwargs)
            config.sequence_parallel = False
            try:
                norm = original.__func__(cls, config, hidden_size, *args, **kwargs)
            finally:
                config.sequence_parallel = True
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
            return norm

        return staticmethod(new)

    return [Patch(module.WrappedTorchNorm, "__new__", make, "sequence parallel norm without TE", "0.12")]


def _moe_utils(module: ModuleType) -> list[Patch]:
    """The router's GEMM looks up a name that is only bound where Transformer Engine imports."""
    if hasattr(module, "te_general_gemm"):
        return []
    return [Patch(module, "te_general_gemm", lambda _: None, "unbound without TE", "0.14", create=True)]


def _microbatches(module: ModuleType) -> list[Patch]:
    """The schedules tell a forward pass its micro-batch; a backward pass is known by the output it starts from."""
    of_output: dict[int, int] = {}

    def forward(original):
        def forward_step(*args, current_microbatch=None, **kwargs):
            if current_microbatch is None:
                return original(*args, **kwargs)
            with dist.group.WORLD.world.recorder.labelled(int(current_microbatch)):
                result = original(*args, current_microbatch=current_microbatch, **kwargs)
            of_output[id(result[0] if isinstance(result, tuple) else result)] = int(current_microbatch)
            return result

        return forward_step

    def backward(original):
        def backward_step(input_tensor, output_tensor, *args, **kwargs):
            with dist.group.WORLD.world.recorder.labelled(of_output.pop(id(output_tensor), -1)):
                return original(input_tensor, output_tensor, *args, **kwargs)

        return backward_step

    return [
        Patch(module, "forward_step", forward, "names its micro-batch", "0.12"),
        Patch(module, "backward_step", backward, "belongs to a micro-batch", "0.12"),
    ]


def _uneven_dtensor(module: ModuleType) -> list[Patch]:
    """Megatron's FSDP asks all ranks whether their shards cover each parameter; unknown shards are like one's own."""
    if not hasattr(module, "validate_uneven_dtensor"):
        return []
    return [
        Patch(
            module, "validate_uneven_dtensor", lambda _: lambda dtensor: None, "the other ranks' shards differ", "0.14"
        )
    ]


def _fsdp_adapter(module: ModuleType) -> list[Patch]:
    """Tensor-parallel ranks take over the generators' states of their first: objects that are not handed on here.

    Each rank keeps its own, whose values nothing of a simulation depends on.
    """

    def make(original):
        def load(states):
            if states is not None:
                original(states)

        return load

    if not hasattr(module, "_load_rng_state_dict"):  # before 0.16
        return []
    return [Patch(module, "_load_rng_state_dict", make, "states of another rank's generators", "0.16")]


integration = Integration(
    name="megatron",
    frameworks=("megatron",),
    preload=(
        "megatron.core",
        "megatron.core.parallel_state",
        "megatron.core.models.gpt",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "megatron.core.distributed",
    ),
    patches={
        "megatron.core.transformer.torch_norm": _torch_norm,
        "megatron.core.transformer.moe.moe_utils": _moe_utils,
        "megatron.core.transformer.transformer_block": layout.patches,
        "megatron.core.pipeline_parallel.schedules": _microbatches,
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor": _uneven_dtensor,
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _fsdp_adapter,
    },
    group_names=GROUP_NAMES,
    explain=layout.explain,
    stand_ins=STAND_INS,
)
