"""One stage (pretended H100s, patches, world of eight) for all tests of a file; a fresh capture for each test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echo_hooks.graph.program import Kind
from echo_hooks.stages import Job, Stage


@pytest.fixture(scope="module")
def stage():
    stage = Stage(Job(8, 8, "h100-sxm:1x8"))
    stage.install()
    yield stage
    stage.remove()


class Watched:
    """A running capture and what it has recorded so far."""

    def __init__(self, capture):
        self.capture = capture
        self.recorder = capture.recorder

    @property
    def mode(self):
        return self.capture.mode

    @property
    def program(self):
        return self.recorder.program.program()

    @property
    def signatures(self):
        """OpSignature of each kernel and copy, in order."""
        program = self.program
        on_device = np.isin(program.kind, (Kind.COMPUTE, Kind.COPY))
        return [self.recorder.ops.signatures[op] for op in program.op[on_device]]

    @property
    def kernels(self) -> list[str]:
        return [signature.name.removeprefix("aten.") for signature in self.signatures]

    def modules(self, phase) -> list[tuple[str, str]]:
        """(kernel, module path) of the records of one phase."""
        program = self.program
        names = self.recorder.ops.signatures
        rows = np.flatnonzero((program.kind == Kind.COMPUTE) & (program.phase == phase))
        return [(names[program.op[i]].name.split(".")[1], program.strings[program.module[i]]) for i in rows]

    @property
    def assumptions(self) -> dict[str, str]:
        return {a.kind: a.value for a in self.recorder.assumptions.values()}


@pytest.fixture
def watch(stage):
    """``watch(warmup, steps)`` starts a capture; it stops at the end of the test, or by ``stop()``."""
    started = []

    def start(warmup: int = 1, steps: int = 1) -> Watched:
        stage.job = Job(8, 8, "h100-sxm:1x8", warmup_steps=warmup, steps=steps)
        capture = stage.become(0)
        torch.cuda.set_device(0)
        capture.start()
        started.append(capture)
        return Watched(capture)

    yield start
    for capture in started:
        capture.stop()


@pytest.fixture
def echo(watch):
    return watch()
