"""How far the communication model is from public measurements, on what it was not fitted to.

    python bench/network_accuracy.py DATA [H200X2]

DATA as for bench/fit_calibrations.py; H200X2 holds ``nccl_kernels.csv`` (kernel times on two H200). Writes
bench/results/network_accuracy.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo_hooks.hardware.cluster import Cluster, load_cluster
from echo_hooks.network.calibration import Calibration, shipped_calibration
from echo_hooks.network.fit import fit
from echo_hooks.network.measured import Compared, compare, mean_errors
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.sweep_files import read_sweeps
from echo_hooks.network.sweeps import Sweep

RESULTS = Path(__file__).parent / "results" / "network_accuracy.json"
SWEEP = RESULTS.parent / "nccl_sweep_h200x2.csv"
ECHO_VERSION = "2.18.3"
SINGLE_NODE = (
    ("A100, NCCL 2.27.3", "a100-80gb:1x8", "(aic_a100_sxm_2.27.3_"),
    ("H100, NCCL 2.29.2", "h100-sxm:1x8", "(aic_h100_sxm_2.29.2_"),
    ("H100, NCCL 2.23", "h100-sxm:1x8", "(aic_h100_sxm_2.23_"),
    ("H200, NCCL 2.29.2", "h200-sxm:1x8", "(aic_h200_sxm_2.29.2_"),
    ("B200, NCCL 2.29.2", "b200:1x8", "(aic_b200_sxm_2.29.2_"),
)


def main(data: Path, h200x2: Path | None) -> None:
    table = echo_logs(data) + single_node(data) + other_clusters(data) + own_sweep()
    if h200x2:
        table += kernels(h200x2)
    table += all_to_all(data)
    results = {"errors": table, "microseconds_per_estimate": estimate_us()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for row in table:
        cells = (
            f"{100 * v:6.1f}" if isinstance(v, float) else "     -"
            for k, v in row.items()
            if k not in ("case", "points")
        )
        print(f"{row['case']:64s} {row['points']:4d}", *cells)
    print(f"one estimate, placement seen before: {results['microseconds_per_estimate']:.1f} us")


def row(case: str, compared: Sequence[Compared]) -> dict[str, Any]:
    return {"case": case, "points": len(compared), **mean_errors(compared)}


def echo_logs(data: Path) -> list[dict[str, Any]]:
    """All-reduce on A100 40 GB (NetX-lab/Echo), from 2 KiB; each group size predicted from the others."""
    logs = {n: read_sweeps(data / "logs" / f"nccl_{n}.log")[0] for n in (2, 4, 8, 16)}
    logs = {n: dataclasses.replace(s, points=tuple(p for p in s.points if p[0] >= 2048)) for n, s in logs.items()}
    cluster = load_cluster("a100-40gb:2x8")
    table = [row("Echo A100, stock", compare([*logs.values()], cluster, Calibration(), nccl_version=ECHO_VERSION))]
    table.append(
        fitted("Echo A100, fitted on all, in sample", [*logs.values()], [*logs.values()], cluster, ECHO_VERSION)
    )
    for prior, by in ((None, ""), (between_nodes(shipped_calibration("a100-80gb")), ", network prior of a100-80gb")):
        held: list[Compared] = []
        for n, log in logs.items():
            others = [s for m, s in logs.items() if m != n]
            calibration = fit(others, cluster, nccl_version=ECHO_VERSION, prior=prior).calibration
            compared = compare([log], cluster, calibration, nccl_version=ECHO_VERSION)
            table.append(row(f"Echo A100, {n} GPUs from the other sizes{by}", compared))
            held += compared
        table.append(row(f"Echo A100, the four together{by}", held))
    return table


def between_nodes(calibration: Calibration | None) -> Calibration:
    """Only what it says about links between nodes."""
    scalings = calibration.scalings if calibration else {}
    return Calibration("network", {key: scaling for key, scaling in scalings.items() if key[0] == "network"})


def single_node(data: Path) -> list[dict[str, Any]]:
    """Sweeps of ai-dynamo/aiconfigurator; each (collective, group size) predicted from the others."""
    every = [s for s in read_sweeps(data / "sweeps.csv") if s.dtype == "float16"]
    table = []
    for name, spec, prefix in SINGLE_NODE:
        cluster, ours = load_cluster(spec), [s for s in every if prefix in s.source]
        table.append(row(f"{name}, stock", compare(ours, cluster, Calibration())))
        held: list[Compared] = []
        for sweep in ours:
            calibration = fit([s for s in ours if s is not sweep], cluster).calibration
            held += compare([sweep], cluster, calibration)
        table.append(row(f"{name}, each sweep from the others", held))
    return table


def other_clusters(data: Path) -> list[dict[str, Any]]:
    """Sweeps that no shipped calibration saw, by the shipped one."""
    every = {s.source: s for s in read_sweeps(data / "sweeps.csv")}
    table = []
    for sweep_id, spec, version, name in (
        ("aws_p5_h100_ar_8", "h100-sxm:1x8", "", "8 H100 (AWS p5), shipped"),
        ("oci_h100_ar_16", "h100-sxm:2x8", "", "16 H100 in 2 nodes (OCI), shipped"),
        ("gke_h200_ar_2x1", "h200-sxm:2x8", "", "2 H200 in 2 nodes (GKE, RoCE), shipped"),
        ("cw_a100_ar_32", "a100-40gb:4x8", ECHO_VERSION, "32 A100 in 4 nodes (CoreWeave), by the Echo logs' fit"),
    ):
        sweep = every.get(f"sweeps.csv ({sweep_id})")
        if sweep is not None:
            cluster = load_cluster(spec)
            if "RoCE" in name:
                cluster = dataclasses.replace(cluster, transport="roce")
            table.append(row(name, compare([sweep], cluster, nccl_version=version)))
    return table


def kernels(h200x2: Path) -> list[dict[str, Any]]:
    """Kernel times on two H200: by the shipped calibration, and every other size from the rest."""
    cluster = load_cluster("h200-sxm:1x8")
    sweeps = [
        dataclasses.replace(s, nccl_version="2.28.9", environment=(("NCCL_NVLS_ENABLE", "0"),))
        for s in read_sweeps(h200x2 / "nccl_kernels.csv")
    ]
    some = [dataclasses.replace(s, points=s.points[::2]) for s in sweeps]
    rest = [dataclasses.replace(s, points=s.points[1::2]) for s in sweeps]
    return [
        row("2 H200, kernels, stock", compare(sweeps, cluster, Calibration())),
        row("2 H200, kernels, by an H100's public sweeps", compare(sweeps, cluster, shipped_calibration("h100-sxm"))),
        row("2 H200, kernels, shipped (other machines' wall times)", compare(sweeps, cluster)),
        fitted("2 H200, kernels, every other size from the rest", some, rest, cluster, ""),
    ]


def own_sweep() -> list[dict[str, Any]]:
    """bench/gpu/nccl_sweep.py on two H200: eight operations, each protocol forced. The shipped calibration has its
    sends from here, the rest from other machines."""
    cluster, sweeps = load_cluster("h200-sxm:1x8"), read_sweeps(SWEEP)
    default = [s for s in sweeps if "(default)" in s.source]
    some = [dataclasses.replace(s, points=s.points[::2]) for s in sweeps]
    rest = [dataclasses.replace(s, points=s.points[1::2]) for s in sweeps]
    collectives = [s for s in default if s.collective not in ("send", "exchange")]
    return [
        row("2 H200, own sweep, stock", compare(default, cluster, Calibration())),
        row("2 H200, own sweep, collectives, shipped", compare(collectives, cluster)),
        fitted("2 H200, own sweep with protocols, every other size", some, rest, cluster, ""),
    ]


def all_to_all(data: Path) -> list[dict[str, Any]]:
    """All-to-all on H200: latencies by every other kernel time of the own sweep, as bench/fit_calibrations.py does with
    all of them, against the rest; and the shipped calibration against sweeps of an older NCCL that it did not see."""
    cluster = load_cluster("h200-sxm:1x8")
    every = [s for s in read_sweeps(data / "sweeps.csv") if s.dtype == "float16"]
    public = [s for s in every if "(aic_h200_sxm_2.29.2_" in s.source]
    own = [s for s in read_sweeps(SWEEP) if s.collective == "all_to_all"]
    some = [dataclasses.replace(s, points=s.points[::2]) for s in own]
    rest = [dataclasses.replace(s, points=s.points[1::2]) for s in own]
    wall = fit(public, cluster).calibration
    latencies = fit(some, cluster, prior=wall, fixed=("transfer", "copy")).calibration
    older = [s for s in every if "(aic_h200_sxm_2.23_" in s.source and s.collective == "all_to_all"]
    return [
        row("H200 all-to-all, 2 ranks, kernels, by wall times only", compare(rest, cluster, wall)),
        row("H200 all-to-all, 2 ranks, kernels, every other size", compare(rest, cluster, latencies)),
        row("H200 all-to-all, 2 and 4 ranks, NCCL 2.23, by wall times only", compare(older, cluster, wall)),
        row("H200 all-to-all, 2 and 4 ranks, NCCL 2.23, shipped", compare(older, cluster)),
    ]


def fitted(case: str, on: Sequence[Sweep], against: Sequence[Sweep], cluster: Cluster, version: str) -> dict[str, Any]:
    calibration = fit(on, cluster, nccl_version=version).calibration
    return row(case, compare(against, cluster, calibration, nccl_version=version))


def estimate_us() -> float:
    """Time of one estimate of a new size on 96 ranks whose placement was seen before."""
    model = CommunicationModel(load_cluster("h800:12x8"))
    ranks = tuple(range(96))
    model.collective("all_reduce", ranks, 1 << 20, "bfloat16")
    count = 2000
    start = time.perf_counter()
    for i in range(count):
        model.collective("all_reduce", ranks, (1 << 20) + i + 1, "bfloat16")
    return (time.perf_counter() - start) / count * 1e6


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else None)
