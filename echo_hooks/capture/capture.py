"""One rank's capture: everything that watches the script, switched on and off together, and the trace it gives."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch

from echo_hooks.capture import threads
from echo_hooks.capture.labels import Labels
from echo_hooks.capture.memory import Memory
from echo_hooks.capture.mode import CaptureMode
from echo_hooks.capture.plans import Planner
from echo_hooks.capture.steadiness import unsteady
from echo_hooks.capture.steps import Steps
from echo_hooks.capture.values import CaptureValues
from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.pretended import set_handler
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import COLUMNS, DEFAULTS, Kind, Program
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.patching import PatchSet


class Capture:
    """Watches the script between ``start()`` and ``stop()``; ``trace()`` gives the measured steps.

    ``values`` is what the virtual world needs; set ``mode.world`` once the world exists.
    """

    def __init__(
        self,
        recorder: Recorder,
        allocator: CachingAllocator,
        planner: Planner,
        warmup: int,
        steps: int,
        workspace_bytes: int = 0,
    ):
        self.recorder = recorder
        self.labels = Labels(recorder)
        self.steps = Steps(recorder, self.labels, warmup, steps)
        self.memory = Memory(recorder, allocator, workspace_bytes)
        self.mode = CaptureMode(recorder, planner, self.memory, self.labels, self.steps)
        self.values = CaptureValues(self.mode)
        self.host_speed: dict[str, float] = {}  # of this machine, as whoever sets this capture up has measured it
        self._threads = PatchSet(threads.patches(self.mode))
        self.labels.on_module = self.memory.own_module
        self.steps.on_step_begin = self.memory.own_gradients
        self.steps.on_step_end = self.memory.own_state

    def start(self) -> None:
        self.labels.install()
        self.recorder.relabel = self.labels.update
        self.steps.install()
        self._threads.install()
        torch._C._set_only_lift_cpu_tensors(True)
        set_handler(self.mode.run)
        gc.callbacks.append(self._collector)
        self.mode.__enter__()

    def stop(self) -> None:
        self.mode.__exit__(None, None, None)
        gc.callbacks.remove(self._collector)
        set_handler(None)
        self._threads.remove()
        torch._C._set_only_lift_cpu_tensors(False)
        self.steps.remove()
        self.labels.remove()
        self.recorder.relabel = None

    def _collector(self, phase: str, _info) -> None:
        """Our records make the cyclic collector slower than the script's own run would see it: our time."""
        if phase == "start":
            self.recorder.enter()
        else:
            self.recorder.leave()

    def trace(self, trace_seconds: float = 0.0) -> RankTrace:
        """What the script did as a RankTrace; without a measured step its program is empty (see `missing_steps`)."""
        steps, recorder = self.steps, self.recorder
        steps.finish()
        whole = recorder.program.program()
        memory = self.memory.summary()  # first: it corrects the events' holders
        memory_events = recorder.memory.columns()
        made = len(steps.boundaries)
        begin = end = len(whole)
        if made >= steps.wanted:
            begin = steps.boundaries[steps.warmup - 1] if steps.warmup else self.labels.first_module_record
            end = steps.boundaries[-1]
            if steps.warmup:  # without warm-up the user asked for all that the first step does
                self._say_if_unsteady(whole)
                whole, memory_events, begin = _one_offs_first(whole, memory_events, recorder.one_offs, begin, end)
        number = max(made - steps.warmup, 0) if end > begin else 0
        program = whole.slice(begin, end)
        if number:
            program = _with_marks(program, recorder, steps.warmup)
        return RankTrace(
            rank=recorder.rank,
            program=program,
            prologue=whole.slice(0, begin),
            ops=recorder.ops.signatures,
            groups=recorder.groups,
            memory=memory,
            memory_events=_memory_window(memory_events, begin, end),
            assumptions=sorted(recorder.assumptions.values(), key=lambda a: (a.kind, a.site, a.value)),
            notes=list(recorder.notes),
            steps=number,
            tokens_per_step=_tokens(program, recorder.ops.signatures) // max(number, 1),
            trace_seconds=trace_seconds,
            tallies=dict(recorder.tallies),
            created=[group.index for group in recorder.groups if not group.local],
            step_ends=list(steps.boundaries),
            unanswered=sorted(recorder.unanswered),
            host_speed=self.host_speed,
        )

    def _say_if_unsteady(self, whole: Program) -> None:
        """The measured steps, and the last warm-up step if it is not the script's first, should communicate alike."""
        steps, recorder = self.steps, self.recorder
        once = np.zeros(len(whole), bool)
        for begin, end in recorder.one_offs:
            once[begin:end] = True
        bare = Program({k: np.where(once, Kind.HOST, v) if k == "kind" else v for k, v in whole.columns.items()})
        first = max(steps.warmup - 1, 1)
        edges = steps.boundaries[first - 1 :]
        found = unsteady(bare, recorder.ops.signatures, recorder.groups, list(pairwise(edges)), first)
        if found is not None:
            recorder.note(found)

    def missing_steps(self) -> str | None:
        """One sentence when the script made fewer optimizer steps than were asked for, None otherwise."""
        steps = self.steps
        made = len(steps.boundaries)
        if made >= steps.wanted:
            return None
        answers = sorted(self.recorder.assumptions.values(), key=lambda a: a.site)[:5]
        hint = "; ".join(f"{a.kind} answered with {a.value} at {a.site} ({a.count}x)" for a in answers)
        return (
            f"rank {self.recorder.rank}: the script ended after {made} optimizer step(s), but {steps.warmup} warm-up "
            f"and {steps.wanted - steps.warmup} measured step(s) were asked for (--warmup-steps, --steps)."
            + (f" Values that Echo had to make up: {hint}." if hint else "")
        )


