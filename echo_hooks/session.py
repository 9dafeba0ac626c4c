"""One simulated rank: install the hooks, let the script run, take them out, give its trace."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import random
import sys
import time
import tokenize
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from echo_hooks import integrations
from echo_hooks.capture.capture import Capture
from echo_hooks.capture.execute import ExecuteCapture
from echo_hooks.capture.overhead import entry_overhead_ns
from echo_hooks.capture.plans import Planner
from echo_hooks.capture.profiler import Profiler
from echo_hooks.capture.routing import Routing
from echo_hooks.capture.steps import StepsDone
from echo_hooks.devices.accelerator_interface import open_device
from echo_hooks.devices.allocator import CachingAllocator, allocator_settings
from echo_hooks.devices.checkpoints import patches as checkpoint_patches
from echo_hooks.devices.gpu_lock import GpuLock
from echo_hooks.devices.libraries import cublas_workspace_bytes
from echo_hooks.devices.real_cuda import RealCuda
from echo_hooks.devices.tensor_patches import patches as tensor_patches
from echo_hooks.errors import EchoError, ExecuteFailed, NothingSimulated, ScriptError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.live import LiveRecorder
from echo_hooks.graph.recorder import Recorder, own_sources
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.integrations import Integration
from echo_hooks.patching import PatchSet
from echo_hooks.runner import run_script
from echo_hooks.world import PayloadStore, VirtualWorld, environment, meshes


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
        capture.on_first_backward = self.lock.take_turn
        return capture

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

    def become(self, rank: int) -> ExecuteCapture:
        job = self.job
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


def _explanation(loaded: list[Integration], error: BaseException) -> str:
    """The line that says why a layout is illegal, to stand before the script's own traceback; "" for other errors."""
    explainers = [meshes.explain, *(one.explain for one in loaded if one.explain is not None)]
    line = next((line for explain in explainers if (line := explain(error))), None)
    return f"layout: {line}\n" if line else ""


def _named(loaded: list[Integration], groups: GroupTable) -> GroupTable:
    names: dict[str, str] = {}
    for integration in loaded:
        names.update(integration.group_names)
    groups.groups = [replace(g, name=names.get(g.desc, g.name)) for g in groups.groups]
    return groups


class Tracer:
    """Traces ranks of one job, each in a process of its own: ``prepare()`` once, then fork, then ``trace(rank)``."""

    def __init__(self, job: Job):
        self.job = job
        self.stage: Stage | LiveStage | None = None

    def prepare(self) -> None:
        """Install rank-neutral hooks and import what the script will import, so that the forks find it ready."""
        self.stage = stage_for(self.job)
        self.stage.install()
        if isinstance(self.stage, LiveStage):
            return  # a framework's import may touch the GPU, which a fork would not survive
        text = script_text(self.job)
        imported = script_imports(text)
        self.stage.stand_ins.ask(imported, " ".join([text, *self.job.args]))
        for integration in self.stage.integrations:
            if imported & set(integration.frameworks):
                for name in integration.preload:
                    with contextlib.suppress(ImportError):  # another version lacks it: the script decides
                        importlib.import_module(name)

    def trace(self, rank: int) -> RankTrace:
        """Run the script as ``rank`` and return its measured steps. Leaves the hooks in: the process ends with it.

        Raises ScriptError with the script's own traceback, NothingSimulated when it took no optimizer step.
        """
        assert self.stage is not None, "prepare() comes first"
        stage, job = self.stage, self.job
        began = time.perf_counter()
        os.environ.update(stage.variables(rank))
        _seed(job.seed)
        capture = stage.become(rank)
        capture.start()
        failure: ScriptError | None = None
        try:
            local_rank = [f"--local_rank={rank % job.nproc_per_node}"] if job.local_rank_argument else []
            run_script(job.script, [*local_rank, *job.args], job.module)
        except StepsDone:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"rank {rank}: the script exited with status {error.code}", rank) from None
        except EchoError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, torch.OutOfMemoryError) and isinstance(stage, LiveStage):
                raise ExecuteFailed(f"rank {rank} does not fit into this GPU's memory: {error}") from None
            shown = _explanation(stage.integrations, error) + script_traceback(error)
            failure = ScriptError(f"rank {rank}: {type(error).__name__}: {error}", rank, shown)
            failure.__cause__ = error
        finally:
            capture.stop()
            stage.world.payloads.save()
        seconds = time.perf_counter() - began
        if failure is None:
            return finished(stage, seconds)
        with contextlib.suppress(Exception):  # nothing may hide the script's own failure
            failure.trace = stage.capture.trace(seconds)
            stage.named(failure.trace.groups)
        raise failure


def finished(stage: Stage | LiveStage, seconds: float) -> RankTrace:
    """The trace of the stage's rank; NothingSimulated (with the trace) when it lacks measured steps."""
    trace = stage.capture.trace(seconds)
    stage.named(trace.groups)
    missing = stage.capture.missing_steps()
    if missing is not None and isinstance(stage.capture, ExecuteCapture) and stage.capture.boundaries:
        raise ExecuteFailed(missing)
    if missing is not None:
        raise NothingSimulated(missing, trace.rank, trace)
    return trace


def script_text(job: Job) -> str:
    """The script's own text; empty when it cannot be read."""
    path: str | None = job.script
    if job.module:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(job.script)
            path = spec.origin if spec else None
    try:
        with tokenize.open(path or "") as file:
            return file.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def script_imports(text: str) -> set[str]:
    """Top-level names that the text of a script imports; empty when it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def script_traceback(error: BaseException) -> str:
    """The traceback as Python would print it for the script alone: without Echo's frames around and below it."""
    ours = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen runpy>")
    summary = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    part: traceback.TracebackException | None = summary
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        kept = [frame for frame in part.stack if not frame.filename.startswith(ours)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(summary.format())


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
