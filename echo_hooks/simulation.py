"""`echo.simulate()`: the block of code inside is one virtual rank; afterwards the process is as it was."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from echo_hooks.analysis import analyse
from echo_hooks.capture.steps import StepsDone
from echo_hooks.compose.roles import assign_roles
from echo_hooks.errors import PlanError, UsageError
from echo_hooks.graph.program import Kind
from echo_hooks.graph.rundir import RankTrace, Run, read_run, write_groups, write_manifest, write_roles, write_trace
from echo_hooks.hardware.cluster import DEFAULT_PRESET, load_cluster
from echo_hooks.mode import TIMINGS, Mode, choose_mode
from echo_hooks.network.calibration import Calibration, load_calibration
from echo_hooks.overlap.slowdowns import checked
from echo_hooks.report.report import Report
from echo_hooks.session import finished
from echo_hooks.stages import Job, LiveStage, Stage, stage_for


def simulate(
    world_size: int,
    cluster: str | None = None,
    *,
    nproc_per_node: int | None = None,
    warmup_steps: int = 1,
    steps: int = 1,
    seed: int = 0,
    out: str | os.PathLike | None = None,
    calibration: str | os.PathLike | None = None,
    timing: str = "auto",
    overlap: str | os.PathLike | None = None,
) -> Simulation:
    """Simulate the training loop in the block as rank 0 of ``world_size``.

    ``cluster``: "PRESET:NODESxGPUS" or a TOML file; left out, H100 nodes of ``nproc_per_node`` (8). The block ends by
    itself once ``warmup_steps`` + ``steps`` optimizer steps are recorded. ``out``: keep the run directory there.
    ``timing``: "execute" runs the block's ops on this machine's GPU and measures them (ExecuteFailed where that cannot
    be done), "profile" and "model" need none, "auto" executes where a GPU is free.
    ``calibration``: file of `echo-sim calibrate`, instead of the network calibration that comes with the accelerator.
    ``overlap``: file of `echo-sim overlap train`, or "none" for no slowdown of what runs together, instead of the model
    that comes with the accelerator (else a formula).
    Raises UsageError for arguments that do not fit together; the block's own exceptions pass through.
    """
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}, should be at least 1")
    if steps < 1 or warmup_steps < 0:
        raise UsageError(f"steps is {steps} and warmup_steps {warmup_steps}: at least 1 and 0 are needed")
    per_node = nproc_per_node or min(world_size, 8)
    text = cluster or f"{DEFAULT_PRESET}:{-(-world_size // per_node)}x{per_node}"
    described = load_cluster(text)
    if described.world_size < world_size:
        raise UsageError(f"cluster {text} has {described.world_size} accelerators, world_size is {world_size}")
    per_node = nproc_per_node or min(world_size, described.accelerators_per_node)
    if timing not in TIMINGS:
        raise UsageError(f"timing is {timing!r}, should be one of {', '.join(TIMINGS)}")
    mode = choose_mode(timing, described.accelerator.product)
    job = Job(world_size, per_node, text, warmup_steps=warmup_steps, steps=steps, seed=seed, timing=mode.timing)
    fitted = load_calibration(Path(calibration)) if calibration is not None else None
    slowdown = checked(None if overlap is None else str(overlap))
    return Simulation(job, Path(out) if out is not None else None, fitted, slowdown, mode)


_ACTIVE: list[Simulation] = []


class Simulation:
    """Context manager made by `simulate`; ``report()`` is available after the block."""

    def __init__(
        self,
        job: Job,
        out: Path | None = None,
        calibration: Calibration | None = None,
        overlap: str | None = None,
        mode: Mode = Mode("profile"),  # noqa: B008  # frozen
    ):
        self.job = job
        self.mode = mode
        self.out = out
        self._calibration, self._overlap = calibration, overlap
        self._stage: Stage | LiveStage | None = None
        self._trace: RankTrace | None = None
        self._report: Report | None = None
        self._saved: dict[str, str | None] = {}
        self._began = 0.0

    def __enter__(self) -> Simulation:
        if _ACTIVE:
            raise UsageError("echo.simulate() is active already: one block ends before the next begins")
        hidden = self.mode.timing != "execute"
        if torch.cuda.is_initialized() and hidden:
            raise UsageError(
                "this process has already used its GPU, which can no longer be hidden from the script: "
                "start it with echo-launch --simulate, or call echo.simulate() before any use of CUDA"
            )
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: enter echo.simulate() before init_process_group"
            )
        self._began = time.perf_counter()
        self._stage = stage_for(self.job)
        seen = {} if torch.cuda.is_initialized() else {"CUDA_VISIBLE_DEVICES": self.mode.gpu}
        self._set_environment({**self._stage.variables(0), **seen})
        try:
            self._stage.install()
            self._stage.become(0).start()
            _ACTIVE.append(self)
        except BaseException:
            self._stage.remove()
            self._restore_environment()
            raise
        return self

    def __exit__(self, kind, error, _traceback) -> bool:
        assert self._stage is not None
        _ACTIVE.remove(self)
        capture = self._stage.capture
        capture.stop()
        try:
            if kind is None or issubclass(kind, StepsDone):
                self._trace = finished(self._stage, time.perf_counter() - self._began)
        finally:
            with contextlib.suppress(Exception):  # the script may have destroyed it, or half of it
                if dist.is_initialized():
                    dist.destroy_process_group()
            self._stage.remove()
            self._restore_environment()
        return kind is not None and issubclass(kind, StepsDone)

    def report(self) -> Report:
        """The step on the whole cluster, every rank assumed to do what this one did.

        Raises PlanError when the ranks do not fit together, UsageError when one rank cannot stand for all (it sends
        to ranks that do something else: use echo-launch, which traces those too).
        """
        if self._report is None:
            self._report = self._compose()
        return self._report

    def _compose(self) -> Report:
        trace = self._trace
        if trace is None:
            raise UsageError("no step was recorded: call report() after the simulate block has ended well")
        if ((trace.program.kind == Kind.SEND) | (trace.program.kind == Kind.RECV)).any():
            raise UsageError(
                "this program sends to or receives from other ranks, whose programs echo.simulate() does not trace: "
                "use echo-launch --simulate"
            )
        with contextlib.ExitStack() as stack:
            directory = self.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-")))
            analysis = analyse(
                self._write(directory, trace),
                load_cluster(self.job.cluster),
                calibration=self._calibration,
                overlap=self._overlap,
                timing=self.mode.timing,
            )
        hangs = [p for p in analysis.composition.problems if p.kind in ("hang", "mismatch")]
        if hangs:
            raise PlanError(hangs[0].message, hangs)
        return analysis.report

    def _write(self, directory: Path, trace: RankTrace) -> Run:
        write_trace(directory, trace)
        write_groups(directory, trace.groups)
        write_roles(directory, assign_roles({0: trace}, trace.groups, self.job.world_size))
        manifest = {
            "world_size": self.job.world_size,
            "nproc_per_node": self.job.nproc_per_node,
            "cluster": self.job.cluster,
            "script": sys.argv[0],
            "args": [],
            "traced_ranks": [0],
            "warmup_steps": self.job.warmup_steps,
            "steps": self.job.steps,
            "seed": self.job.seed,
            "timing": self.mode.timing,
            "executed_on": self.mode.product,
            "assumptions": [self.mode.note] if self.mode.note else [],
            "nccl_environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "HCCL_"))},
            "complete": True,
        }
        write_manifest(directory, manifest)
        return read_run(directory)

    def _set_environment(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._saved[name] = os.environ.get(name)
            os.environ[name] = value

    def _restore_environment(self) -> None:
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved.clear()


__all__ = ["Simulation", "simulate"]
