"""What a simulated rank runs on: the hooks of a pretended device, or those of a real GPU."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from echo_hooks import integrations
from echo_hooks.capture.capture import Capture
from echo_hooks.capture.execute import ExecuteCapture
from echo_hooks.capture.host_speed import momentary
from echo_hooks.capture.overhead import entry_overhead_ns
from echo_hooks.capture.plans import Planner
from echo_hooks.capture.profiler import Profiler
from echo_hooks.capture.routing import Routing
from echo_hooks.devices.accelerator_interface import open_device
from echo_hooks.devices.allocator import CachingAllocator, allocator_settings
from echo_hooks.devices.checkpoints import patches as checkpoint_patches
from echo_hooks.devices.gpu_lock import GpuLock
from echo_hooks.devices.libraries import cublas_workspace_bytes
from echo_hooks.devices.real_cuda import RealCuda
from echo_hooks.devices.tensor_patches import patches as tensor_patches
from echo_hooks.errors import ExecuteFailed
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.live import LiveRecorder
from echo_hooks.graph.recorder import Recorder, own_sources
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.integrations import Integration
from echo_hooks.patching import PatchSet
from echo_hooks.world import PayloadStore, VirtualWorld, environment


@dataclass(frozen=True)
class Job:
    """What all ranks of one simulated job share.

    ``cluster``: as given on the command line ("h800:12x8" or a file). ``out``: the run directory; payloads of ranks
    traced before are kept below it ("" keeps none). ``local_rank_argument``: the script's first argument is
    --local_rank=N, as DeepSpeed's launcher has it. ``timing``: "execute" runs the ranks' own ops on a real GPU;
    every other mode traces them on pretended tensors.
    """

    world_size: int
    nproc_per_node: int
    cluster: str
    script: str = ""
    args: tuple[str, ...] = ()
    module: bool = False
    local_rank_argument: bool = False
    warmup_steps: int = 1
    steps: int = 1
    seed: int = 0
    out: str = ""
    timing: str = "model"
    moe_hot: float = 1.0
    moe_sampled: bool = False


class Hooks(Protocol):
    """Something that is put in before the script runs and taken out exactly."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


def stage_for(job: Job) -> Stage | LiveStage:
    """What the job's ``timing`` needs."""
    return LiveStage(job) if job.timing == "execute" else Stage(job)


class Stage:
    """The hooks of one process: the pretended device, torch's patches, the virtual world, the integrations.

    ``install()`` knows no rank yet, so that a fork server can do it once; ``become(rank)`` turns the process (or its
    fork) into that rank and gives the capture that watches it.
    """

    def __init__(self, job: Job):
        self.job = job
        # The best of many rounds, before frameworks wrap the dispatcher: what this machine can do.
        self.host_speed = momentary(rounds=7, share=0.5, clock=time.thread_time)
        self.accelerator = load_cluster(job.cluster).accelerator
        self.planner = Planner()
        self.integrations = integrations.load()
        recorder, allocator = self._recorder(0), self._allocator()
        self.device = open_device(
            "pretended",
            recorder,
            self.accelerator,
            device_count=job.nproc_per_node,
            local_rank=0,
            allocator=allocator,
        )
        self.capture = Capture(recorder, allocator, self.planner, job.warmup_steps, job.steps)
        self.world = VirtualWorld(
            recorder, self.capture.values, nproc_per_node=job.nproc_per_node, payloads=PayloadStore(None), seed=job.seed
        )
        self.stand_ins = integrations.stand_ins(self.integrations)
        for directory in self.stand_ins.directories():
            own_sources(directory)
        self.overhead_ns = 0
        self._patches = PatchSet([*tensor_patches(), *checkpoint_patches()])
        self._installed = contextlib.ExitStack()

    def _recorder(self, rank: int) -> Recorder:
        return Recorder(rank, self.job.world_size)

    def _allocator(self) -> CachingAllocator:
        expandable_segments, _ = allocator_settings(os.environ)
        return CachingAllocator(self.accelerator.memory_bytes, expandable_segments)

    def _workspace_bytes(self) -> int:
        nvidia = self.accelerator.vendor == "nvidia"
        return cublas_workspace_bytes(self.accelerator.compute_capability if nvidia else None, os.environ)

    def install(self) -> None:
        late = integrations.late_patches(self.integrations)
        parts: list[Hooks] = [self.device, self._patches, self.world, self.stand_ins, *late]
        for part in parts:
            part.install()
            self._installed.callback(part.remove)
        self.overhead_ns = entry_overhead_ns(self.capture)

    def remove(self) -> None:
        """Take every hook out again, in reverse order."""
        self._installed.close()

    def become(self, rank: int) -> Capture:
        job = self.job
        recorder, allocator = self._recorder(rank), self._allocator()
        recorder.script(job.script or sys.argv[0])
        recorder.overhead_ns = self.overhead_ns
        for setting in allocator_settings(os.environ)[1]:
            recorder.note(f"{setting} of PYTORCH_CUDA_ALLOC_CONF is not modelled: memory is that of its default")
        self.stand_ins.say(recorder.note)
        self.capture = Capture(
            recorder,
            allocator,
            self.planner,
            job.warmup_steps,
            job.steps,
            self._workspace_bytes(),
        )
        self.capture.host_speed = self.host_speed
        payloads = PayloadStore(Path(job.out) / "payloads" if job.out else None)
        self.device.retarget(recorder, rank % job.nproc_per_node, allocator)
        self.world.retarget(recorder, self.capture.values, payloads)
        self.capture.mode.world = self.world
        self.capture.mode.routing = Routing(job.moe_hot, job.moe_sampled, job.seed)
        return self.capture

    def variables(self, rank: int) -> dict[str, str]:
        """The environment torchrun and the frameworks would give this rank."""
        return _variables(self.job, self.integrations, rank)

    def named(self, groups: GroupTable) -> GroupTable:
        """The groups under the names that the frameworks' users have for them."""
        return _named(self.integrations, groups)