def _one_offs_first(
    program: Program, memory_events: dict[str, np.ndarray], one_offs: list[tuple[int, int]], begin: int, end: int
) -> tuple[Program, dict[str, np.ndarray], int]:
    """Program and memory events with the one-off records of [begin, end) moved before ``begin``, and the new begin.

    Every rank moves the same calls, so those of a group still meet in order.
    """
    moved = np.zeros(len(program), bool)
    for first, last in one_offs:
        moved[max(first, begin) : min(last, end)] = True
    if not moved.any():
        return program, memory_events, begin
    order = np.concatenate(
        [np.arange(begin), np.flatnonzero(moved), begin + np.flatnonzero(~moved[begin:])], dtype=np.int64
    )
    position = np.arange(len(program) + 1)  # a memory event may come after the last record
    position[order] = np.arange(len(program))
    record = position[memory_events["record"]]
    in_order = np.argsort(record, kind="stable")
    events = {**memory_events, "record": record}
    return (
        Program({name: column[order] for name, column in program.columns.items()}, program.strings, program.streams),
        {name: column[in_order] for name, column in events.items()},
        begin + int(moved.sum()),
    )


def _with_marks(program: Program, recorder: Recorder, first_step: int) -> Program:
    """``program`` between a step_begin and a step_end mark."""
    rows: dict[str, np.ndarray] = {}
    for name, dtype in COLUMNS.items():
        default = DEFAULTS.get(name, Kind.MARK)
        column: np.ndarray = np.empty(len(program) + 2, dtype)
        column[1:-1] = program.columns[name]
        column[0] = column[-1] = default
        rows[name] = column
    rows["op"][0] = recorder.ops.add(OpSignature("step_begin"))
    rows["op"][-1] = recorder.ops.add(OpSignature("step_end"))
    rows["seq"][0] = rows["seq"][-1] = first_step
    return Program(rows, program.strings, program.streams)


def _memory_window(events: dict[str, np.ndarray], begin: int, end: int) -> dict[str, np.ndarray]:
    """Events of the window, after the storages that live when it opens (record 0)."""
    record = events["record"]
    before = record < begin
    alive = np.zeros(len(record), bool)
    freed = set(events["storage"][before & (events["bytes"] < 0)].tolist())
    candidates = np.flatnonzero(before & (events["bytes"] > 0))
    last = {int(events["storage"][event]): event for event in candidates}
    counts: dict[int, int] = defaultdict(int)
    for event in np.flatnonzero(before):
        counts[int(events["storage"][event])] += 1 if events["bytes"][event] > 0 else -1
    for storage, event in last.items():
        alive[event] = storage not in freed or counts[storage] > 0
    keep = alive | ((record >= begin) & (record <= end))
    window = {name: column[keep] for name, column in events.items()}
    # One mark stands before the window's first record.
    window["record"] = np.where(window["record"] < begin, 0, window["record"] - begin + 1)
    return window


_LOOKUP, _LOOKUP_BACKWARD = "aten.embedding.default", "aten.embedding_dense_backward.default"


def _tokens(program: Program, ops: list[OpSignature]) -> int:
    """Tokens trained on in the window: looked up in the table with most lookups, as positions are looked up too.

    Where embeddings learn, their backward passes count: an evaluation or a recomputation looks up without one.
    """
    counts: dict[str, dict[object, int]] = {_LOOKUP: defaultdict(int), _LOOKUP_BACKWARD: defaultdict(int)}
    lookups = {i: op for i, op in enumerate(ops) if op.name in counts and len(op.inputs) > 1}
    for record in np.flatnonzero(np.isin(program.op, list(lookups)) & (program.kind == Kind.COMPUTE)):
        op = lookups[int(program.op[record])]
        table = op.inputs[0] if op.name == _LOOKUP else op.outputs[0]
        counts[op.name][int(program.module[record]), table.shape] += math.prod(op.inputs[1].shape)
    return max((counts[_LOOKUP_BACKWARD] or counts[_LOOKUP]).values(), default=0)
