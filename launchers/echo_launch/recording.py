"""The record of one rank of a real run: step times, peak memory, and a profile where one is asked for.

It costs a call at each optimizer step and two events of the device, waits for nothing, and gives up by itself with one
line on stderr at the first thing that goes wrong. torch is imported by the script, or not at all.
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echo_hooks.graph.files import write_json
from echo_hooks.graph.record import FORMAT, rank_file, trace_file
from echo_hooks.late import LatePatches
from echo_launch.recorded import say

KEPT_STEPS = 10_000  # the last ones: 80 kB
WRITE_EVERY_S = 10.0
PROFILE_AFTER = 3  # steps: the first ones make the optimizer's state and choose algorithms
MAX_PENDING = 32  # steps by which the device may be behind the host

_PACKAGES = ("torch", "megatron.core", "deepspeed", "transformer_engine", "transformers", "accelerate", "lightning")


class Recording:
    """Sees the optimizer steps of this process. ``profile``: how many of them torch.profiler traces, 0 for none.

    A step is from the first optimizer call behind a forward pass to the next such call: several calls in a row (ZeRO
    steps each parameter group by itself) are one step, and with several optimizers the one that stepped first counts.
    What tells a forward pass is the number of autograd nodes that this thread has made.
    """

    def __init__(self, directory: str, script: str, args: Sequence[str], profile: int):
        self.directory = Path(directory)
        self.script, self.args = script, list(args)
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.step_times_ms: deque[float] = deque(maxlen=KEPT_STEPS)
        self.steps = 0
        self.clock = "host"
        self.notes: list[str] = []
        self.traces: list[str] = []
        self.peaks: dict[str, int] = {}
        self._profiling = _Profiling(profile, trace_file(self.directory, self.rank)) if profile else None
        self._off = False
        self._pid = os.getpid()
        self._optimizer: Callable[[], Any] = lambda: None
        self._nodes = -1
        self._rows = 0
        self._host_s: float | None = None
        self._events: deque[Any] = deque()
        self._written_s = time.monotonic()

    def start(self) -> None:
        """Put the hook in as soon as the script has imported torch, and see to the end."""
        LatePatches("torch", self._install).install()
        atexit.register(self._finish)  # registered first, so it runs last

    def _install(self, torch: Any) -> list:
        try:
            # torch.compile reads the test as a constant and leaves the hook out of what it compiles.
            is_compiling = torch.compiler.is_compiling

            def after(optimizer, args, kwargs) -> None:
                if not is_compiling():
                    self._guarded(self._after_call, optimizer)

            sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(after)  # type: ignore[attr-defined]
        except Exception as error:
            self._give_up(error)
        return []

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._off:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        say(f"the record ends here: {type(error).__name__}: {error}")

    # ---- steps ----

    def _after_call(self, optimizer: Any) -> None:
        counted = self._optimizer()
        if counted is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        nodes = sys.modules["torch"]._C._autograd._get_sequence_nr()
        if nodes == self._nodes:
            return
        self._nodes = nodes
        self._rows += 1
        self._boundary()

    def _boundary(self) -> None:
        if self._profiling is not None and self._profiling.at_boundary(self._rows):
            self._host_s = None  # the profiler's own time is in this step
            self._events.clear()
            if self._profiling.problem:
                self.notes.append(self._profiling.problem)
                say(self._profiling.problem)
            if self._profiling.done:
                self.traces, self._profiling = self._profiling.files(), None
            return
        now = time.perf_counter()
        cuda = _cuda()
        if cuda is not None:
            self.clock = "device"
            self._device_boundary(cuda)
        elif self._host_s is not None:
            self._step((now - self._host_s) * 1e3)
        self._host_s = now
        if self._rows & (self._rows - 1) == 0 or time.monotonic() - self._written_s > WRITE_EVERY_S:
            self._written_s = time.monotonic()
            self._measure_memory()
            self._write(ended=False)

    def _device_boundary(self, cuda: Any) -> None:
        if cuda.is_current_stream_capturing():
            self._events.clear()
            return
        event = cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._collect()
        if len(self._events) > MAX_PENDING:
            self._events.popleft()

    def _collect(self) -> None:
        while len(self._events) > 1 and self._events[1].query():
            self._step(self._events[0].elapsed_time(self._events[1]))
            self._events.popleft()

    def _step(self, milliseconds: float) -> None:
        self.steps += 1
        self.step_times_ms.append(round(milliseconds, 4))

    # ---- what is written ----

    def _measure_memory(self) -> None:
        peaks = {"peak_host_bytes": _peak_host_bytes()}
        cuda = _cuda()
        if cuda is not None:
            stats = cuda.memory_stats()
            for name in ("allocated", "reserved"):
                peaks[f"peak_{name}_bytes"] = int(stats[f"{name}_bytes.all.peak"])
        for name, size in peaks.items():  # the script may have set its peaks back meanwhile
            self.peaks[name] = max(size, self.peaks.get(name, 0))

    def _write(self, ended: bool) -> None:
        cuda = _cuda()
        write_json(
            rank_file(self.directory, self.rank),
            {
                "format": FORMAT,
                "rank": self.rank,
                "world_size": self.world_size,
                "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
                "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
                "host": socket.gethostname(),
                "device": "cpu" if cuda is None else cuda.get_device_name(),
                "script": self.script,
                "args": self.args,
                "clock": self.clock,
                "steps": self.steps,
                "step_times_ms": list(self.step_times_ms),
                **self.peaks,
                "versions": _versions(cuda),
                "traces": self.traces,
                "notes": self.notes,
                "ended": ended,
            },
        )

    def _finish(self) -> None:
        if os.getpid() == self._pid:  # a fork of the rank is not the rank
            self._guarded(self._end)

    def _end(self) -> None:
        if self._profiling is not None and self._profiling.running:
            self._profiling.stop()
            self.traces = self._profiling.files()
            self.notes.append("the script ended before the profile had all its steps")
        elif self._profiling is not None:
            self.notes.append("nothing was profiled: the script made too few steps")
        self._collect()
        if not self._rows:
            self.notes.append("no step of a torch.optim optimizer was seen")
        self._measure_memory()
        self._write(ended=True)


class _Profiling:
    """torch.profiler over some steps: started at one boundary, told of each, stopped at another."""

    def __init__(self, steps: int, path: Path):
        self.steps = steps
        self.path = path
        self.running = self.done = False
        self.problem = ""
        self._profiler: Any = None
        self._began = 0

    def at_boundary(self, row: int) -> bool:
        """True when the step that ended here, or the one that begins, holds work of the profiler."""
        if row < PROFILE_AFTER + 1 or self.done:
            return False
        try:
            if not self.running:
                self._start(row)
                return True
            if row - self._began in (1, self.steps + 1):
                _synchronize()
            if row - self._began <= self.steps:
                self._profiler.step()
            else:
                self.stop()
        except Exception as error:
            self.problem = f"no profile: {type(error).__name__}: {error}"
            self.running, self.done = False, True
        return True

    def _start(self, row: int) -> None:
        import torch
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        if torch.autograd._profiler_enabled():
            raise RuntimeError("the script has a profiler of its own running")
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        # With a schedule, torch marks each step with ProfilerStep. The first span only leads in: readers of
        # such traces count from its end.
        self._profiler = profile(activities=activities, schedule=lambda step: ProfilerAction.RECORD, acc_events=True)
        self._profiler.start()
        self.running, self._began = True, row

    def stop(self) -> None:
        """End the profile and write the trace."""
        self.running, self.done = False, True
        self._profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        self._profiler = None

    def files(self) -> list[str]:
        """The traces written, relative to the record."""
        return [f"{self.path.parent.name}/{self.path.name}"] if self.path.is_file() else []


def _synchronize() -> None:
    """The profiled steps begin and end with an idle device: the first one under the profiler lets the host fall behind,
    and what the device is late by at either end would be missing from them or be too much."""
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def _cuda() -> Any:
    """torch.cuda where the script has used it, else None."""
    cuda = sys.modules.get("torch.cuda")
    return cuda if cuda is not None and cuda.is_initialized() else None


def _peak_host_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes (getrusage(2))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions(cuda: Any) -> dict[str, str]:
    """Of what the script itself has imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    if cuda is not None:
        found["cuda"] = str(sys.modules["torch"].version.cuda)
        found["nccl"] = ".".join(str(part) for part in cuda.nccl.version())
    return found
