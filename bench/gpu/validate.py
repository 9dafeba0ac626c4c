"""Predicted against measured step times and peak memory of the workloads in examples/.

    python bench/gpu/validate.py MEASURED.jsonl --timing execute,model --out bench/results/h200x2.json
    python bench/gpu/validate.py PLANS.jsonl --real NEW.jsonl        # predict, then run under torchrun on these GPUs

MEASURED: one JSON line a run, as the workloads print it (workload, world_size, args, step_ms, ranks). Each line is
simulated with the same arguments on one node of ``--cluster``, in every mode of ``--timing`` ("model:none" with
--overlap none), and compared. Lines whose
measured steps spread by more than 15 % of the median ((max - min) / median, of the worst rank) are shown, not counted.
Nothing is fitted here.

``--real FILE`` simulates first, then runs each line's script under torchrun with as many of the local GPUs as it has
ranks, appends what it measured to FILE, and compares with that. PLANS need no measurement: workload, world_size, args.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measured_runs import STEADY, script, script_arguments, simulation, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="runs, or plans of runs, one JSON line each")
    parser.add_argument("--timing", default="execute", help="modes side by side: execute,profile,model,model:none")
    parser.add_argument("--configs", help="lines to take, counted from 0: 0,3,5-8")
    parser.add_argument("--cluster", default="h200-sxm", help="accelerator preset of the one node")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once: they measure one after the other")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine that the simulations share out")
    parser.add_argument("--trace-ranks", default="auto", help="as echo-launch takes it")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one simulation or run")
    parser.add_argument("--keep", type=Path, help="keep the run directories here, as LINE-WORKLOAD, of one mode")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--real", type=Path, metavar="FILE", help="run the scripts too and append their results here")
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.measured.read_text().splitlines() if line.strip()]
    chosen = _chosen(options.configs, len(runs))
    modes = options.timing.split(",")
    began = time.perf_counter()
    tasks = [(i, mode) for mode in modes for i in chosen]
    predictions: dict[tuple[int, str], dict[str, Any]] = {}
    for wave in (tasks[at : at + options.jobs] for at in range(0, len(tasks), options.jobs)):
        with ThreadPoolExecutor(len(wave)) as pool:

            def one(slot: int, wave: list[tuple[int, str]] = wave) -> dict[str, Any]:
                line, mode = wave[slot]
                kept = options.keep / f"{line:02d}-{runs[line]['workload']}" if options.keep else None
                return predict(runs[line], mode, options, slot % options.gpus, kept)

            predictions.update(zip(wave, pool.map(one, range(len(wave)))))
    table = compared(runs, chosen, modes, predictions)
    if options.real:
        if options.out:  # what was predicted is on disk before anything is measured
            write(table, options)
        for i in chosen:
            runs[i] = run_for_real(runs[i], options.real, options.limit)
            print(f"{i} measured: {runs[i].get('step_ms')} ms", flush=True)
        table = compared(runs, chosen, modes, predictions)
    for row in table["rows"]:
        print(line_of(row, modes))
    for mode in modes:
        print(mode, json.dumps(table["summary"][mode]))
    print(f"{time.perf_counter() - began:.0f} s")
    if options.out:
        write(table, options)


def compared(runs: list[dict], chosen: list[int], modes: list[str], predictions: dict) -> dict[str, Any]:
    """Every chosen run beside its predictions, and the errors over those that count."""
    rows = []
    for i in chosen:
        predicted = {mode: errors(predictions[i, mode], runs[i]) for mode in modes}
        rows.append({"config": i, **facts(runs[i]), "predicted": predicted})
    return {"summary": {mode: summarised(rows, mode) for mode in modes}, "rows": rows}


def write(table: dict[str, Any], options: argparse.Namespace) -> None:
    made_by = {
        "command": f"python bench/gpu/validate.py {options.measured.name} --timing {options.timing}",
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()}
        | _versions("echo-hooks", "torch", "megatron-core", "deepspeed"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**made_by, **table}, indent=1) + "\n")


def _chosen(text: str | None, count: int) -> list[int]:
    if text is None:
        return list(range(count))
    chosen: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        chosen += range(int(low), int(high or low) + 1)
    return [i for i in chosen if i < count]


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# ---- one run ----


def predict(
    run: dict[str, Any], mode: str, options: argparse.Namespace, gpu: int, kept: Path | None = None
) -> dict[str, Any]:
    """report.json of the run's simulation on ``gpu``, with ``seconds``; "failure" where there is none. ``kept``: where
    the run directory goes if it is to stay."""
    limit_s = options.limit
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        command = simulation(run, options.cluster, mode, kept or Path(scratch) / "run", options.trace_ranks)
        shared = mode.startswith("execute") and options.gpus > 1
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)} if shared else None
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {limit_s:.0f} s", "seconds": limit_s}
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode not in (0, 3):
        return {"failure": done.stderr.strip()[-500:], "seconds": seconds}
    return {**json.loads(done.stdout), "seconds": seconds, "said": done.stderr.strip()[-500:]}


def run_for_real(run: dict[str, Any], results: Path, limit_s: float) -> dict[str, Any]:
    """The run under torchrun on this machine's GPUs; its line, also appended to ``results``."""
    with tempfile.TemporaryDirectory() as scratch:
        line = Path(scratch) / "line.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(run["world_size"]), script(run), *script_arguments(run), "--result", str(line)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {**run, "failure": f"not done after {limit_s:.0f} s"}
        if done.returncode or not line.exists():
            return {**run, "failure": done.stderr.strip()[-500:]}
        measured = json.loads(line.read_text())
    with results.open("a") as file:
        file.write(json.dumps(measured) + "\n")
    return measured


