"""How much matrix products slow down in a training job, where they share the device's power with all else.

    python bench/op_times_in_context.py TRACES

TRACES: the folder of bench/kineto_samples.py. The products of the DDP job that ran beside no collective are compared
with the same products in the profile database, rested ("cold") and on a device kept busy with products ("loaded"), by
the share of the 30 ms before in which products ran. ``excess`` is 0 at the rested and 1 at the loaded time; the
constant RESTED_SHARE of echo_hooks/timing/pricing.py is where a straight line to (1, 1) through it meets 0.
"""

from __future__ import annotations

import argparse
import gzip
import json
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from kineto_samples import HIDDEN, ROWS, VOCABULARY

from echo_hooks.timing.database import read_database

LAYERS, STEPS, WINDOW_US = 12, 2, 30_000.0
MEMSET_US = 1.7  # the counter's kernel and the pause behind it, part of the database's times and not of a product's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    options = parser.parse_args()
    with gzip.open(options.traces / "ddp.rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    nccl = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if e["name"].startswith("nccl")]
    products = [e for e in kernels if any(word in e["name"].lower() for word in ("nvjet", "cutlass", "sdpa", "flash"))]
    starts = np.array([e["ts"] for e in products])
    ends = starts + np.array([e["dur"] for e in products])
    known = database()
    found = []
    for event, key in zip([e for e in products if "nvjet" in e["name"]], products_in_order(), strict=True):
        times, begin = known.get(key, {}), event["ts"]
        beside = any(low < begin + event["dur"] and begin < high for low, high in nccl)
        if beside or "loaded" not in times or times["loaded"] < 1.05 * times["cold"]:
            continue
        before = (starts < begin) & (ends > begin - WINDOW_US)
        busy = np.minimum(ends[before], begin) - np.maximum(starts[before], begin - WINDOW_US)
        excess = (event["dur"] - times["cold"]) / (times["loaded"] - times["cold"])
        found.append((busy.sum() / WINDOW_US, excess, event["dur"] / times["cold"]))
    table = np.array(found)
    print(f"{len(table)} products; in context over rested: median {np.median(table[:, 2]):.3f}")
    for low in np.arange(0.0, 1.0, 0.1):
        chosen = table[(table[:, 0] >= low) & (table[:, 0] < low + 0.1)]
        if len(chosen) > 10:
            print(f"share from {low:.1f}: {len(chosen):4} products, median excess {np.median(chosen[:, 1]):.2f}")
    busiest = table[table[:, 0] >= 0.5]
    share, excess = np.median(busiest[:, 0]), np.median(busiest[:, 1])
    print(f"RESTED_SHARE = {(share - excess) / (1 - excess):.2f} (from share {share:.2f}, excess {excess:.2f})")


def database() -> dict[tuple, dict[str, float]]:
    """Kernel times by shapes, layout and condition."""
    with as_file(files("echo_hooks.timing.profiles") / "h200-sxm.parquet") as path:
        rows = read_database(path).rows
    times: dict[tuple, dict[str, float]] = {}
    for r in rows:
        if r.signature.name == "aten.mm.default" and r.signature.inputs[0].dtype == "bfloat16":
            a, b = r.signature.inputs
            clears = any("Memset" in name for name, _ in r.kernel_names)
            key = (a.shape, b.shape, a.contiguous, b.contiguous)
            times.setdefault(key, {})[r.condition] = r.busy_us - (MEMSET_US if clears else 0.0)
    return times


def products_in_order() -> list[tuple]:
    """(left shape, right shape, both contiguous?) as the job issues them: forward, then gradients, last layer first."""
    layer = [(HIDDEN, HIDDEN)] * 4 + [(4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]  # (n, k) of q, k, v, o, up, down
    linears = [*layer * LAYERS, (VOCABULARY, HIDDEN)]
    forward = [((ROWS, k), (k, n), True, False) for n, k in linears]
    backward: list[tuple] = []
    for n, k in reversed(linears):
        backward += [((n, ROWS), (ROWS, k), False, True), ((ROWS, n), (n, k), True, True)]
    return (forward + backward) * STEPS


if __name__ == "__main__":
    main()
