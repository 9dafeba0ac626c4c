"""How much matrix products slow down in training, where a device's power limit lowers its clock.

    python bench/product_clock.py EXECUTED TRACED --out bench/results/product_clock_h200.json

EXECUTED: a directory of runs traced with --timing execute (``--keep`` of bench/gpu/validate.py); TRACED: of the same
scripts traced without a GPU, under the same names (``--runs`` of bench/op_model.py). Products really run are matched
one by one, in order, with those of the trace, and compared with the same products in the profile database, alone on
a rested device. What the clock depends on is the power drawn: the share of the step in which products run, and that
in which other kernels do. Fitted by least squares over ranks: slowdown = 1 + max(0, products * a + others * b - c).
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.graph.program import Kind
from echo_hooks.graph.rundir import RankTrace, read_run
from echo_hooks.hardware.accelerator import Accelerator, load_accelerator
from echo_hooks.timing.database import key_of
from echo_hooks.timing.kernel_names import kernel_class
from echo_hooks.timing.pricing import is_product, shipped_databases

GRID = (np.arange(0.6, 1.61, 0.02), np.arange(0.0, 1.21, 0.02), np.arange(0.4, 1.21, 0.02))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executed", type=Path)
    parser.add_argument("traced", type=Path)
    parser.add_argument("--accelerator", default="h200-sxm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    alone = rested_times(load_accelerator(options.accelerator))
    rows: list[dict[str, Any]] = []
    for path in sorted(p for p in options.executed.iterdir() if (options.traced / p.name).is_dir()):
        executed, traced = read_run(path), read_run(options.traced / path.name)
        for rank, trace in executed.traces.items():
            like = traced.traces.get(rank) or traced.traces[min(traced.traces)]
            row = compared(trace, like, alone)
            if row is not None:
                rows.append({"run": path.name, "rank": rank, **row})
                print(rows[-1], flush=True)
    if not rows:
        raise SystemExit(f"{options.executed}, {options.traced}: no run of both whose products match one by one")
    fit = fitted(rows)
    print(json.dumps(fit))
    if options.out:
        found = {"command": "python bench/product_clock.py EXECUTED TRACED", "fit": fit, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def rested_times(accelerator: Accelerator) -> dict[tuple, float]:
    """Microseconds of every operation in the shipped database on a rested device."""
    rows = [row for database in shipped_databases(accelerator) for row in database.rows]
    rested = [row for row in rows if row.device == accelerator.product and row.condition == "cold"]
    return {key_of(row.signature): row.median_us for row in rested}


def compared(trace: RankTrace, like: RankTrace, alone: dict[tuple, float]) -> dict[str, Any] | None:
    """``slowdown`` of the products that the database knows, and shares of the step; None where they do not match."""
    program = trace.program
    ran = np.flatnonzero((program.kind == Kind.COMPUTE) & (program.duration_us > 0))
    names = [kernel_class(trace.ops[op].name) for op in program.op[ran]]
    times = program.duration_us[ran]
    gemm = [us for us, name in zip(times, names) if name == "gemm"]
    traced = [like.ops[op] for op in like.program.op[like.program.kind == Kind.COMPUTE]]
    wanted = [op for op in traced if is_product(op) and "attention" not in op.name]
    if len(gemm) != len(wanted) or not gemm:
        return None
    known = [(us, alone[key_of(op)]) for us, op in zip(gemm, wanted) if key_of(op) in alone]
    if not known:
        return None
    products = sum(us for us, name in zip(times, names) if name == "gemm" or name.startswith("attention"))
    wall_us = max(trace.profiled_step_ms * 1e3, float(times.sum()))
    return {
        "matched": len(known),
        "slowdown": round(sum(us for us, _ in known) / sum(us for _, us in known), 4),
        "products": round(products / wall_us, 4),
        "others": round((float(times.sum()) - products) / wall_us, 4),
    }


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """a, b, c on a grid, and how far the fit is off."""
    products, others, slowdown = (np.array([row[n] for row in rows]) for n in ("products", "others", "slowdown"))
    best = (np.inf, 0.0, 0.0, 0.0)
    for a, b, c in itertools.product(*GRID):
        error = np.sum((1.0 + np.maximum(products * a + others * b - c, 0.0) - slowdown) ** 2)
        best = min(best, (float(error), float(a), float(b), float(c)))
    rms = (best[0] / len(rows)) ** 0.5
    return {"a": round(best[1], 2), "b": round(best[2], 2), "c": round(best[3], 2), "rms": round(rms, 4)}


if __name__ == "__main__":
    main()
