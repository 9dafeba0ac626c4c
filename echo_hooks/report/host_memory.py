"""Host memory of the nodes: the sum over their ranks of what each rank's large CPU tensors take."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from echo_hooks.graph.problems import Problem
from echo_hooks.graph.rundir import Run
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.report.quantities import bytes_text, ranks_text


def host_memory(run: Run, cluster: Cluster) -> dict[str, Any] | None:
    """``node`` (the one whose ranks take most), ``ranks`` there, ``peak_bytes``, ``pinned_bytes`` and the node's
    ``capacity_bytes`` (None where the cluster file does not state it); None where no rank holds any.

    Peaks of ranks are added up as if they came at one time.
    """
    peak: dict[int, int] = defaultdict(int)
    pinned: dict[int, int] = defaultdict(int)
    ranks: dict[int, list[int]] = defaultdict(list)
    for role in run.roles:
        for rank in role.ranks:
            node = rank // cluster.accelerators_per_node
            peak[node] += role.memory.host_peak_bytes
            pinned[node] += role.memory.host_pinned_bytes
            ranks[node].append(rank)
    if not any(peak.values()):
        return None
    fullest = min(peak, key=lambda node: (-peak[node], node))
    return {
        "node": fullest,
        "ranks": sorted(ranks[fullest]),
        "peak_bytes": peak[fullest],
        "pinned_bytes": pinned[fullest],
        "capacity_bytes": cluster.host_memory_bytes,
    }


def host_problem(host: dict[str, Any] | None) -> Problem | None:
    """What is wrong where the fullest node has less memory than its ranks take."""
    if host is None or host["capacity_bytes"] is None or host["peak_bytes"] <= host["capacity_bytes"]:
        return None
    message = (
        f"the hosts' memory does not do: node {host['node']} ({ranks_text(host['ranks'])}) needs"
        f" {bytes_text(host['peak_bytes'])} of {bytes_text(host['capacity_bytes'])} for CPU tensors,"
        f" {bytes_text(host['pinned_bytes'])} of it page-locked"
    )
    return Problem("out_of_memory", message, tuple(host["ranks"]))


def host_text(host: dict[str, Any]) -> str:
    """One line about the fullest node."""
    capacity = "" if host["capacity_bytes"] is None else f" of {bytes_text(host['capacity_bytes'])}"
    return (
        f"host memory, node {host['node']}: {bytes_text(host['peak_bytes'])}{capacity} in CPU tensors of its"
        f" {len(host['ranks'])} ranks, {bytes_text(host['pinned_bytes'])} of it page-locked"
    )
