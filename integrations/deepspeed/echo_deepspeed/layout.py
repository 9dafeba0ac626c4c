"""DeepSpeed's layout, read from the frames of its own error: one line of arithmetic with the nearest legal choice."""

from __future__ import annotations

import sys
from types import FrameType

from echo_hooks.layouts import frames, split_line, world_line


def explain(error: BaseException) -> str | None:
    """The arithmetic that does not work out behind ``error``; None where nothing of it is wrong."""
    if "deepspeed" not in sys.modules:
        return None
    found = [line for frame in frames(error) if (line := _line(frame))]
    return found[-1] if found else None


def _line(frame: FrameType) -> str | None:
    values, name = frame.f_locals, frame.f_code.co_name
    if "deepspeed" not in frame.f_code.co_filename.replace("\\", "/"):
        return None
    if name == "_batch_assertion":
        return _batch(values.get("self"))
    if name == "__init__" and type(values.get("self")).__name__ == "PipelineModule":
        stages, world = values.get("num_stages"), _world()
        return world_line(world, {"stages": stages}) if isinstance(stages, int) else None
    if name == "__init__" and type(values.get("self")).__name__ == "MoE":
        experts, size = values.get("num_experts"), values.get("ep_size")
        if isinstance(experts, int) and isinstance(size, int):
            return split_line("experts", experts, "EP", size)
    if name == "_ensure_divisibility":
        return world_line(values["numerator"], {"groups of": values["denominator"]}, "groups")
    if name == "initialize_sequence_parallel" and isinstance(values.get("sequence_parallel_size"), int):
        return world_line(_world(), {"SP": values["sequence_parallel_size"]})
    return None


def _batch(config) -> str | None:
    """train_batch_size = micro-batch x accumulation x data-parallel world; ``config``: a DeepSpeedConfig."""
    try:
        total, micro = int(config.train_batch_size), int(config.train_micro_batch_size_per_gpu)
        steps, world = int(config.gradient_accumulation_steps), int(config.world_size)
    except (AttributeError, TypeError, ValueError):
        return None
    right = micro * steps * world
    if total == right:
        return None
    line = (
        f"train_batch_size {total} is not {micro} (train_micro_batch_size_per_gpu) x {steps} "
        f"(gradient_accumulation_steps) x {world} (data-parallel world that DeepSpeed sees) = {right}; nearest legal: "
        f"train_batch_size {right}"
    )
    if micro * world and total % (micro * world) == 0:
        line += f", or gradient_accumulation_steps {total // (micro * world)}"
    elif steps * world and total % (steps * world) == 0:
        line += f", or train_micro_batch_size_per_gpu {total // (steps * world)}"
    return line


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1
