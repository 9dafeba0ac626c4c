"""DeepSpeed's JSON: keys that nobody reads, values left open, settings that two sources give differently."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist

from echo_hooks.errors import UsageError
from echo_hooks.patching import Patch


def patches(module: ModuleType) -> list[Patch]:
    """For deepspeed.runtime.config."""

    def watch(original):
        def initialize(self, param_dict):
            refuse_open(param_dict)
            watched = _Watched(param_dict)
            original(self, watched)
            for sentence in unread(param_dict, watched.asked):
                say(sentence)

        return initialize

    return [Patch(module.DeepSpeedConfig, "_initialize_params", watch, "a key that nobody reads is a typing error",
                  "0.16")]  # fmt: skip


def plugin_patches(module: ModuleType) -> list[Patch]:
    """For accelerate.utils.dataclasses: DeepSpeedPlugin's own settings against those of its ds_config."""

    def compare(original):
        def post_init(self):
            own = {name: getattr(self, name, None) for name in _PLUGIN}
            for name, (variable, _) in _PLUGIN.items():
                if own[name] is None and variable in os.environ:
                    own[name] = os.environ[variable]
            original(self)
            if getattr(self, "hf_ds_config", None) is not None:
                for sentence in conflicts(own, getattr(self.hf_ds_config, "config", {})):
                    say(sentence)

        return post_init

    return [Patch(module.DeepSpeedPlugin, "__post_init__", compare, "two sources of one setting", "")]


class _Watched(dict):
    """A configuration that remembers which keys were asked for, there or not."""

    def __init__(self, values: Mapping[str, Any], asked: set[str] | None = None):
        super().__init__(values)
        self.asked: set[str] = set() if asked is None else asked

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def pop(self, key, *default):
        self.asked.add(key)
        return super().pop(key, *default)

    def keys(self):
        return self  # "key in config.keys()" asks too

    def __copy__(self):
        return _Watched(self, self.asked)


def unread(config: Mapping[str, Any], asked: set[str]) -> list[str]:
    """A sentence for each key of ``config`` that DeepSpeed did not ask for, with the nearest one that it did."""
    sentences = []
    for key in config:
        if key in asked or str(key).startswith("_"):
            continue
        near = difflib.get_close_matches(str(key), [str(a) for a in asked], 1)
        hint = f"; the nearest one that it reads is {near[0]!r}" if near else ""
        sentences.append(f"ds_config: DeepSpeed does not read {key!r}, so it has no effect{hint}")
    return sentences


_MAY_BE_AUTO = ("pipeline", "autotuning")
"""Sections in which DeepSpeed itself gives "auto" a meaning."""


def refuse_open(config: Mapping[str, Any]) -> None:
    """Raise UsageError for values that only Hugging Face's Trainer fills in, and for NVMe, which is not modelled."""
    for path, value in _leaves(config):
        if value == "auto" and path[0] not in _MAY_BE_AUTO:
            raise UsageError(
                f"ds_config: {'.'.join(path)} is 'auto', which only Hugging Face's Trainer and accelerate fill in: "
                "give a value"
            )
        if value == "nvme" and path[-1] == "device":
            raise UsageError(
                f"ds_config: {'.'.join(path)} is 'nvme', and transfers to NVMe are not modelled: use 'cpu' to simulate "
                "with host memory"
            )


def _leaves(values: Mapping[str, Any], before: tuple[str, ...] = ()):
    for key, value in values.items():
        path = (*before, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


_PLUGIN = {
    # field of accelerate's DeepSpeedPlugin -> its variable, its place in the ds_config
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping"),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_optimization.stage"),
    "offload_optimizer_device": (
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "zero_optimization.offload_optimizer.device",
    ),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device"),
}


def conflicts(own: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that accelerate and the ds_config give differently; the ds_config wins."""
    given = {".".join(path): value for path, value in _leaves(config)}
    sentences = []
    for name, (_, place) in _PLUGIN.items():
        ours, theirs = own.get(name), given.get(place, "auto")
        if ours is None or theirs == "auto" or str(ours) == str(theirs):
            continue
        sentences.append(f"accelerate has {name} {ours}, the ds_config has {place} {theirs}: the ds_config's is used")
    return sentences


def say(sentence: str) -> None:
    """Into the report where the job has a world already, else on stderr."""
    if dist.is_initialized():
        dist.group.WORLD.world.recorder.note(sentence)  # type: ignore[union-attr]
    else:
        print(sentence, file=sys.stderr)
