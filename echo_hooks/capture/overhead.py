"""How long the way into and out of the dispatch mode takes, where no clock of ours can stand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from echo_hooks import host_tensors
from echo_hooks.capture.capture import Capture

ROUNDS, CALLS = 9, 60


def entry_overhead_ns(capture: Capture) -> int:
    """Host time per op that a pretended tensor costs and a device tensor would not.

    Measured on a view, which does the same C++ work on both: what `capture` takes for the script's own time between
    two views, less what a view of a real tensor takes. ``capture`` is used up: make one for this alone.
    """
    real = host_tensors.empty((8, 8), torch.float32)
    plain = _median_ns(lambda: real.view(64), time.thread_time_ns)
    capture.start()
    try:
        pretended = torch.empty(8, 8, device=f"{_device()}:0")
        inside = _median_ns(lambda: pretended.view(64), lambda: _script_ns(capture))
    finally:
        capture.stop()
    return max(0, round(inside - plain))


def _device() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None, "the pretended device is installed first"
    return device.type


def _script_ns(capture: Capture) -> int:
    recorder = capture.recorder
    recorder.enter()
    recorder.leave()
    return recorder.host_ns


def _median_ns(call: Callable[[], object], clock: Callable[[], int]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        began = clock()
        for _ in range(CALLS):
            call()
        rounds.append((clock() - began) / CALLS)
    return statistics.median(rounds)
