"""Which mode of timing a launch gets: what was asked for, or the next best with the reason said."""

from __future__ import annotations

import os
from dataclasses import dataclass

from echo_hooks.devices.gpu_lock import GpuLock
from echo_hooks.devices.nvidia_smi import query_gpus

TIMINGS = ("auto", "execute", "profile", "model")

BUSY_BYTES = 2 << 30
"""Memory that others hold on a GPU from which it counts as busy: a driver's own and idle contexts stay below."""


@dataclass(frozen=True)
class Mode:
    """``timing``: "execute", "profile" or "model". ``gpu``: the device that may be seen ("" for none). ``product``: its
    name, as the accelerator's file has it. ``note``: why it is not what was asked for, "" when it is."""

    timing: str
    gpu: str = ""
    note: str = ""
    product: str = ""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi; bytes. ``index``: for CUDA_VISIBLE_DEVICES, which DeepSpeed reads as a number."""

    index: str
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int


def choose_mode(timing: str, product: str, skewed: bool = False) -> Mode:
    """``timing``: as on the command line; "auto" executes where a GPU of the cluster's kind is free. ``product``: that
    kind's name: what another one measures says nothing about the cluster. ``skewed``: a load of experts other than the
    script's own was asked for, which only pretended routers can give."""
    if timing not in ("auto", "execute"):
        return Mode(timing)
    if skewed:
        return next_best("with --moe-skew the routers are not really run") if timing == "execute" else Mode("profile")
    found = visible(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    alike = [gpu for gpu in found if gpu.name == product]
    if found and not alike:
        return next_best(f"this machine has {found[0].name} and the cluster {product}")
    # What other runs of Echo hold is no reason: their ranks and these take turns.
    free = [gpu for gpu in alike if gpu.used_bytes < BUSY_BYTES or GpuLock(gpu.index).in_use()]
    if free:
        return Mode("execute", min(free, key=lambda gpu: gpu.used_bytes).index, product=product)
    if found:
        held = min(gpu.used_bytes for gpu in alike) / 2**30
        return next_best(f"every GPU here is in use by others ({held:.1f} GiB and more)")
    if timing == "execute":
        return next_best("this machine has no NVIDIA GPU that its driver lists")
    return Mode("profile")


def next_best(why: str) -> Mode:
    """The mode for a machine, or a plan, whose ops cannot be run here."""
    instead = "durations are from the profile of the accelerator, or modelled, instead"
    return Mode("profile", note=f"--timing execute is not possible: {why}; {instead}")


def visible(found: list[Gpu], setting: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES (None: not set) leaves, up to the first name that is none of theirs."""
    if setting is None:
        return found
    named = []
    for name in (part.strip() for part in setting.split(",")):
        gpu = next((g for g in found if name and (name == g.index or g.uuid.startswith(name))), None)
        if gpu is None:
            break
        named.append(gpu)
    return named


def gpus() -> list[Gpu]:
    """This machine's NVIDIA GPUs as the driver's own tool prints them; [] without one."""
    found = []
    for fields in query_gpus("index", "uuid", "name", "memory.used", "memory.total"):
        if len(fields) == 5 and fields[3].isdigit() and fields[4].isdigit():
            index, uuid, name = fields[:3]
            found.append(Gpu(index, uuid, name, int(fields[3]) << 20, int(fields[4]) << 20))
    return found
