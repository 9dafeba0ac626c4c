"""Megatron's layout, read from the frames of its own error: one line of arithmetic with the nearest legal choice."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist

from echo_hooks.layouts import frames, split_line, uneven_stages, world_line
from echo_hooks.patching import Patch

_GROUPS = {
    # parameter of parallel_state.initialize_model_parallel -> the name its users have for it
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
_CONFIG = {
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "num_query_groups": "kv",
    "num_moe_experts": "experts",
    "virtual_pipeline_model_parallel_size": "VPP",
    "num_layers_in_first_pipeline_stage": "first",
    "num_layers_in_last_pipeline_stage": "last",
    "account_for_embedding_in_pipeline_split": "with_embedding",
    "account_for_loss_in_pipeline_split": "with_loss",
    "pipeline_model_parallel_layout": "custom",
}


def explain(error: BaseException) -> str | None:
    """The arithmetic that does not work out in the layout behind ``error``; None where nothing of it is wrong."""
    if "megatron.core" not in sys.modules:
        return None
    facts: dict[str, int] = {}
    for frame in frames(error):
        facts.update(_facts(frame))
    return next((line for line in _lines(facts) if line), None)


def _lines(f: Mapping[str, int]):
    """One line for each rule that the facts break; rules whose facts are missing are left out."""
    if "world" in f:
        dense = {name: f.get(name, 1) for name in ("TP", "PP", "CP")}
        yield world_line(f["world"], dense)
        if f.get("EP", 1) > 1:
            experts = {"ETP": f.get("ETP", f.get("TP", 1)), "EP": f["EP"], "PP": f.get("PP", 1)}
            yield world_line(f["world"], experts, "EDP", {"ETP": _source("expert-tensor-parallel-size", "default: TP")})
    yield split_line("attention heads", f.get("heads", 0), "TP", f.get("TP", 1))
    if f.get("kv", 0) > 0 and f.get("TP", 1) % f["kv"]:  # fewer KV heads than ranks are replicated
        yield split_line("KV heads", f["kv"], "TP", f.get("TP", 1))
    yield split_line("experts", f.get("experts", 0), "EP", f.get("EP", 1))
    if not f.get("custom"):
        yield _layers(f)
    yield split_line("positions", f.get("positions", 0), f"{_CUT[f.get('cut', 0)]}", f.get("pieces", 1))
    if "micro_batches" in f:
        yield split_line("micro-batches", f["micro_batches"], "PP", f.get("PP", 1))


_CUT = ("TP", "2 x CP =")  # sequence parallelism; the two ends of each rank's share under a causal mask


def _layers(f: Mapping[str, int]) -> str | None:
    stages, layers = f.get("PP", 1), f.get("layers", 0)
    ends = [f[name] for name in ("first", "last") if f.get(name)]
    if ends and stages > len(ends):
        left, middle = layers - sum(ends), stages - len(ends)
        return split_line(f"layers left ({layers} - {' - '.join(map(str, ends))})", left, "stages", middle)
    with_both = layers + f.get("with_embedding", 0) + f.get("with_loss", 0)
    counts = uneven_stages(layers, stages)
    uneven = f"stages of {'/'.join(map(str, counts))} layers" if counts else ""
    if counts and stages > 2:
        uneven += f" (first stage {counts[0]}, last stage {counts[-1]})"
    line = split_line("layers" if with_both == layers else "layers (embedding and loss counted)", with_both, "PP",
                      stages, uneven)  # fmt: skip
    if line is None and f.get("VPP", 1) > 1:
        line = split_line(f"layers a stage ({with_both} / PP {stages})", with_both // stages, "VPP", f["VPP"])
    return line


# ---- what is built ----


def patches(module: ModuleType) -> list[Patch]:
    """For megatron.core.transformer.transformer_block: the layers of each rank are counted."""

    def count(original):
        def init(self, config, *args, **kwargs):
            original(self, config, *args, **kwargs)
            if dist.is_initialized() and hasattr(dist.group.WORLD, "world"):
                dist.group.WORLD.world.recorder.tally("layers", len(self.layers), config.num_layers)

        return init

    return [
        Patch(module.TransformerBlock, "__init__", count, "layers built are compared with those configured", "0.12")
    ]


# ---- what the frames tell ----


def _facts(frame: FrameType) -> dict[str, int]:
    values = frame.f_locals
    found: dict[str, int] = {}
    name, file = frame.f_code.co_name, frame.f_code.co_filename.replace("\\", "/")
    if name == "initialize_model_parallel" and file.endswith("parallel_state.py"):
        found.update(_integers(values, _GROUPS))
        found["world"] = _world()
    for holder in ("config", "transformer_config", "model_config", "self", "args"):
        found.update(_of_config(values.get(holder)))
    if "megatron" in file:
        if "interleaving" in name and isinstance(values.get("num_microbatches"), int):
            found["micro_batches"] = values["num_microbatches"]
        if name in ("_split_along_first_dim", "_reduce_scatter_along_first_dim"):
            found.update(_pieces(values.get("input_"), 0, values.get("world_size"), 0))
        if name == "get_batch_on_this_cp_rank" and isinstance(values.get("cp_size"), int):
            dim = 2 if values.get("key") == "attention_mask" else 1
            found.update(_pieces(values.get("val"), dim, 2 * values["cp_size"], 1))
    return found


def _pieces(tensor: Any, dim: int, pieces: Any, cut: int) -> dict[str, int]:
    shape = getattr(tensor, "shape", ())
    if not isinstance(pieces, int) or len(shape) <= dim:
        return {}
    return {"positions": int(shape[dim]), "pieces": pieces, "cut": cut}


def _of_config(holder: Any) -> dict[str, int]:
    """Facts of a TransformerConfig, of an object that has one, or of megatron.training's arguments."""
    if holder is None or inspect.ismodule(holder):
        return {}
    own = getattr(holder, "__dict__", {})
    config = holder if "num_layers" in own and "tensor_model_parallel_size" in own else own.get("config")
    values = getattr(config, "__dict__", {})
    if "num_layers" not in values or "tensor_model_parallel_size" not in values:
        return {}
    found = _integers(values, {**_GROUPS, **_CONFIG})
    if isinstance(values.get("world_size"), int) and "micro_batch_size" in values:  # arguments
        found["world"] = values["world_size"]
    if values.get("pipeline_model_parallel_layout") is not None:
        found["custom"] = 1
    return found


def _integers(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    return {short: int(values[name]) for name, short in names.items() if isinstance(values.get(name), int)}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _source(flag: str, otherwise: str) -> str:
    given = [word for word in sys.argv if word.split("=")[0].replace("_", "-") == f"--{flag}"]
    return f"--{flag}" if given else otherwise
