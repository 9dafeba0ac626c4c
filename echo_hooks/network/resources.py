"""The links of a cluster that operations share, and how many bytes a group's traffic puts on each.

Only links between accelerators are here: memory and multiprocessors, which computation shares too, belong to the
overlap model. NVSwitches do not block, so a node has no resource of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.cost import Resource
from echo_hooks.network.nccl_tables import NVLINK_GB_PER_S, NVLINK_RAW_GB_PER_S, PCI_SHARE
from echo_hooks.network.placement import Layout, Placement


@dataclass(frozen=True)
class Traffic:
    """Resources that one communication uses: their numbers, bytes on each per byte of the communication, and what
    they carry in bytes per us."""

    index: tuple[int, ...]
    per_byte: np.ndarray
    capacity: np.ndarray


class Loads(Sequence[tuple[int, float]]):
    """(resource, bytes) of ``bytes`` moved in ``transfer_us``, worked out when first looked at: a group of hundreds of
    ranks has as many, and most are never asked for.

    A load is no more than its link can carry meanwhile, so that an operation alone is held up by none.
    """

    __slots__ = ("_bytes", "_pairs", "_traffic", "_transfer_us")

    def __init__(self, traffic: Traffic, bytes: float, transfer_us: float):
        self._traffic, self._bytes, self._transfer_us = traffic, bytes, transfer_us
        self._pairs: tuple[tuple[int, float], ...] | None = None

    def __len__(self) -> int:
        return len(self._traffic.index)

    @overload
    def __getitem__(self, at: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, float]]: ...

    def __getitem__(self, at):
        return self._all()[at]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[tuple[int, float], ...]:
        if self._pairs is None:
            traffic = self._traffic
            bytes = np.minimum(traffic.per_byte * self._bytes, traffic.capacity * self._transfer_us)
            self._pairs = tuple(zip(traffic.index, bytes.tolist()))
        return self._pairs


# What RCCL counts on of an xGMI link of 64 GB/s (ROCm/rccl src/graph/topo.h: GFX94X_XGMI_WIDTH).
_XGMI_SHARE = 48 / 64
# What HCCL counts on of an HCCS link of 28 GB/s (hcomm src/legacy/ascend910, 910B: 18.3).
_HCCS_SHARE = 18.3 / 28
_HCCL_NIC_SHARE = 0.8  # of RoCE; same source
# What large messages get of a NIC's usable rate: InfiniBand and EFA nearly all (public logs of OCI and AWS p5), RoCE
# 42 of 48 GB/s (two H200 nodes of GKE, kubernetes-sigs/dranet). TCP: assumed as RoCE.
_FABRIC_SHARE = {"infiniband": 1.0, "efa": 1.0, "roce": 0.87, "tcp": 0.87}


def architecture(accelerator: Accelerator) -> str:
    """Row of NCCL's tables. AMD's devices run RCCL, which has no row there: the one of equal link speed."""
    major = accelerator.compute_capability[0] if accelerator.compute_capability else 9
    return "volta" if major < 8 else "ampere" if major == 8 else "hopper" if major == 9 else "blackwell"


def usable_scale_up(accelerator: Accelerator) -> float:
    """Bytes per us, one way, that the library counts on of an accelerator's links in the node."""
    if accelerator.vendor == "amd":
        share = _XGMI_SHARE
    elif accelerator.vendor == "huawei":
        share = _HCCS_SHARE
    else:
        arch = architecture(accelerator)
        share = NVLINK_GB_PER_S[arch] / NVLINK_RAW_GB_PER_S[arch]
    return accelerator.scaleup_bandwidth_bytes_per_s * share / 1e6


def usable_nic(cluster: Cluster) -> float:
    """Bytes per us, one way, of a NIC: its line rate (for HCCL what it counts on), or what PCIe lets through."""
    if cluster.accelerator.vendor == "huawei":
        return cluster.nic_bandwidth_bytes_per_s * _HCCL_NIC_SHARE / 1e6
    pci = cluster.accelerator.host_link_bandwidth_bytes_per_s * PCI_SHARE
    return min(cluster.nic_bandwidth_bytes_per_s, pci) / 1e6


