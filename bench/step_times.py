"""Predicted against measured step times and peak memory of the workloads in examples/.

    python bench/step_times.py MEASURED.jsonl --cluster h200-sxm --out bench/results/step_times_h200.json

MEASURED: one JSON line a run, as the workloads print it (workload, world_size, args, step_ms, ranks). Each line is
simulated with the same arguments, and as many warm-up steps as it had, on one node of ``--cluster`` and compared.
Counted are lines whose measured steps spread (max - min over median) by at most 15 %. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--cluster", default="h200-sxm", help="accelerator preset of the one node")
    parser.add_argument("--timing", default="auto", help="as for echo-launch")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    rows = []
    for line in options.measured.read_text().splitlines():
        row = compare(json.loads(line), options.cluster, options.timing)
        rows.append(row)
        print(
            "{workload:10} x{world_size} {step_ms:8.1f} {predicted_ms!s:>8} {error!s:>7} {args}".format(**row),
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    steady = [abs(row["error"]) for row in rows if row["error"] is not None and row["counted"]]
    memory = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    reserved = [abs(row["reserved_error"]) for row in rows if row.get("reserved_error") is not None]
    summary = {
        "runs": len(rows),
        "predicted": len(errors),
        "mean_abs_error": round(statistics.mean(errors), 4) if errors else None,
        "counted": len(steady),
        "counted_mean_abs_error": round(statistics.mean(steady), 4) if steady else None,
        "counted_worst_abs_error": round(max(steady), 4) if steady else None,
        "worst_abs_error": round(max(errors), 4) if errors else None,
        "mean_abs_memory_error": round(statistics.mean(memory), 4) if memory else None,
        "worst_abs_memory_error": round(max(memory), 4) if memory else None,
        "mean_abs_reserved_error": round(statistics.mean(reserved), 4) if reserved else None,
        "worst_abs_reserved_error": round(max(reserved), 4) if reserved else None,
    }
    print(summary)
    if options.out:
        made_by = {
            "command": f"python bench/step_times.py {options.measured.name} --cluster {options.cluster}"
            f" --timing {options.timing}",
            "machine": platform.processor() or platform.machine(),
            "versions": {name: version(name) for name in ("echo-hooks", "torch")}
            | {"python": platform.python_version()},
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**made_by, "summary": summary, "rows": rows}, indent=1) + "\n")


STEADY_SPREAD = 0.15


def counted(measured: dict) -> bool:
    """Whether the measured steps are steady enough to be compared with."""
    return all(r["max_ms"] - r["min_ms"] <= STEADY_SPREAD * r["step_ms"] for r in measured["ranks"])


def arguments_of(measured: dict) -> list[str]:
    """The workload's own arguments of a line."""
    arguments: list[str] = []
    for name, value in measured["args"].items():
        if value is not None and value is not False and name != "local_rank":
            arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return arguments


def simulate_command(measured: dict, accelerator: str, out: Path | None = None, timing: str = "auto") -> list[str]:
    """echo-launch for a line on one node of ``accelerator``."""
    world, warmup = measured["world_size"], str(measured["args"].get("warmup", 1))
    command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", str(world), "--json", "--quiet"]
    command += ["--cluster", f"{accelerator}:1x{world}", "--warmup-steps", warmup, "--timing", timing]
    command += [] if out is None else ["--out", str(out)]
    return [*command, str(EXAMPLES / f"train_{measured['workload']}.py"), *arguments_of(measured)]


def compare(measured: dict, accelerator: str, timing: str) -> dict:
    """One line's prediction beside its measurement; ``error`` is predicted / measured - 1."""
    command = simulate_command(measured, accelerator, timing=timing)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = {
        "workload": measured["workload"],
        "world_size": measured["world_size"],
        "step_ms": measured["step_ms"],
        "args": " ".join(arguments_of(measured)),
        "counted": counted(measured),
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
    }


def _highest(report: dict, name: str) -> int:
    return max(role[f"peak_{name}_bytes"] for role in report["roles"])


if __name__ == "__main__":
    main()
