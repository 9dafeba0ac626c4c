"""How fast this machine's host runs what a training script's host runs: the ratio of two machines scales host time.

Fixed loops, so that two machines run the same instructions up to the versions of Python and torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def host_speed(device: torch.device | None = None) -> dict[str, float]:
    """Microseconds per iteration (the best of several rounds: what the machine can do when nothing disturbs it).

    As ``momentary``, and ``module_us``: a small module's forward and backward on the CPU.
    """
    layer = torch.nn.Linear(4, 4)
    batch = torch.ones(2, 4)

    def module() -> None:
        layer(batch).sum().backward()

    return {**momentary(device, rounds=7, share=1.0), "module_us": round(_best(module, 400, 7), 4)}


Clock = Callable[[], float]


def momentary(
    device: torch.device | None = None, rounds: int = 2, share: float = 0.05, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Microseconds per iteration of ``share`` of the loops, the best of ``rounds``: as it stands, some milliseconds.

    ``clock``: in seconds; that of the thread's processor time leaves out what other processes take.
    ``python_us``: attribute, dictionary, call and arithmetic. ``dispatch_us``: one CPU op on one element, through the
    dispatcher. With ``device`` also ``launch_us``: one op on one element there, the device keeping up.
    """
    x = torch.ones(1)
    found = {
        "python_us": _best(_python_loop, int(2000 * share), rounds, inner=20, clock=clock),
        "dispatch_us": _best(lambda: x.add_(1.0), int(4000 * share), rounds, clock=clock),
    }
    if device is not None and device.type == "cuda":
        y = torch.ones(1, device=device)

        def launch() -> None:
            y.add_(1.0)

        launch()
        found["launch_us"] = _best(launch, int(400 * share), rounds, after=torch.cuda.synchronize)
    return {name: round(value, 4) for name, value in found.items()}


def mean(speeds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several measurements, what all of them have."""
    names = set.intersection(*(set(found) for found in speeds)) if speeds else set()
    return {name: statistics.mean(found[name] for found in speeds) for name in sorted(names)}


class _Record:
    __slots__ = ("count", "names")

    def __init__(self) -> None:
        self.count = 0
        self.names: dict[str, int] = {}

    def note(self, name: str) -> None:
        self.count += 1
        self.names[name] = self.names.get(name, 0) + 1


def _python_loop() -> None:
    record = _Record()
    for i in range(20):
        record.note("even" if i % 2 == 0 else "odd")


def _best(
    call: Callable[[], object],
    count: int,
    rounds: int,
    *,
    inner: int = 1,
    after: Callable[[], object] | None = None,
    clock: Clock = time.perf_counter,
) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = clock()
        for _ in range(count):
            call()
        best = min(best, clock() - began)
        if after is not None:
            after()
    return best / count / inner * 1e6