# ---- comparison ----


def facts(run: dict[str, Any]) -> dict[str, Any]:
    """What is measured of a run."""
    row = {"workload": run["workload"], "world_size": run["world_size"], "args": " ".join(script_arguments(run))}
    if "ranks" not in run:
        return {**row, "step_ms": None, "failure": run.get("failure", "not measured")}
    spreads = spread(run)
    return {
        **row,
        "step_ms": round(run["step_ms"], 2),
        "spread": round(spreads, 3),
        "counted": spreads <= STEADY,
        "peak_allocated_bytes": max(rank["peak_allocated_bytes"] for rank in run["ranks"]),
        "peak_reserved_bytes": max(rank["peak_reserved_bytes"] for rank in run["ranks"]),
    }


def errors(report: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Prediction and its relative errors (predicted / measured - 1) in step time and peaks."""
    if "failure" in report:
        return {"failure": report["failure"], "seconds": report["seconds"]}
    row = {
        "step_ms": round(report["step_time_ms"], 2),
        "seconds": report["seconds"],
        "evidence": {name: round(share, 3) for name, share in report["evidence"].items()},
        "breakdown": report["breakdown"],
    }
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        row[name] = max(role[name] for role in report["roles"])
    said = [note["value"] for note in report["assumptions"] if "times as slow" in note["value"]]
    if said:
        row["slow_host"] = said[0]
    if "ranks" in run:
        measured = facts(run)
        row["error"] = round(report["step_time_ms"] / run["step_ms"] - 1, 4)
        row["allocated_error"] = round(row["peak_allocated_bytes"] / measured["peak_allocated_bytes"] - 1, 4)
        row["reserved_error"] = round(row["peak_reserved_bytes"] / measured["peak_reserved_bytes"] - 1, 4)
    return row


def line_of(row: dict[str, Any], modes: list[str]) -> str:
    measured = "       -" if row["step_ms"] is None else f"{row['step_ms']:8.1f}"
    text = f"{row['config']:3} {row['workload']:10} x{row['world_size']} {measured}"
    for mode in modes:
        found = row["predicted"][mode]
        if "failure" in found:
            text += f" | {mode} failed: {found['failure'].splitlines()[-1][:120] if found['failure'] else ''}"
            continue
        text += f" | {mode} {found['step_ms']:8.1f}"
        if "error" in found:
            text += f" {found['error']:+7.1%} mem {found['allocated_error']:+.1%} {found['reserved_error']:+.1%}"
    return text + ("" if row.get("counted", True) else "  (not counted)") + f"  {row['args']}"


def summarised(rows: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Mean and worst absolute errors over the counted runs that the mode predicted."""
    found = [row["predicted"][mode] for row in rows if row.get("counted")]
    known = [prediction for prediction in found if "error" in prediction]
    summary: dict[str, Any] = {"counted": len(found), "predicted": len(known)}
    for name in ("error", "allocated_error", "reserved_error"):
        values = [abs(prediction[name]) for prediction in known]
        summary[f"mean_abs_{name}"] = round(statistics.mean(values), 4) if values else None
        summary[f"worst_abs_{name}"] = round(max(values), 4) if values else None
    return summary


if __name__ == "__main__":
    main()