class LiveStage:
    """As Stage, on a real GPU: the script's own ops run there, communication goes to the virtual world."""

    def __init__(self, job: Job):
        self.job = job
        self.integrations = integrations.load()
        recorder = LiveRecorder(0, job.world_size)
        self.device = RealCuda(recorder)
        self.lock = GpuLock()
        self.device.on_first_use = self.lock.join
        self.capture = self._capture(recorder)
        self.world = VirtualWorld(
            recorder, self.capture.values, nproc_per_node=job.nproc_per_node, payloads=PayloadStore(None), seed=job.seed
        )
        self._installed = contextlib.ExitStack()

    def _capture(self, recorder: LiveRecorder) -> ExecuteCapture:
        capture = ExecuteCapture(recorder, self.device, self.job.warmup_steps, self.job.steps, Profiler())
        capture.on_first_backward = self._take_turn
        capture.on_measured = self.lock.end_turn
        return capture

    def _take_turn(self) -> None:
        if not self.lock.take_turn():
            self.capture.recorder.note(
                f"rank {self.capture.recorder.rank} was measured while other simulations were at work on this machine:"
                " its host time may be too long"
            )

    def install(self) -> None:
        if not torch.backends.cuda.is_built():
            raise ExecuteFailed(f"torch {torch.__version__} is built without CUDA")
        late = integrations.late_patches(self.integrations, real_device=True)
        parts: list[Hooks] = [self.device, self.world, *late]
        for part in parts:
            part.install()
            self._installed.callback(part.remove)

    def remove(self) -> None:
        """Take every hook out again, in reverse order."""
        self._installed.close()
        self.lock.leave()

    def become(self, rank: int) -> ExecuteCapture:
        job = self.job
        self.lock.begin_work()
        recorder = LiveRecorder(rank, job.world_size)
        recorder.script(job.script or sys.argv[0])
        self.device.retarget(recorder)
        self.capture = self._capture(recorder)
        payloads = PayloadStore(Path(job.out) / "payloads" if job.out else None)
        self.world.retarget(recorder, self.capture.values, payloads)
        if rank % job.nproc_per_node:
            recorder.note("every rank was run as local rank 0 (LOCAL_RANK=0) of the one GPU that measures")
        return self.capture

    def variables(self, rank: int) -> dict[str, str]:
        """The environment torchrun and the frameworks would give this rank, as the only one on its GPU."""
        return {**_variables(self.job, self.integrations, rank), "LOCAL_RANK": "0"}

    def named(self, groups: GroupTable) -> GroupTable:
        """The groups under the names that the frameworks' users have for them."""
        return _named(self.integrations, groups)


def _variables(job: Job, loaded: list[Integration], rank: int) -> dict[str, str]:
    result = environment(rank, job.world_size, job.nproc_per_node)
    for integration in loaded:
        for name, value in integration.environment.items():
            result.setdefault(name, os.environ.get(name, value))
    return result


def _named(loaded: list[Integration], groups: GroupTable) -> GroupTable:
    names: dict[str, str] = {}
    for integration in loaded:
        names.update(integration.group_names)
    groups.groups = [replace(g, name=names.get(g.desc, g.name)) for g in groups.groups]
    return groups