def reached_nic(cluster: Cluster) -> float:
    """Bytes per us that messages get through a NIC; NCCL's choices go by ``usable_nic``."""
    share = 1.0 if cluster.accelerator.vendor == "huawei" else _FABRIC_SHARE[cluster.transport]
    return usable_nic(cluster) * share


class Links:
    """The resources of a cluster, numbered: two per accelerator, two per NIC, two per blocking switch (of each rail).

    Uplinks are resources only where they are oversubscribed and something lies beyond them.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        scale_up, nic = usable_scale_up(cluster.accelerator), reached_nic(cluster)
        self.resources: list[Resource] = []
        for rank in range(cluster.world_size):
            self.resources += [
                Resource(f"scale-up out of {rank}", scale_up),
                Resource(f"scale-up into {rank}", scale_up),
            ]
        self._first_nic = len(self.resources)
        for node in range(cluster.nodes if cluster.nodes > 1 else 0):
            for k in range(cluster.nics_per_node):
                name = f"NIC {k} of node {node}"
                self.resources += [Resource(f"{name} out", nic), Resource(f"{name} in", nic)]
        self._rails = cluster.nics_per_node if cluster.rails else 1
        self._first_uplink: list[int] = []
        for level in cluster.levels:
            self._first_uplink.append(
                len(self.resources) if blocks(level.nodes, level.oversubscription, cluster) else -1
            )
            if self._first_uplink[-1] < 0:
                continue
            capacity = level.nodes * cluster.nics_per_node / self._rails * nic / level.oversubscription
            for group in range(-(-cluster.nodes // level.nodes)):
                for rail in range(self._rails):
                    name = f"{level.name} {group}" + (f" rail {rail}" if cluster.rails else "")
                    self.resources += [Resource(f"{name} up", capacity), Resource(f"{name} down", capacity)]
        self._capacity = np.array([resource.capacity_bytes_per_us for resource in self.resources])

    def scale_up(self, ranks: Sequence[int], bytes: float) -> list[tuple[int, float]]:
        """Both directions of each rank's link."""
        return [(2 * r + way, bytes) for r in ranks for way in (0, 1)]

    def fabric(self, placement: Placement, node_bytes: float, crossing: Sequence[float]) -> list[tuple[int, float]]:
        """``node_bytes`` out of and into every node, spread over the NICs near its ranks; ``crossing``: per level,
        the bytes that leave (and enter) each switch group the placement touches."""
        loads = []
        for node, nics in zip(placement.nodes, placement.nics):
            first = self._first_nic + 2 * node * self._cluster.nics_per_node
            loads += [(first + 2 * k + way, node_bytes / len(nics)) for k in nics for way in (0, 1)]
        rails = sorted({k for nics in placement.nics for k in nics}) if self._cluster.rails else [0]
        for level, first, bytes in zip(self._cluster.levels, self._first_uplink, crossing):
            if first >= 0 and bytes > 0:
                for group in sorted({node // level.nodes for node in placement.nodes}):
                    base = first + 2 * self._rails * group
                    loads += [(base + 2 * rail + way, bytes / len(rails)) for rail in rails for way in (0, 1)]
        return loads

    def traffic(self, loads: Sequence[tuple[int, float]]) -> Traffic:
        index = tuple(r for r, _ in loads)
        return Traffic(index, np.array([b for _, b in loads]), self._capacity[list(index)])

    def pairs(self, source: np.ndarray, destination: np.ndarray, bytes: np.ndarray) -> Traffic:
        """Sends from rank to rank (arrays of one length): over the node's links, or over NICs and uplinks."""
        send, resource = self.ways(source, destination)
        used, at = np.unique(resource, return_inverse=True)
        load = np.bincount(at.reshape(-1), weights=bytes[send], minlength=len(used))
        used, load = used[load != 0], load[load != 0]
        return Traffic(tuple(used.tolist()), load, self._capacity[used])

    def fullest_even_us(self, name: str, layout: Layout, root: int) -> tuple[float, float] | None:
        """Time of the fullest link in a node, and of the fullest one outside, per byte of an ``all_to_all``, ``gather``
        or ``scatter`` that is evenly spread: what ``pairs`` would find, without looking at every pair. ``root``: its
        rank; if on none of the group's nodes (-1), it is on the first. None for groups that have other places on one
        node than on another."""
        if not layout.alike:
            return None
        n, m, g = layout.ranks, layout.nodes, layout.per_node
        scale_up = self.resources[0].capacity_bytes_per_us
        rails = self._cluster.rails
        inside, outside = (g - 1) / n, 0.0
        if m > 1:
            outside = (n - g) / n
            moved = (m - 1) / n if rails else 0.0  # to the destination's rail, in the own node
            if name == "all_to_all":
                outside *= layout.shared
                inside += max((g - layout.least) * moved, (g - layout.shared) * layout.shared * moved)
            elif name == "scatter":
                inside += (g - layout.shared) * moved
                if rails:
                    outside = layout.shared * (m - 1) / n
        times = [outside / reached_nic(self._cluster)]
        at = root // self._cluster.accelerators_per_node
        at = at if at in layout.members else layout.members[0]
        for level, first, crosses in zip(self._cluster.levels, self._first_uplink, layout.crosses):
            if first >= 0 and crosses:
                here = Counter(node // level.nodes for node in layout.members)
                if name == "all_to_all":
                    most = max(count * g * (n - count * g) / n for count in here.values())
                else:
                    most = (n - here[at // level.nodes] * g) / n
                lane = layout.shared / g if rails and name != "gather" else 1.0
                times.append(most * lane / self.resources[first].capacity_bytes_per_us)
        return inside / scale_up, max(times)

    def ways(self, source: np.ndarray, destination: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every link that every send goes over: (place of the send in the arrays, resource), each pair once.

        With rails a send goes to the destination's rail inside its own node (PXN), so that the fabric keeps to a rail.
        """
        cluster = self._cluster
        per_node, per_nic = cluster.accelerators_per_node, cluster.accelerators_per_node / cluster.nics_per_node
        here, there = source // per_node, destination // per_node
        local = np.flatnonzero(here == there)
        sends, resources = [local, local], [2 * source[local], 2 * destination[local] + 1]
        far = np.flatnonzero(here != there)
        if len(far):
            source, destination, here, there = (x[far] for x in (source, destination, here, there))
            near = source % per_node * cluster.nics_per_node // per_node
            rail = destination % per_node * cluster.nics_per_node // per_node
            if cluster.rails:
                moved = near != rail
                relay = here[moved] * per_node + np.ceil(rail[moved] * per_nic).astype(np.int64)
                sends += [far[moved], far[moved]]
                resources += [2 * source[moved], 2 * relay + 1]
                near = rail
            sends += [far, far]
            resources += [
                self._first_nic + 2 * (here * cluster.nics_per_node + near),
                self._first_nic + 2 * (there * cluster.nics_per_node + rail) + 1,
            ]
            for level, first in zip(cluster.levels, self._first_uplink):
                a, b = here // level.nodes, there // level.nodes
                over = (a != b) & (first >= 0)
                lane = rail[over] if cluster.rails else 0
                sends += [far[over], far[over]]
                resources += [
                    first + 2 * (self._rails * a[over] + lane),
                    first + 2 * (self._rails * b[over] + lane) + 1,
                ]
        return np.concatenate(sends), np.concatenate(resources)

    def capacity(self, resource: np.ndarray) -> np.ndarray:
        """Bytes per us of each of ``resource``."""
        return self._capacity[resource]


def blocks(nodes: int, oversubscription: float, cluster: Cluster) -> bool:
    """Whether a level's uplinks can hold traffic up: oversubscribed, and with nodes beyond them."""
    return oversubscription > 1 and cluster.nodes > nodes
