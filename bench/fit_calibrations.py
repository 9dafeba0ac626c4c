"""Makes echo_hooks/network/calibrations/*.toml from public sweeps.

    python bench/fit_calibrations.py DATA

Sends come from bench/results/nccl_sweep_h200x2.csv, which bench/gpu/nccl_sweep.py measured.
DATA holds ``sweeps.csv`` (one point per row: sweep_id, collective, gpu, gpus, nodes, nccl_version, dtype, size_bytes,
oop_time_us, ip_time_us, source_repo) and ``logs/nccl_{2,4,8,16}.log`` of NetX-lab/Echo. Rows whose source is not
known are left out.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.calibration import Calibration, write_calibration
from echo_hooks.network.fit import fit
from echo_hooks.network.sweep_files import read_sweeps
from echo_hooks.network.sweeps import Sweep

OUT = Path(__file__).parent.parent / "echo_hooks" / "network" / "calibrations"
AICONFIGURATOR = (
    "ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0), nccl_perf.parquet of {system}: nccl-tests in one node, NCCL {v}"
)
CORE_WEAVE = "between nodes: coreweave/nccl-tests README.md, all-reduce on 32 A100 in 4 nodes, SHARP loaded"
ECHO = "NetX-lab/Echo 15f0d12c (MIT), nccl-test-log: all-reduce on 2 to 16 A100 40 GB of Azure ND A100 v4"
# Calibration, cluster, prefix of the sweeps' ids.
FROM_SWEEPS = (
    ("a100-80gb", "a100-80gb:1x8", "aic_a100_sxm_2.27.3_", "a100_sxm", "2.27.3"),
    ("h100-sxm", "h100-sxm:1x8", "aic_h100_sxm_2.29.2_", "h100_sxm", "2.29.2"),
    ("h200-sxm", "h200-sxm:1x8", "aic_h200_sxm_2.29.2_", "h200_sxm", "2.29.2"),
    ("b200", "b200:1x8", "aic_b200_sxm_2.29.2_", "b200_sxm", "2.29.2"),
)
# Two H200 of the project's own sweep: no public one of sends was found, and those of all-to-all are of other releases
# of NCCL than torch ships, one process with many threads.
KERNELS = Path(__file__).parent / "results" / "nccl_sweep_h200x2.csv"
FROM_KERNELS = "{what}: bench/results/nccl_sweep_h200x2.csv, kernel times on 2 H200, NCCL 2.28.9"
LIKE_H200 = ("h100-sxm", "h200-sxm", "h800")
# Nothing in the Echo logs says their version; their layout is that of nccl-tests before 2023.
ECHO_VERSION = "2.18.3"


def main(data: Path) -> None:
    sweeps = read_sweeps(data / "sweeps.csv")
    for name, cluster, prefix, system, version in FROM_SWEEPS:
        ours = [s for s in sweeps if f"({prefix}" in s.source and s.dtype == "float16"]
        source = AICONFIGURATOR.format(system=system, v=version)
        prior = write(name, ours, cluster, source)
        if name == "a100-80gb":
            four = [s for s in sweeps if "(cw_a100_ar_32)" in s.source]
            write(name, four, "a100-80gb:4x8", f"{source}; {CORE_WEAVE}", version, prior)
    logs = [read_sweeps(data / "logs" / f"nccl_{n}.log")[0] for n in (2, 4, 8, 16)]
    write("a100-40gb", logs, "a100-40gb:2x8", ECHO, ECHO_VERSION)
    ours = [s for s in sweeps if "(aic_h100_sxm_2.29.2_" in s.source and s.dtype == "float16"]
    write("h800", ours, "h100-sxm:1x8", "as h100-sxm: " + AICONFIGURATOR.format(system="h100_sxm", v="2.29.2"))


def write(
    name: str, sweeps: list[Sweep], cluster: str, source: str, version: str = "", prior: Calibration | None = None
) -> Calibration:
    """``version``: assumed of sweeps that do not say it. ``prior``: what it adds to."""
    fitted = fit(sweeps, load_cluster(cluster), nccl_version=version, name=name, source=source, prior=prior)
    known = prior.nccl_version if prior else "" if version else fitted.calibration.nccl_version
    calibration = dataclasses.replace(fitted.calibration, accelerator=name, nccl_version=known)
    if name in LIKE_H200:
        calibration = with_sends(calibration)
    if name == "h200-sxm":
        calibration = with_all_to_all(calibration)
    path = OUT / f"{name}.toml"
    write_calibration(calibration, path, "Made by bench/fit_calibrations.py; do not edit.")
    print(f"{path.name}: {len(fitted.rows)} points of {len(sweeps)} sweeps, {fitted.unused} set by the host's launches")
    for key in fitted.too_few:
        print(f"  too few points of {' '.join(key).strip()}: at its prior")
    return calibration


def with_sends(calibration: Calibration) -> Calibration:
    """Sends and exchanges between two ranks as on two H200."""
    return with_kernels(calibration, ("send", "exchange"), "send")


def with_all_to_all(calibration: Calibration) -> Calibration:
    """All-to-all, gather and scatter: latencies as on two H200, bandwidths as they are, from more group sizes."""
    return with_kernels(calibration, ("all_to_all",), "", fixed=("transfer", "copy"))


def with_kernels(
    calibration: Calibration, measured: tuple[str, ...], priced_as: str, fixed: tuple[str, ...] = ()
) -> Calibration:
    """``calibration`` with what ``measured`` collectives of the project's own sweep say, kept for ``priced_as``."""
    sweeps = [s for s in read_sweeps(KERNELS) if s.collective in measured]
    found = fit(sweeps, load_cluster("h200-sxm:1x8"), prior=calibration, fixed=fixed).calibration
    keys = {key: (*key[:3], priced_as) for key in found.scalings if key[0] == "node" and key[1] == "p2p" and not key[3]}
    what = "sends" if priced_as else "all-to-all"
    return dataclasses.replace(
        calibration,
        scalings={**calibration.scalings, **{to: found.scalings[key] for key, to in keys.items()}},
        support={**calibration.support, **{to: found.support[key] for key, to in keys.items()}},
        source=f"{calibration.source}; {FROM_KERNELS.format(what=what)}",
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
