"""How the duration of one communication comes about, as plain data."""

from __future__ import annotations

from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.network.cost import Cost
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.nccl_chunks import chunk_bytes
from echo_hooks.network.nccl_tables import ALGORITHMS
from echo_hooks.network.sweeps import bus_factor

_MOST_RESOURCES = 8
# Wider by this share of the duration where it goes beyond the scale that was measured: on 32 GPUs a fit to at most 16
# was off by 8 % (bench/network_accuracy.py).
_BEYOND = 0.1


def describe(
    model: CommunicationModel,
    collective: str,
    ranks: tuple[int, ...],
    bytes: int,
    *,
    dtype: str = "bfloat16",
    root: int = -1,
    count: int = 1,
) -> dict[str, Any]:
    """Duration with its band (tenth and ninetieth percentile) and what makes it up: algorithm, protocol, channels,
    latency and transfer (us), algorithm and bus bandwidth (GB/s), placement, what it was calibrated on, and the fullest
    links with their share of the transfer time.

    ``collective``: one of model.COLLECTIVES, or "send" with two ranks. Raises UsageError as the model does.
    """
    if collective == "send":
        if len(ranks) != 2:
            raise UsageError(f"a send has two ranks, the sender and the receiver, not {len(ranks)}")
        cost = model.point_to_point(ranks[0], ranks[1], bytes, group_size=2)
    else:
        cost = model.collective(collective, ranks, bytes, dtype, root=root, count=count)
    placement = model.placement(ranks)
    where = len(placement.nodes), cost.algorithm, cost.protocol, collective
    low, high = model.calibration.band(*where)
    support = model.calibration.supported_by(*where)
    beyond = support is not None and (len(placement.nodes) > support.most_nodes or len(ranks) > support.most_ranks)
    if beyond:
        low, high = low * (1 - _BEYOND), high * (1 + _BEYOND)
    transfer = cost.duration_us - cost.latency_us
    algorithm_bandwidth = bytes / cost.duration_us / 1e3
    busiest: list[dict[str, Any]] = sorted(
        (
            {
                "name": model.resources[r].name,
                "bytes": load,
                "capacity_gb_per_s": model.resources[r].capacity_bytes_per_us / 1e3,
                "busy_share": load / model.resources[r].capacity_bytes_per_us / transfer if transfer > 0 else 0.0,
            }
            for r, load in cost.loads
        ),
        key=lambda entry: (-entry["busy_share"], entry["name"]),  # type: ignore[operator]
    )
    return {
        "collective": collective,
        "bytes": bytes,
        "dtype": dtype,
        "ranks": list(ranks),
        "placement": {
            "kind": placement.kind,
            "nodes": len(placement.nodes),
            "ranks_per_node": placement.per_node,
            "nics_per_node": placement.nics_per_node,
            "stride": placement.stride,
        },
        "nccl_version": model.nccl_version,
        "algorithm": cost.algorithm,
        "protocol": cost.protocol,
        "channels": cost.channels,
        "chunk_bytes": _chunk_bytes(model, collective, ranks, bytes, cost),
        "duration_us": cost.duration_us,
        "duration_p10_us": cost.duration_us * low,
        "duration_p90_us": cost.duration_us * high,
        "latency_us": cost.latency_us,
        "transfer_us": transfer,
        "algorithm_bandwidth_gb_per_s": algorithm_bandwidth,
        "bus_bandwidth_gb_per_s": algorithm_bandwidth * bus_factor(collective, len(ranks)),
        "evidence": cost.evidence,
        "calibration": {
            "name": model.calibration.name,
            "source": model.calibration.source,
            "points": support.points if support else 0,
            "beyond_measured_scale": beyond,
        },
        "notes": list(model.notes),
        "resources": busiest[:_MOST_RESOURCES],
        "resources_in_all": len(busiest),
    }


def _chunk_bytes(
    model: CommunicationModel, collective: str, ranks: tuple[int, ...], bytes: int, cost: Cost
) -> int | None:
    if cost.algorithm not in ALGORITHMS or cost.algorithm.startswith("collnet"):
        return None
    return chunk_bytes(collective, cost.algorithm, cost.protocol, model.communicator(ranks), bytes, cost.channels)
