"""Predicted against measured step times and peak memory of the workloads in examples/.

    python bench/step_times.py MEASURED.jsonl --cluster h200-sxm --out bench/results/step_times_h200.json

MEASURED: one JSON line a run, as the workloads print it (workload, world_size, args, step_ms, ranks). Each line is
simulated with the same arguments on one node of ``--cluster`` and compared. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--cluster", default="h200-sxm", help="accelerator preset of the one node")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    rows = []
    for line in options.measured.read_text().splitlines():
        row = compare(json.loads(line), options.cluster)
        rows.append(row)
        print(
            "{workload:10} x{world_size} {step_ms:8.1f} {predicted_ms!s:>8} {error!s:>7} {args}".format(**row),
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    memory = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    reserved = [abs(row["reserved_error"]) for row in rows if row.get("reserved_error") is not None]
    summary = {
        "runs": len(rows),
        "predicted": len(errors),
        "mean_abs_error": round(statistics.mean(errors), 4) if errors else None,
        "worst_abs_error": round(max(errors), 4) if errors else None,
        "mean_abs_memory_error": round(statistics.mean(memory), 4) if memory else None,
        "worst_abs_memory_error": round(max(memory), 4) if memory else None,
        "mean_abs_reserved_error": round(statistics.mean(reserved), 4) if reserved else None,
        "worst_abs_reserved_error": round(max(reserved), 4) if reserved else None,
    }
    print(summary)
    if options.out:
        made_by = {
            "command": f"python bench/step_times.py {options.measured.name} --cluster {options.cluster}",
            "machine": platform.processor() or platform.machine(),
            "versions": {name: version(name) for name in ("echo-hooks", "torch")}
            | {"python": platform.python_version()},
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**made_by, "summary": summary, "rows": rows}, indent=1) + "\n")


def compare(measured: dict, accelerator: str) -> dict:
    """One line's prediction beside its measurement; ``error`` is predicted / measured - 1.

    With more ranks than one also the step without slowdown of what runs together, and with the formula's.
    """
    world = measured["world_size"]
    arguments = []
    for name, value in measured["args"].items():
        if value is None or value is False or name == "local_rank":
            continue
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    cluster, others = f"{accelerator}:1x{world}", {}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", str(world), "--json", "--quiet"]
        command += ["--cluster", cluster, "--out", f"{directory}/run"]
        command += [str(EXAMPLES / f"train_{measured['workload']}.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for overlap in ("none", "formula") if world > 1 and done.returncode in (0, 3) else ():
            again = [sys.executable, "-m", "echo_launch.sim", "compose", f"{directory}/run", "--cluster", cluster]
            composed = subprocess.run([*again, "--overlap", overlap, "--json"], capture_output=True, text=True)
            step_ms = json.loads(composed.stdout)["step_time_ms"]
            others[f"error_overlap_{overlap}"] = round(step_ms / measured["step_ms"] - 1, 4)
    row = {
        "workload": measured["workload"],
        "world_size": world,
        "step_ms": measured["step_ms"],
        "args": " ".join(arguments),
    }
    if done.returncode not in (0, 3):
        return {**row, "predicted_ms": None, "error": None, "memory_error": None, "failure": done.stderr[-500:]}
    report = json.loads(done.stdout)
    peaks = {
        name: (max(r[f"peak_{name}_bytes"] for r in measured["ranks"]), _highest(report, name))
        for name in ("allocated", "reserved")
    }
    return {
        **row,
        "predicted_ms": round(report["step_time_ms"], 2),
        "error": round(report["step_time_ms"] / measured["step_ms"] - 1, 4),
        "peak_allocated_bytes": peaks["allocated"][0],
        "predicted_peak_allocated_bytes": peaks["allocated"][1],
        "memory_error": round(peaks["allocated"][1] / peaks["allocated"][0] - 1, 4),
        "peak_reserved_bytes": peaks["reserved"][0],
        "predicted_peak_reserved_bytes": peaks["reserved"][1],
        "reserved_error": round(peaks["reserved"][1] / peaks["reserved"][0] - 1, 4),
        "breakdown": report["breakdown"],
        "evidence": report["evidence"],
        "slowdown_ms": next((role["slowdown"] for role in report["roles"] if role["critical"]), {}),
        **others,
    }


def _highest(report: dict, name: str) -> int:
    return max(role[f"peak_{name}_bytes"] for role in report["roles"])


if __name__ == "__main__":
    main()
