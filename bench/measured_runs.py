"""Runs of the workloads in examples/, one JSON line each: workload, world_size, args, and what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEADY = 0.15
"""Largest spread of a measurement that counts."""


def script(run: dict[str, Any]) -> str:
    return str(EXAMPLES / f"train_{run['workload']}.py")


def script_arguments(run: dict[str, Any]) -> list[str]:
    """The workload's own command line: true is a bare flag, null and false are left out."""
    arguments: list[str] = []
    for name, value in run["args"].items():
        if value is None or value is False or name == "local_rank":
            continue
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return arguments


def simulation(run: dict[str, Any], accelerator: str, timing: str, out: Path, trace_ranks: str = "auto") -> list[str]:
    """echo-launch for a run on one node of ``accelerator``, with as many warm-up steps as were not measured.

    ``timing``: "model", or with a choice of ``--overlap`` behind it: "model:none", "model:formula".
    """
    timing, _, overlap = timing.partition(":")
    world, warmup = run["world_size"], run["args"].get("warmup", 1)
    command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", str(world), "--json", "--quiet"]
    command += ["--cluster", f"{accelerator}:1x{world}", "--timing", timing, "--warmup-steps", str(warmup)]
    command += ["--trace-ranks", trace_ranks, *(["--overlap", overlap] if overlap else [])]
    return [*command, "--out", str(out), script(run), *script_arguments(run)]


def spread(run: dict[str, Any]) -> float:
    """(max - min) / median of the measured steps, of the worst rank."""
    return max((rank["max_ms"] - rank["min_ms"]) / rank["step_ms"] for rank in run["ranks"])
