"""What the record of a real run costs: microseconds of the host per optimizer step.

    python bench/record_overhead.py [--steps 2000] [--out bench/results/record_overhead.json]

A small model trains on the CPU in one process, with the record's hook and without it in turn, in blocks of 50 steps.
The difference of the medians is small against the noise of a step, so the hook is timed by itself too, writes included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from echo_launch.recording import Recording

BLOCK = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options.steps, directory)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(steps: int, directory: str) -> dict:
    recording = Recording(directory, "bench", [], 0)
    recording._install(torch)  # what the import of torch does in a rank of a real run
    inside: list[float] = []
    after = recording._after_call

    def timed(optimizer) -> None:
        began = time.perf_counter()
        after(optimizer)
        inside.append((time.perf_counter() - began) * 1e6)

    recording._after_call = timed  # type: ignore[method-assign]
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 256)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps):
        recording._off = off = number // BLOCK % 2 == 0
        began = time.perf_counter()
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times[off].append((time.perf_counter() - began) * 1e6)
    return {
        "command": f"python bench/record_overhead.py --steps {steps}",
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("echo-hooks", "torch")} | {"python": platform.python_version()},
        "step_with_us": round(statistics.median(times[False]), 2),
        "step_without_us": round(statistics.median(times[True]), 2),
        "hook_median_us": round(statistics.median(inside), 2),
        "hook_mean_us": round(statistics.mean(inside), 2),
    }


if __name__ == "__main__":
    main()
