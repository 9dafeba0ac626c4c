"""Names for DeepSpeed's process groups, which it creates without a description."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType

import torch.distributed as dist

from echo_hooks.patching import Patch

NAMES = {
    # function of DeepSpeed's that makes groups -> names in the order in which its lines are first reached
    "_clone_world_group": ("dp",),
    "_create_model_parallel": ("dp", "mp"),
    "_init_tp_groups_with_new_group": ("dp", "tp"),
    "_create_expert_and_data_parallel": ("ep-dp", "ep"),
    "_create_expert_data_and_model_parallel": ("ep", "ep-dp"),
    "_get_local_all_to_all_group": ("node", "across-nodes"),
    "_create_zero_param_parallel_group": ("hpz",),
    "_initialize_parameter_parallel_groups": ("dp",),
    "initialize_sequence_parallel": ("sp", "dp-sp"),
    "_create_sequence_parallel": ("sp", "dp"),
    "PipelineParallelGrid.__init__": ("mp", "dp", "pp", "slice"),
    "PipelineModule.__init__": ("pipeline-world",),
    "_index_tied_modules": ("tied",),
    "init_process_groups": ("pp-p2p",),
}


def patches(module: ModuleType) -> list[Patch]:
    """For deepspeed.comm.torch."""
    lines: dict[str, list[int]] = {}

    def make(_original):
        def new_group(_backend, ranks):
            return dist.new_group(ranks, group_desc=_name(lines))

        return new_group

    return [Patch(module.TorchBackend, "new_group", make, "groups get the names that their users know", "0.16")]


def _name(lines: dict[str, list[int]]) -> str | None:
    """The name of the group being made, by the function of DeepSpeed's and the line in it; None for another's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("new_group", "log_wrapper"):
        frame = frame.f_back
    if frame is None:
        return None
    function = frame.f_code.co_name
    if function == "__init__":
        function = f"{type(frame.f_locals.get('self')).__name__}.__init__"
    names = NAMES.get(function)
    if names is None:
        return None
    if "ep_ranks" in frame.f_locals or "edp_ranks" in frame.f_locals:  # with tensor parallelism: experts first
        return "ep-dp" if "edp_ranks" in frame.f_locals else "ep"
    reached = lines.setdefault(function, [])
    if frame.f_lineno not in reached:
        reached.append(frame.f_lineno)
    place = reached.index(frame.f_lineno)
    return names[place] if place < len(names) else None
