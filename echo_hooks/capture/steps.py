"""Optimizer-step boundaries, found without the user's help, and the clean stop after the last one asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echo_hooks.capture.labels import Labels
from echo_hooks.graph.recorder import Recorder


class StepsDone(BaseException):
    """Raised through the script once enough steps are recorded; not an Exception, so that scripts do not catch it."""


class Steps:
    """A step ends with the last optimizer call before the next backward pass.

    A training step is periodic, so any point of it may serve as boundary as long as it is the same in every period.
    Several optimizer calls in a row (ZeRO steps each parameter group on its own) are one step; with several
    optimizers (a GAN) the one that stepped first counts. A call without a backward pass before it is no step. The
    boundary is known only when the next backward begins: ``boundaries`` then gets the program length noted after the
    optimizer call.
    """

    def __init__(self, recorder: Recorder, labels: Labels, warmup: int, steps: int):
        self.recorder = recorder
        self.labels = labels
        self.wanted = warmup + steps
        self.warmup = warmup
        self.boundaries: list[int] = []
        self.optimizer_calls = 0
        self.on_step_begin: Callable[[Optimizer], None] | None = None
        self.on_step_end: Callable[[Optimizer], None] | None = None
        self._counted: int | None = None
        self._pending = -1
        self._thread = 0  # the one that trains: only there does a step end
        self._handles: list = []
        self._kept: list = []

    def install(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer, _args, _kwargs) -> None:
        with self.recorder.own_time():
            self.labels.in_optimizer += 1
            if self.on_step_begin is not None:
                self.on_step_begin(optimizer)

    def _after(self, optimizer, _args, _kwargs) -> None:
        with self.recorder.own_time():
            self.labels.in_optimizer = max(0, self.labels.in_optimizer - 1)
            self.optimizer_calls += 1
            if self.on_step_end is not None:
                self.on_step_end(optimizer)
            if not self.labels.backward_seen and self._pending < 0:
                return  # no gradients: a framework that makes the optimizer's state ahead of time (DeepSpeed does)
            if self._counted is None:
                self._counted = id(optimizer)
                self._kept.append(optimizer)  # keeps the id from being reused
            if id(optimizer) == self._counted:
                self._thread = threading.get_ident()
                self._pending = len(self.recorder.program)
                self.labels.backward_seen = False

    def check(self) -> None:
        """Called for every op: closes the step once backward runs again. Raises StepsDone after the last one."""
        if self._pending >= 0 and self.labels.backward_seen and threading.get_ident() == self._thread:
            self._close()
            if len(self.boundaries) >= self.wanted:
                raise StepsDone

    def finish(self) -> None:
        """The script has ended: an optimizer call that no backward followed is a boundary too."""
        if self._pending >= 0:
            self._close()

    def _close(self) -> None:
        self.boundaries.append(self._pending)
        self._pending = -1
