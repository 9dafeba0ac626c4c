"""What the model says about a measured sweep: the plan at its sizes, and what its clock would have shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.calibration import Calibration
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.nccl_tables import DEFAULT_VERSION
from echo_hooks.network.nccl_tuning_log import TuningTable
from echo_hooks.network.plan import Planned
from echo_hooks.network.sweeps import Sweep

# Host time of one launch where one thread launches on several accelerators in turn: the single-GPU log of
# NetX-lab/Echo (nccl_1.log) has 4.5 us per call, its logs of 2, 4 and 8 GPUs in one thread 4.3, 4.0 and 3.8 each.
LAUNCH_US = 3.9


def model_of(
    sweep: Sweep,
    cluster: Cluster,
    calibration: Calibration | None = None,
    nccl_version: str = "",
    printed: Sequence[TuningTable] = (),
) -> tuple[CommunicationModel, tuple[int, ...]]:
    """A model of as much of ``cluster`` as the sweep ran on, and its ranks. The version is the sweep's own where it
    says one, else ``nccl_version``; ``printed``: tables of the library itself."""
    per_node = sweep.ranks // sweep.nodes
    if per_node > cluster.accelerators_per_node:
        raise UsageError(
            f"{sweep.where}: {per_node} ranks per node; the nodes of {cluster.name} hold "
            f"{cluster.accelerators_per_node}"
        )
    cluster = dataclasses.replace(cluster, nodes=max(cluster.nodes, sweep.nodes))
    model = CommunicationModel(
        cluster,
        nccl_version=sweep.nccl_version or nccl_version or DEFAULT_VERSION,
        environment=dict(sweep.environment),
        calibration=calibration,
        printed=printed,
    )
    ranks = tuple(n * cluster.accelerators_per_node + i for n in range(sweep.nodes) for i in range(per_node))
    return model, ranks


def plan_of(sweep: Sweep, model: CommunicationModel, ranks: tuple[int, ...]) -> list[Planned]:
    """The parts of the durations at the sweep's sizes."""
    sizes = np.array([size for size, _ in sweep.points], np.float64)
    return model.plan(sweep.collective, ranks, sizes, sweep.dtype or "float32")


@dataclass(frozen=True)
class Compared:
    """One measured point and the model's answer, both as the sweep's clock shows them."""

    sweep: Sweep
    bytes: int
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


# Ranges of sizes in which errors are reported: below the first, between, from the last.
SIZE_RANGES = (
    ("below 64 KiB", 0, 64 << 10),
    ("64 KiB to 1 MiB", 64 << 10, 1 << 20),
    ("1 MiB and above", 1 << 20, 1 << 63),
)


def compare(
    sweeps: Sequence[Sweep],
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    nccl_version: str = "",
    printed: Sequence[TuningTable] = (),
) -> list[Compared]:
    """Every point of ``sweeps`` against the model of ``cluster``. Sweeps of one rank are left out: nothing moves.

    Raises UsageError for a sweep that the cluster's nodes cannot hold.
    """
    result = []
    for sweep in sweeps:
        if sweep.ranks > 1:
            model, ranks = model_of(sweep, cluster, calibration, nccl_version, printed)
            for (size, time), predicted in zip(sweep.points, predicted_us(sweep, model, ranks).tolist()):
                result.append(Compared(sweep, size, time, predicted))
    return result


def mean_errors(compared: Sequence[Compared]) -> dict[str, float | None]:
    """Mean absolute relative error over all points and by range of sizes; None where there are none."""
    ranges = (("all sizes", 0, 1 << 63), *SIZE_RANGES)
    result: dict[str, float | None] = {}
    for name, low, high in ranges:
        here = [abs(c.error) for c in compared if low <= c.bytes < high]
        result[name] = float(np.mean(here)) if here else None
    return result


def predicted_us(sweep: Sweep, model: CommunicationModel, ranks: tuple[int, ...]) -> np.ndarray:
    """Durations at the sweep's sizes, as its clock would show them."""
    alone = []
    for size, _ in sweep.points:
        if sweep.collective in ("exchange", "send"):
            alone.append(model.point_to_point(ranks[0], ranks[-1], size, group_size=len(ranks)).duration_us)
        else:
            root = ranks[0] if sweep.collective in ("broadcast", "reduce", "gather", "scatter") else -1
            alone.append(
                model.collective(sweep.collective, ranks, size, sweep.dtype or "float32", root=root).duration_us
            )
    return as_clocked(np.array(alone), sweep, model.cluster)


def as_clocked(duration_us: np.ndarray, sweep: Sweep, cluster: Cluster) -> np.ndarray:
    """Kernels back to back take the gap between them too, and come no faster than the host launches them."""
    if sweep.clock == "kernel":
        return duration_us
    return np.maximum(duration_us + cluster.accelerator.launch_overhead_us, launch_floor_us(sweep))


def launch_floor_us(sweep: Sweep) -> float:
    """Least time between two calls of a thread that launches on several accelerators in turn."""
    return LAUNCH_US * sweep.gpus_per_thread if sweep.clock == "stream" and sweep.gpus_per_thread > 1 else 0.0
