"""A rank whose ops really run: warm-up, then steps that are only timed, then steps under the profiler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echo_hooks.capture.host_speed import mean, momentary
from echo_hooks.capture.measured_steps import Boundary, StepReader
from echo_hooks.capture.profiler import Profiler
from echo_hooks.capture.steps import StepsDone
from echo_hooks.capture.work import WorkCounter
from echo_hooks.devices.real_cuda import RealCuda, stream_objects
from echo_hooks.errors import ExecuteFailed
from echo_hooks.graph import live
from echo_hooks.graph.kineto_events import Events
from echo_hooks.graph.live import LiveRecorder
from echo_hooks.graph.roles import MemorySummary
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.patching import Patch, PatchSet
from echo_hooks.world.filling import DeviceValues

TIMED_STEPS = 5
"""Steps without the profiler: what the host really takes is the median over those that nothing else disturbed."""
CAPTURED_STEPS = 3
"""Steps under the profiler, after one that it warms up in; a kernel's duration is the median over them."""
LEAST_WARMUP = 3
"""Steps before anything is measured, at least: caches fill, libraries choose, ZeRO-3 settles its plan."""


class ExecuteCapture:
    """Watches the script between ``start()`` and ``stop()``; ``trace()`` gives the measured step.

    ``on_first_backward``: called once, before the first step's backward pass. ``on_measured``: once, when the last step
    is over.
    """

    def __init__(self, recorder: LiveRecorder, device: RealCuda, warmup: int, steps: int, profiler: Profiler):
        self.recorder = recorder
        self.device = device
        self.values = DeviceValues()
        self.warmup = max(warmup, LEAST_WARMUP)
        self.timed = max(TIMED_STEPS, steps)
        self.captured = max(CAPTURED_STEPS, steps)
        self.profiler = profiler
        self.profiling = False
        self.events: Events | None = None
        self.boundaries: list[Boundary] = []
        self.first_captured = -1  # index of the boundary at which the first captured step begins
        self.probes: list[tuple[int, int, int]] = []  # (begin, end, stream number): a launch that tells which is which
        self.memory = MemorySummary()
        self.seconds: dict[str, float] = {}
        self.overhead_us = 0.0
        self.on_first_backward: Callable[[], None] = lambda: None
        self.on_measured: Callable[[], None] = lambda: None
        self.work = WorkCounter()
        self.host_speeds: list[dict[str, float]] = []  # right before the timed steps and right behind them
        self._began = time.perf_counter()
        self._pending: Boundary | None = None
        self._counted: int | None = None
        self._kept: list = []
        self._begun = False
        self._backward_seen = False
        self._in_backward = 0
        self._main = threading.get_ident()
        self._handles: list = []
        self._patches = PatchSet(
            [Patch(torch.autograd.Variable, "_execution_engine", self._engine, "where backward begins and ends")]
        )

    @property
    def wanted(self) -> int:
        """Steps that the script has to make: one more than are captured goes into the profiler's warm-up."""
        return self.warmup + self.timed + 1 + self.captured

    def start(self) -> None:
        self._main = threading.get_ident()
        self.overhead_us = self.recorder.overhead_us()
        self._handles = [
            register_optimizer_step_pre_hook(lambda *_: self.recorder.moment(live.OPTIMIZER)),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._patches.install()

    def stop(self) -> None:
        self.recorder.paused = False
        self.work.stop()
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._pending is not None:  # an optimizer call that no backward followed ends a step too
            self._close()
        if self.profiling:
            self._end_profile()
        if torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats()
            self.memory = MemorySummary(
                peak_allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
                peak_reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            )

    # ---- steps ----

    def _after_optimizer(self, optimizer, _args, _kwargs) -> None:
        recorder = self.recorder
        recorder.moment(live.OPTIMIZER_END)
        if not self._backward_seen and self._pending is None:
            return  # no gradients: a framework that makes the optimizer's state ahead of time
        if self._counted is None:
            self._counted = id(optimizer)
            self._kept.append(optimizer)
        if id(optimizer) == self._counted:
            self._pending = Boundary(len(recorder.spans), len(recorder.program), time.time_ns())
            self._backward_seen = False

    def _engine(self, original):
        """The autograd engine, with a mark at both ends of every backward pass."""
        capture = self

        class Engine:
            def run_backward(self, *args, **kwargs):
                recorder = capture.recorder
                if capture._in_backward == 0 and threading.get_ident() == capture._main:
                    recorder.enter()
                    try:
                        capture._backward_begins()
                    finally:
                        recorder.leave()
                recorder.moment(live.BACKWARD)
                capture._in_backward += 1
                try:
                    return original.run_backward(*args, **kwargs)
                finally:
                    capture._in_backward -= 1
                    recorder.moment(live.BACKWARD_END)

            def __getattr__(self, name):
                return getattr(original, name)

        return Engine()

    def _backward_begins(self) -> None:
        if not self._begun:
            self._begun = True
            began = time.perf_counter()
            self.seconds["set-up"] = began - self._began
            self.on_first_backward()
            self.seconds["wait for the GPU"] = time.perf_counter() - began
        self._backward_seen = True
        if self._pending is None:
            return
        self._close()
        made = len(self.boundaries)
        if made == 1:
            self.work.start()
        elif made == 2:
            self.work.stop()
        if made in (self.warmup - 1, self.warmup + self.timed):
            self.host_speeds.append(momentary(_device()))
        if made >= self.wanted:
            self._end_profile()
            raise StepsDone
        if made >= self.warmup + self.timed and not self.profiling:
            self._begin_profile()
        # The timed steps are to show what the script takes, with as little of Echo's code between as can be.
        self.recorder.paused = self.warmup <= made < self.warmup + self.timed

    def _close(self) -> None:
        assert self._pending is not None
        self.boundaries.append(self._pending)
        self._pending = None

    def _begin_profile(self) -> None:
        if self.profiler.device == "cuda" and not torch.cuda.is_initialized():
            raise ExecuteFailed(f"rank {self.recorder.rank}: the script trains without using the GPU")
        began = time.perf_counter()
        self.seconds["warm-up and timed steps"] = began - self._began - sum(self.seconds.values())
        _synchronize()
        self.profiler.start()
        self.profiling = True
        self.first_captured = len(self.boundaries)
        self._probe()
        self.seconds["profiler start"] = time.perf_counter() - began

    def _end_profile(self) -> None:
        began = time.perf_counter()
        self.profiling = False
        self._probe()
        _synchronize()
        self.seconds["captured steps"] = began - self._began - sum(self.seconds.values())
        self.events = self.profiler.stop()
        self.seconds["profiler stop"] = time.perf_counter() - began
        self.on_measured()

    def _probe(self) -> None:
        """One small launch on each stream: under the profiler it tells the stream's number there."""
        if not torch.cuda.is_initialized():
            return
        for number, stream in stream_objects(self.device):
            with torch.cuda.stream(stream):
                target = self._target()
                begin = time.time_ns()
                target.zero_()
                self.probes.append((begin, time.time_ns(), number))

    def _target(self) -> torch.Tensor:
        if not hasattr(self, "_byte"):
            self._byte = torch.empty(128, dtype=torch.float32, device="cuda")
        return self._byte

    # ---- the result ----

    def missing_steps(self) -> str | None:
        """One sentence when the script made fewer optimizer steps than are needed, None otherwise."""
        made = len(self.boundaries)
        if self.events is not None and made - self.first_captured >= 2:
            return None
        return (
            f"rank {self.recorder.rank}: the script ended after {made} optimizer step(s), but running it on the GPU "
            f"takes {self.warmup} to warm up, {self.timed} to time and {self.captured + 1} under the profiler "
            f"(--warmup-steps, --steps)"
        )

    def trace(self, trace_seconds: float = 0.0) -> RankTrace:
        """The measured step as a RankTrace. Raises ExecuteFailed where the profiler saw nothing."""
        recorder = self.recorder
        missing = self.missing_steps()
        if missing is not None:
            program = recorder.program.program()
            known = self.boundaries[self.warmup - 1].row if len(self.boundaries) >= self.warmup else len(program)
            return self._result(program.slice(0, 0), program.slice(0, known), 0, trace_seconds)
        assert self.events is not None
        if not self.events.launched:
            raise ExecuteFailed(f"rank {recorder.rank}: torch's profiler returned no kernel of {self.captured} steps")
        began = time.perf_counter()
        reader = StepReader(
            recorder, self.events, self.probes, self.boundaries, self.profiler.base_ns, self.overhead_us
        )
        timed = range(self.warmup, self.warmup + self.timed)
        captured = range(self.first_captured, len(self.boundaries) - 1)
        step = reader.read(timed, captured)
        for sentence in step.notes:
            recorder.note(sentence)
        before = len(recorder.program)
        step.rows[1:1] = self.work.rows(recorder.ops)
        step.append_to(recorder)
        whole = recorder.program.program()
        self.seconds["read"] = time.perf_counter() - began
        # Of the timed steps nothing was kept, and of the one after them a part: all ranks leave out the same steps.
        first, last = self.boundaries[self.warmup - 1].row, self.boundaries[self.warmup + self.timed].row
        prologue = whole.slice(0, first).joined(whole.slice(last, max(last, step.first_row)))
        trace = self._result(whole.slice(before, len(whole)), prologue, 1, trace_seconds)
        trace.profiled_step_ms = step.profiled_ms
        return trace

    def _result(self, program, prologue, steps: int, trace_seconds: float) -> RankTrace:
        recorder = self.recorder
        return RankTrace(
            rank=recorder.rank,
            program=program,
            prologue=prologue,
            ops=recorder.ops.signatures,
            groups=recorder.groups,
            memory=self.memory,
            memory_events=recorder.memory.columns(),
            assumptions=sorted(recorder.assumptions.values(), key=lambda a: (a.kind, a.site, a.value)),
            notes=list(recorder.notes),
            steps=steps,
            tokens_per_step=self.work.tokens if steps else 0,
            trace_seconds=trace_seconds,
            host_speed=mean(self.host_speeds),
        )


def _device() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_initialized() else None


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
