"""Recording a profile database: every distinct operation, the most valuable first, until time is up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.graph.ops import OpSignature
from echo_hooks.profiling.timer import Planned, Sample, TimingFailed
from echo_hooks.timing.classes import PRODUCTS, op_class
from echo_hooks.timing.database import CONDITIONS, Database, Measurement, digest_of, key_of, write_database

BATCH_CALLS = 64
BATCH_BYTES = 24 << 30
CHECKPOINT_S = 20.0

REST, LONGEST_REST_US = 3.0, 10_000.0
"""A product rests so many times its own length before a cold call: busy a quarter of the time, the device keeps its
full clock."""


@dataclass(frozen=True)
class Machine:
    """What a measurement is of: the device as its driver names it, and the libraries' versions."""

    device: str
    torch: str
    cuda: str
    cudnn: str


@dataclass
class Progress:
    """Where a recording stands."""

    wanted: int = 0
    measured: int = 0
    skipped: int = 0
    seconds: float = 0.0


@dataclass
class Recorder:
    """``timer``: a KinetoTimer, or a test's. ``rebuild``: signature -> call, raising CannotRebuild.

    ``cost_us``: a guess of a call's time, which decides how often it is made.
    """

    machine: Machine
    timer: Any
    rebuild: Callable[[OpSignature], Callable[[], Any]]
    operand_bytes: Callable[[OpSignature], int]
    cost_us: Callable[[OpSignature], float]
    path: Path
    database: Database = field(default_factory=Database)
    budget_s: float = float("inf")
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    conditions: Sequence[str] = CONDITIONS

    def record(self, wanted: Sequence[OpSignature]) -> Progress:
        """Measure ``wanted`` in order, what the database has already left out; writes it as it goes."""
        began = saved = self.clock()
        known = {key_of(r.signature) for r in self.database.rows if r.device == self.machine.device}
        failed = {digest for _, _, digest in self.database.unmeasured}
        progress = Progress(wanted=len(wanted))
        batch: list[tuple[OpSignature, Callable[[], Any]]] = []
        held = 0
        for signature in [*wanted, None]:
            if signature is not None and self.clock() - began < self.budget_s:
                if key_of(signature) in known or digest_of(signature) in failed:
                    progress.skipped += 1
                    continue
                known.add(key_of(signature))
                size = self.operand_bytes(signature)
                if batch and (len(batch) >= BATCH_CALLS or held + size > BATCH_BYTES):
                    progress.measured += self._measure(batch)
                    batch, held = [], 0
                try:
                    call = self._prepared(signature, alone=not batch)
                except _Full:  # the calls in wait hold the device's memory
                    progress.measured += self._measure(batch)
                    batch, held = [], 0
                    call = self._prepared(signature, alone=True)
                if call is not None:
                    batch.append((signature, call))
                    held += size
            if self.clock() - saved > CHECKPOINT_S:
                write_database(self.path, self.database)
                saved = self.clock()
                self.say(f"{len(self.database.rows)} measurements after {saved - began:.0f} s")
        progress.measured += self._measure(batch)
        write_database(self.path, self.database)
        progress.seconds = self.clock() - began
        return progress

    def _prepared(self, signature: OpSignature, *, alone: bool) -> Callable[[], Any] | None:
        """The call, made once; None for one that cannot be made, which is written down.

        ``alone``: no other call waits; else a lack of memory raises _Full.
        """
        try:
            call = self.rebuild(signature)
            self.timer.warm_up(call)
            return call
        except Exception as error:  # whatever an op raises on made-up operands
            if type(error).__name__ == "OutOfMemoryError" and not alone:
                raise _Full from None
            why = (str(error).splitlines() or [type(error).__name__])[0][:160]
            self._unmeasured(signature, why)
            if "CUDA error" in str(error) or "device-side assert" in str(error):
                write_database(self.path, self.database)
                raise Fatal(f"{signature.name} broke the device's context: {why}") from None
            return None

    def _measure(self, batch: list[tuple[OpSignature, Callable[[], Any]]]) -> int:
        if not batch:
            return 0
        plan = [p for index, (signature, _) in enumerate(batch) for p in self._planned(index, signature)]
        try:
            samples = self.timer.measure([call for _, call in batch], plan)
        except TimingFailed as error:
            if len(batch) == 1:
                self._unmeasured(batch[0][0], str(error))
                return 0
            half = len(batch) // 2
            return self._measure(batch[:half]) + self._measure(batch[half:])
        by_call: dict[tuple[int, str], list[Sample]] = {}
        for place, sample in zip(plan, samples):
            by_call.setdefault((place.index, place.condition), []).append(sample)
        for (index, condition), found in by_call.items():
            row = self._row(batch[index][0], condition, found)
            if row is not None:
                self.database.rows.append(row)
        return len(batch)

    def _unmeasured(self, signature: OpSignature, why: str) -> None:
        self.database.unmeasured.append((signature.name, why, digest_of(signature)))

    def _planned(self, index: int, signature: OpSignature) -> list[Planned]:
        """Long calls vary little. Products draw so much power that a device kept busy with them slows its clock: they
        are timed rested and loaded; all others with operands out of the cache and in it."""
        cost_us = self.cost_us(signature)
        count = 3 if cost_us > 3000 else 5 if cost_us > 500 else 7
        opclass = op_class(signature.name)
        if opclass is not None and opclass.name in PRODUCTS:
            rest_us = min(REST * cost_us, LONGEST_REST_US)
            plan = [Planned(index, "cold", rest_us)] * min(count, 4) + [Planned(index, "loaded")] * count
        else:
            plan = [Planned(index, "cold")] * count + [Planned(index, "warm")] * count
        return [p for p in plan if p.condition in self.conditions]

    def _row(self, signature: OpSignature, condition: str, samples: list[Sample]) -> Measurement | None:
        """None for a call that launches nothing. The first warm call is not warm yet."""
        kept = samples[1:] if condition == "warm" and len(samples) > 1 else samples
        if not any(s.kernels for s in kept):
            if condition == "cold":
                self._unmeasured(signature, "it launches nothing")
            return None
        spans = np.array([s.span_us for s in kept])
        middle = sorted(kept, key=lambda s: s.span_us)[len(kept) // 2]
        p10, median, p90 = np.quantile(spans, [0.1, 0.5, 0.9]).astype(np.float32)
        names = Counter(name[:80] for name in middle.kernels)
        return Measurement(
            signature=signature,
            device=self.machine.device,
            torch=self.machine.torch,
            cuda=self.machine.cuda,
            cudnn=self.machine.cudnn,
            condition=condition,
            samples=len(kept),
            median_us=float(median),
            p10_us=float(p10),
            p90_us=float(p90),
            busy_us=float(np.median([s.busy_us for s in kept])),
            kernels=len(middle.kernels),
            kernel_names=tuple(names.items()),
        )


class _Full(Exception):
    """No memory is left beside the calls that wait to be measured."""


class Fatal(Exception):
    """The device is lost to this process; what was measured is on disk."""


def most_valuable_first(
    tables: Iterable[tuple[Sequence[OpSignature], Sequence[float]]], cost_us: Callable[[OpSignature], float]
) -> list[OpSignature]:
    """Distinct local operations of several runs by the share of a run's kernel time they are guessed to take.

    ``tables``: (signatures, how often a step makes each) of every run; a run counts as much as any other.
    """
    worth: dict[tuple, float] = {}
    first: dict[tuple, OpSignature] = {}
    for signatures, counts in tables:
        times = np.array([cost_us(s) for s in signatures]) * np.asarray(counts, dtype=float)
        total = float(times.sum()) or 1.0
        for signature, share in zip(signatures, times / total):
            key = key_of(signature)
            first.setdefault(key, signature)
            worth[key] = worth.get(key, 0.0) + float(share)
    return [first[key] for key in sorted(worth, key=lambda k: (-worth[k], repr(k)))]


__all__ = ["CONDITIONS", "Fatal", "Machine", "Progress", "Recorder", "most_valuable_first"]
