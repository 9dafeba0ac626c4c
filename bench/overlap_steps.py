"""What the slowdown of overlapping work does to whole steps: each run traced once, composed with and without it.

    python bench/overlap_steps.py MEASURED.jsonl --runs DIR --out bench/results/overlap_steps_h200.json

MEASURED: one JSON line a run, as the workloads print it. Each is simulated once into DIR (kept there for a second call)
and composed with the slowdown model of the accelerator, with the formula, and with none; so host times and traces are
the same on all three sides. Counted are runs of more than one rank that are steady and overlap: those in which at
least 1 ms of communication is hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measured_runs import STEADY, script_arguments, simulation, spread

from echo_hooks.analysis import analyse
from echo_hooks.graph.rundir import read_run
from echo_hooks.hardware.cluster import load_cluster

SIDES = {"learned": None, "formula": "formula", "none": "none"}
HIDDEN_MS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--accelerator", default="h200-sxm")
    parser.add_argument("--runs", type=Path, default=Path("echo-runs/overlap-steps"), help="made if missing")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for i, line in enumerate(options.measured.read_text().splitlines()):
        measured = json.loads(line)
        if measured["world_size"] > 1:
            rows.append(compared(measured, options.runs / f"{i:02d}-{measured['workload']}", options.accelerator))
            print({name: value for name, value in rows[-1].items() if name != "args"}, rows[-1]["args"], flush=True)
    counted = [row for row in rows if row["steady"] and row["hidden_ms"] >= HIDDEN_MS]
    summary = {
        "counted": len(counted),
        **{f"mean_abs_error_{side}": round(statistics.mean(abs(row[side]) for row in counted), 4) for side in SIDES},
    }
    print(summary)
    if options.out:
        found = {
            "command": f"python bench/overlap_steps.py {options.measured.name}",
            "versions": {name: version(name) for name in ("echo-hooks", "torch", "xgboost-cpu")},
            "summary": summary,
            "rows": rows,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def compared(measured: dict[str, Any], directory: Path, accelerator: str) -> dict[str, Any]:
    """Relative errors of the step (predicted / measured - 1) by side."""
    if not (directory / "manifest.json").exists():
        subprocess.run(simulation(measured, accelerator, "profile", directory), check=True, stdout=subprocess.DEVNULL)
    cluster = load_cluster(f"{accelerator}:1x{measured['world_size']}")
    row = {
        "workload": measured["workload"],
        "args": " ".join(script_arguments(measured)),
        "step_ms": round(measured["step_ms"], 2),
        "steady": spread(measured) <= STEADY,
    }
    for side, overlap in SIDES.items():
        report = analyse(read_run(directory), cluster, timing="profile", overlap=overlap).report
        row[side] = round(report.step_time_ms / measured["step_ms"] - 1, 4)
        if overlap == "none" and report.critical_role is not None:
            calls = report.critical_role.communication
            row["hidden_ms"] = round(sum(call.time_ms - call.exposed_ms for call in calls), 2)
    return row


if __name__ == "__main__":
    main()
