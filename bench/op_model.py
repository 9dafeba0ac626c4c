"""How well operation times are predicted: by class on withheld shapes, and the step times that follow from them.

    python bench/op_model.py --out bench/results/op_model_h200.json
    python bench/op_model.py --measured MEASURED.jsonl --runs DIR --out bench/results/op_model_h200.json

Without ``--measured`` only the hold-out by shape (the model learns half of the shapes of each class, three draws) and
the kernels that bench/results/overlap timed alone.
With it (lines as the workloads print them) every configuration is simulated once into DIR, then composed with
"profile" (the shipped database), "model" (no database) and "withheld": half of the shapes of products and attention
missing in the database, and a model that has not seen them either. Nothing is fitted to a step time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measured_runs import STEADY, script_arguments, simulation, spread

from echo_hooks.analysis import analyse
from echo_hooks.graph.rundir import read_run
from echo_hooks.hardware.accelerator import Accelerator, load_accelerator
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.overlap.samples import read_samples
from echo_hooks.timing import Pricing, load_pricing
from echo_hooks.timing.classes import PRODUCTS
from echo_hooks.timing.database import Database
from echo_hooks.timing.features import feature_class, shape_of
from echo_hooks.timing.pricing import shipped_databases
from echo_hooks.timing.training import hold_out, train, usable, withheld_shapes

PAIRS = Path(__file__).parent / "results" / "overlap" / "h200-sxm_pairs.parquet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="h200-sxm")
    parser.add_argument("--measured", type=Path)
    parser.add_argument(
        "--runs", type=Path, default=Path("echo-runs/op-model"), help="run directories, made if missing"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the withheld shapes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    accelerator = load_accelerator(options.accelerator)
    (database,) = shipped_databases(accelerator)
    held = hold_out(usable(database, accelerator), accelerator)
    for e in held:
        print(f"{e.name:20} {e.operations:5} operations  roofline {e.roofline:6.1%}  learned {e.learned:6.1%}")
    found = {
        "command": "python bench/op_model.py",
        "versions": {name: version(name) for name in ("echo-hooks", "torch", "xgboost-cpu")},
        "hold_out": [asdict(e) for e in held],
    }
    found["kernels_of_the_overlap_collection"] = alone(accelerator)
    if options.measured:
        lines = [json.loads(line) for line in options.measured.read_text().splitlines()]
        found["steps"] = steps(lines, options.runs, database, accelerator, options.seed)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def alone(accelerator: Accelerator) -> dict[str, Any]:
    """Error of "model" on kernels that the overlap collection timed alone, in loops, on another such machine."""
    samples, _ = read_samples(PAIRS)
    times: dict[str, list[float]] = {}
    signatures = {}
    for sample in samples:
        times.setdefault(sample.kernel, []).append(sample.base_us)
        signatures[sample.kernel] = sample.signature
    pricing = load_pricing(accelerator, "model")
    errors: dict[str, list[float]] = {}
    for kernel, signature in signatures.items():
        error = pricing.price(signature).duration_us / statistics.median(times[kernel]) - 1
        errors.setdefault(feature_class(signature) or "other", []).append(abs(error))
    for name, values in sorted(errors.items()):
        print(f"alone: {name:20} {len(values):3} kernels, mean error {statistics.mean(values):.1%}")
    every = [e for values in errors.values() for e in values]
    print(
        f"alone: {len(every)} kernels, mean error {statistics.mean(every):.1%}, median {statistics.median(every):.1%}"
    )
    classes = {name: {"kernels": len(v), "mean": round(statistics.mean(v), 4)} for name, v in sorted(errors.items())}
    return {"mean": round(statistics.mean(every), 4), "median": round(statistics.median(every), 4), "classes": classes}


def steps(lines: list[dict], runs: Path, database: Database, accelerator: Accelerator, seed: int) -> dict:
    """Errors of each configuration in each mode, and their means over the counted ones."""
    pricings = {
        "profile": load_pricing(accelerator, "profile"),
        "model": load_pricing(accelerator, "model"),
        "withheld": without_half(database, accelerator, seed),
    }
    rows = []
    for i, measured in enumerate(lines):
        directory = runs / f"{i:02d}-{measured['workload']}"
        if not (directory / "manifest.json").exists():
            subprocess.run(
                simulation(measured, accelerator.name, "profile", directory), check=True, stdout=subprocess.DEVNULL
            )
        cluster = load_cluster(f"{accelerator.name}:1x{measured['world_size']}")
        row = {
            "workload": measured["workload"],
            "world_size": measured["world_size"],
            "args": " ".join(script_arguments(measured)),
            "step_ms": measured["step_ms"],
            "counted": spread(measured) <= STEADY,
        }
        for mode, pricing in pricings.items():
            report = analyse(read_run(directory), cluster, pricing=pricing).report
            row[mode] = round(report.step_time_ms / measured["step_ms"] - 1, 4)
            row[f"{mode}_evidence"] = {k: round(v, 3) for k, v in report.evidence.items() if v}
        rows.append(row)
        print(
            "{workload:10} x{world_size} {step_ms:8.1f} {profile:+7.1%} {model:+7.1%} {withheld:+7.1%} ".format(**row)
            + ("" if row["counted"] else "not counted"),
            flush=True,
        )
    summary = {
        mode: {
            "counted_mean_abs_error": round(statistics.mean(abs(r[mode]) for r in rows if r["counted"]), 4),
            "counted_worst_abs_error": max(abs(r[mode]) for r in rows if r["counted"]),
            "all_mean_abs_error": round(statistics.mean(abs(r[mode]) for r in rows), 4),
        }
        for mode in pricings
    }
    print(json.dumps(summary, indent=1))
    return {"summary": summary, "rows": rows}


def without_half(database: Database, accelerator: Accelerator, seed: int) -> Pricing:
    """Database and model that know nothing of half of the shapes of products and attention."""
    rows = usable(database, accelerator)
    withheld = withheld_shapes(rows, seed, PRODUCTS)
    kept = [
        r for r in database.rows if feature_class(r.signature) not in PRODUCTS or shape_of(r.signature) not in withheld
    ]
    model = train([r for r in rows if shape_of(r.signature) not in withheld], accelerator, seed)
    return Pricing(accelerator, [Database(kept)], model)


if __name__ == "__main__":
    sys.exit(main())
