"""Published step times of dense models beside simulations of the same plan.

    python bench/published_steps.py PUBLISHED.csv --only dgxc2502_llama31_8b,dgxc2502_gpt175b --out FILE.json

PUBLISHED: one run a row, with shape, batch, parallelism and step_time_s. Rows of NVIDIA's DGX Cloud benchmarking on
H100 in BF16, pretraining of dense models, are run as tests/integrations/scripts/mcore_te.py (Megatron-core with
stand-ins for Transformer Engine; distributed optimizer, gradients and parameters overlapped, tensor-parallel
communication overlapped where the row says so). What a row does not say is left at the script's own. Nothing is fitted
to them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "integrations" / "scripts" / "mcore_te.py"
SOURCE = "NVIDIA DGX Cloud benchmarking v25.02"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path)
    parser.add_argument("--only", help="beginnings of ids, with commas between")
    parser.add_argument("--most-gpus", type=int, default=256)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one simulation")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with options.published.open() as file:
        rows = [row for row in csv.DictReader(file) if wanted(row, options)]
    results = []
    for row in rows:
        results.append(compared(row, options.limit))
        print("{id:36} {gpus:>4} GPUs {measured_ms:9.0f} ms".format(**results[-1]), end="", flush=True)
        found = results[-1]
        print(
            f" {found['step_ms']:9.0f} ms {found['error']:+.1%}"
            if "step_ms" in found
            else f" {found['failure'][-160:]}"
        )
    errors = [abs(found["error"]) for found in results if "error" in found]
    summary = {"mean": statistics.mean(errors), "worst": max(errors)} if errors else {}
    print(json.dumps(summary))
    if options.out:
        command = "python bench/published_steps.py PUBLISHED.csv" + (f" --only {options.only}" if options.only else "")
        options.out.write_text(json.dumps({"command": command, "summary": summary, "rows": results}, indent=1) + "\n")


def wanted(row: dict[str, str], options: argparse.Namespace) -> bool:
    chosen = not options.only or row["id"].startswith(tuple(options.only.split(",")))
    plain = row["task"] == "pretrain" and not row["experts"] and row["micro_batch"] and row["tp"]
    ours = row["source_group"].startswith(SOURCE) and row["dtype"] == "BF16" and "XLA" not in row["recompute"]
    return bool(chosen and plain and ours and int(row["gpus"]) <= options.most_gpus)


def compared(row: dict[str, str], limit_s: float) -> dict[str, Any]:
    measured_ms = float(row["step_time_s"]) * 1e3
    found: dict[str, Any] = {"id": row["id"], "gpus": row["gpus"], "measured_ms": measured_ms}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", row["gpus"], "--json", "--quiet"]
        command += [
            "--cluster",
            f"h100-sxm:{int(row['gpus']) // 8}x8",
            "--timing",
            "profile",
            "--out",
            scratch + "/run",
        ]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}  # as the rows say
        try:
            done = subprocess.run(
                [*command, str(SCRIPT), *arguments(row)],
                capture_output=True,
                text=True,
                timeout=limit_s,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return {**found, "failure": f"not done after {limit_s:.0f} s"}
    if done.returncode not in (0, 3):
        return {**found, "failure": done.stderr.strip()[-500:]}
    report = json.loads(done.stdout)
    return {
        **found,
        "step_ms": round(report["step_time_ms"], 1),
        "error": round(report["step_time_ms"] / measured_ms - 1, 4),
        "breakdown": report["breakdown"],
        "needed_gib": max(role["peak_reserved_bytes"] for role in report["roles"]) / 2**30,
    }


def arguments(row: dict[str, str]) -> list[str]:
    """The script's, from a row."""
    words = ["--steps", "3", "--distributed-optimizer", "--overlap-grad", "--overlap-param", "--fuse-wgrad"]
    columns = {
        "layers": "layers",
        "hidden": "hidden",
        "ffn": "ffn",
        "heads": "heads",
        "groups": "kv_heads",
        "seq": "seq",
    }
    columns |= {"vocab": "vocab", "micro-batch": "micro_batch", "micro-batches": "grad_accum"}
    columns |= {"tp": "tp", "pp": "pp", "cp": "cp"}
    for flag, column in columns.items():
        words += [f"--{flag}", row[column]]
    if row["vpp"] and int(row["vpp"]) > 1:
        words += ["--vpp", row["vpp"], "--overlap-p2p"]
    if "llama" in row["model"].lower():
        words.append("--llama")
    if row["sequence_parallel"] == "1":
        words.append("--sp")
    if "ub_tp_comm_overlap" in row["kernels_overlap"]:
        words.append("--overlap-tp")
    if row["recompute"].startswith("selective"):
        words += ["--recompute", "selective"]
    return words


if __name__ == "__main__":
    main()
