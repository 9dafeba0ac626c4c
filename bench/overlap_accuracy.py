"""What each source of pairs is worth: the slowdown of real pairs on held-out kernels, by what a model was trained on.

    python bench/overlap_accuracy.py --accelerator h200-sxm --out bench/results/overlap_h200.json

Reads bench/results/overlap/ACCELERATOR_{pairs,loops,stand_in}.parquet. Kernels that are judged are held out of every
source. Beside it: a model of real pairs alone on the stand-ins, which says how far these are like the real thing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.overlap import training
from echo_hooks.overlap.model import TARGETS, OverlapModel
from echo_hooks.overlap.samples import read_samples

ROOM = Path(__file__).resolve().parent / "results" / "overlap"
TRAINED_ON = (
    ("stand_in",), ("loops", "stand_in"), ("pairs",), ("pairs", "loops"), ("pairs", "loops", "stand_in"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="h200-sxm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    accelerator = load_accelerator(options.accelerator)
    data, about = {}, {}
    for name in ("pairs", "loops", "stand_in"):
        samples, about[name] = read_samples(ROOM / f"{options.accelerator}_{name}.parquet")
        data[name] = training.prepare(samples, accelerator)
    judged = data["pairs"]
    kernels = np.random.default_rng(0).permutation(np.unique(judged.kernel))
    table: dict[str, dict[str, dict]] = {"none": scores(judged.base, judged), "formula": scores(judged.formula, judged)}
    for sources in TRAINED_ON:
        predicted = np.full(judged.base.shape, np.nan)
        for i in range(training.FOLDS):
            names = kernels[i :: training.FOLDS]
            held = np.isin(judged.kernel, names)
            parts = [data[s].take(~np.isin(data[s].kernel, names)) for s in sources]
            whole = parts[0]
            for part in parts[1:]:
                whole = training.joined(whole, part)
            model = OverlapModel(training.fit(whole), {})
            predicted[held] = judged.base[held] * model.predict_rows(judged.rows[held])
        table[" + ".join(sources)] = scores(predicted, judged)
    model = OverlapModel(training.fit(judged), {})
    for name in ("loops", "stand_in"):
        other = data[name]
        table[f"pairs, on {name}"] = scores(other.base * model.predict_rows(other.rows), other)
        table[f"none, on {name}"] = scores(other.base, other)
        table[f"formula, on {name}"] = scores(other.formula, other)
    for trained, by_target in table.items():
        for target, s in by_target.items():
            print(
                f"{trained:28} {target:8} {s['count']:5d} {100 * s['median_error']:6.1f} %"
                f" {100 * s['within_10']:6.1f} % {100 * s['sum_error']:+6.1f} %"
            )
    if options.out:
        command = f"python bench/overlap_accuracy.py --accelerator {options.accelerator}"
        options.out.write_text(json.dumps({"command": command, "table": table, "samples": about}, indent=1) + "\n")


def scores(predicted: np.ndarray, data: training.Data) -> dict[str, dict]:
    found = {}
    for t, target in enumerate(TARGETS):
        known = np.isfinite(data.measured[:, t]) & np.isfinite(predicted[:, t])
        if known.any():
            found[target] = asdict(training.score(predicted[known, t], data.measured[known, t]))
    return found


if __name__ == "__main__":
    main()
