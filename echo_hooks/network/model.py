"""Duration and loads of every communication of a simulated job on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.calibration import Calibration, shipped_calibration
from echo_hooks.network.cost import Cost, Resource
from echo_hooks.network.curves import SIZES, Curve, Point, Samples, Steps, samples
from echo_hooks.network.durations import WIRE, Reach
from echo_hooks.network.hccl import (
    A3_SUPERPOD_NODES,
    plan_hccl,
    plan_hccl_exchange,
    plan_hccl_send,
    read_hccl_environment,
)
from echo_hooks.network.memory import HCCL_BUFFER_BYTES, nccl_bytes
from echo_hooks.network.nccl_environment import FUNCTIONS, read_environment
from echo_hooks.network.nccl_graph import Communicator
from echo_hooks.network.nccl_tables import DEFAULT_VERSION, PCI_SHARE, kernel_only, parse_version, tables
from echo_hooks.network.nccl_tuning_log import TuningTable
from echo_hooks.network.placement import Layout, Placement, place
from echo_hooks.network.plan import Planned, Rules, plan_collective, plan_exchange, plan_send
from echo_hooks.network.resources import (
    Links,
    Loads,
    Traffic,
    architecture,
    blocks,
    reached_nic,
    usable_nic,
    usable_scale_up,
)
from echo_hooks.network.spread import fuller, over_nodes

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
    "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "barrier")  # torch's calls have one tensor: nothing to copy alone
_BARRIER_BYTES = 4  # c10d's NCCL barrier is an all-reduce of one float
_MOST_BYTES = 1 << 50
_UNUSUAL_DTYPES = {"float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"}  # for which NCCL chooses otherwise


class CommunicationModel:
    """Costs on ``cluster`` with NCCL ``nccl_version`` (Ascend: HCCL), under the job's ``environment`` (NCCL_*, HCCL_*).

    ``calibration``: left out, the one that comes with the accelerator, or NCCL's own numbers (``Calibration()``).
    ``printed``: tuning tables of the real library (``nccl_tuning_log``), which decide for groups of their size; left
    out, the calibration's.
    ``resources``: the links that ``Cost.loads`` index. ``notes``: what a reader of the numbers should know. Costs
    are remembered, and equal for groups that lie alike.
    Raises UsageError for an unknown version and for a variable that NCCL would refuse.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        nccl_version: str = DEFAULT_VERSION,
        environment: Mapping[str, str] = {},
        calibration: Calibration | None = None,
        printed: Sequence[TuningTable] = (),
    ):
        self._hccl = None
        if cluster.accelerator.vendor == "huawei":
            self._hccl = read_hccl_environment(environment, a3=cluster.scale_up == "switch")
        self.cluster = cluster
        self.nccl_version = nccl_version
        self._environment = read_environment(environment)
        if calibration is None:
            calibration = shipped_calibration(cluster.accelerator.name) or Calibration()
        self.calibration = calibration
        # Durations are built on one version: what a hop takes does not depend on what NCCL thought of it.
        time = kernel_only(tables("2.30"), cluster.accelerator.launch_overhead_us)
        decide = tuple(printed) or calibration.tables
        self._rules = Rules(tables(nccl_version), time, self._environment, decide)
        self.notes = _notes(calibration, cluster, nccl_version)
        self._links = Links(cluster)
        self._placements: dict[tuple[int, ...], Placement] = {}
        self._communicators: dict[tuple, tuple[Communicator, Reach]] = {}
        self._known: dict[tuple, Steps] = {}  # by what durations depend on
        self._scaling = cache(calibration.scaling)
        self._curves: dict[tuple, Curve] = {}  # by group
        self._costs: dict[tuple, Cost] = {}
        self._traffic: dict[tuple, Traffic] = {}

    @property
    def resources(self) -> list[Resource]:
        return self._links.resources

    def collective(
        self,
        name: str,
        ranks: tuple[int, ...],
        bytes: int,
        dtype: str,
        *,
        root: int = -1,
        count: int = 1,
        splits: Sequence[Sequence[int]] | None = None,
    ) -> Cost:
        """One collective of the group ``ranks`` (global ranks in group order).

        ``bytes`` as nccl-tests counts them: all_reduce, broadcast, reduce: the buffer; all_gather: the output;
        reduce_scatter: the input; all_to_all: sent per rank, own part included; gather, scatter: the root's large
        buffer. ``root``: global rank of a rooted one. ``count``: collectives coalesced into one call, of ``bytes``
        together. ``splits``: of an uneven all_to_all, bytes that place i (row) sends to place j (column).
        """
        key = (name, ranks, bytes, dtype, root, count, splits)
        cost = self._costs.get(key) if splits is None else None
        if cost is None:
            cost = self._collective(name, ranks, bytes, dtype, root, count, splits)
            if splits is None:
                self._costs[key] = cost
        return cost

    def point_to_point(self, source: int, destination: int, bytes: int, *, group_size: int) -> Cost:
        """A send and its receive; ``group_size``: ranks of the communicator that carries it (2 for a lone isend)."""
        key = (source, destination, bytes, group_size)
        cost = self._costs.get(key)
        if cost is None:
            _check_bytes(bytes)
            placement = self._place((source, destination))
            comm, reach = self._communicator(placement, group_size)
            nodes = -(-group_size // self.cluster.accelerators_per_node)  # at least so many hold the group
            point = self._send_curve(comm, reach, nodes).at(bytes)
            traffic = self._links.pairs(np.array([source]), np.array([destination]), np.ones(1))
            cost = self._costs[key] = self._cost(point, traffic, bytes)
        return cost

    def loads_of_sends(
        self, source: np.ndarray, destination: np.ndarray, bytes: int, cost: Cost
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The loads of many sends of ``bytes`` that each cost ``cost``: (place of the send, resource, bytes there)."""
        send, resource = self._links.ways(source, destination)
        most = self._links.capacity(resource) * (cost.duration_us - cost.latency_us)
        return send, resource, np.minimum(bytes * WIRE[cost.protocol], most)

    def placement(self, ranks: tuple[int, ...]) -> Placement:
        return self._place(ranks)

    def communicator(self, ranks: tuple[int, ...]) -> Communicator:
        """What the library's choices for a group depend on."""
        return self._communicator(self._place(ranks))[0]

    def plan(self, name: str, ranks: tuple[int, ...], sizes: np.ndarray, dtype: str) -> list[Planned]:
        """What runs at each of ``sizes`` and the parts of its duration, as calibration sees it: before multipliers,
        and before durations are made monotone. ``name``: a collective, or "send" or "exchange" of two ranks."""
        placement = self._place(ranks)
        comm, reach = self._communicator(placement)
        if name in ("send", "exchange"):
            return self._plan_send(comm, reach, sizes)
        if name in ("all_to_all", "gather", "scatter"):
            root = ranks[0] if name != "all_to_all" else -1
            return self._plan_exchange(comm, reach, sizes, max(self._fullest_us(self._even(name, placement, root))))
        return self._plan_collective(name, comm, reach, dtype, sizes)

    def device_memory(
        self, ranks: tuple[int, ...], calls: Mapping[tuple[str, str], np.ndarray], pairs: set[tuple[int, int]]
    ) -> int:
        """Bytes of the device that the communicator of ``ranks`` takes from one of them. ``calls``: (name, dtype) of
        its collectives -> sizes; ``pairs``: (rank, peer) of its sends and receives. See ``memory``."""
        if self._hccl is not None:
            return 2 * HCCL_BUFFER_BYTES if len(ranks) > 1 else 0
        exchanged = [name for name, _ in calls if name in ("all_to_all", "gather", "scatter")]
        algorithms = {
            planned.algorithm.lower()
            for (name, dtype), sizes in calls.items()
            if name not in exchanged and len(ranks) > 1
            for planned in self.plan(name if name in FUNCTIONS else "all_reduce", ranks, sizes, dtype)
        }
        node = self.cluster.accelerators_per_node
        near = {peer for rank, peer in pairs if peer // node == rank // node and peer != rank}
        far = {peer for rank, peer in pairs if peer // node != rank // node}
        if exchanged:
            own = next(iter(pairs), (ranks[0], 0))[0]
            near |= {rank for rank in ranks if rank // node == own // node and rank != own}
            far |= {rank for rank in ranks if rank // node != own // node}
        comm, rules = self.communicator(ranks), self._rules
        return nccl_bytes(comm, rules.selection, self._environment, algorithms, len(near), len(far))

    # ---- collectives ----

    def _collective(
        self, name: str, ranks: tuple[int, ...], bytes: int, dtype: str, root: int, count: int, splits: Any
    ) -> Cost:
        if name not in COLLECTIVES:
            raise UsageError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
        if count < 1:
            raise UsageError(f"{name}: count {count} should be at least 1")
        _check_bytes(bytes)
        placement = self._place(ranks)
        if root >= 0 and root not in placement.ranks:
            raise UsageError(f"{name}: root {root} is not in the group")
        if len(ranks) == 1:
            return self._alone(name, bytes)
        if name in ("all_to_all", "gather", "scatter"):
            return self._exchange(name, placement, bytes, root, splits)
        function = "all_reduce" if name == "barrier" else name
        if name == "barrier":
            bytes = _BARRIER_BYTES
        kind = dtype if dtype in _UNUSUAL_DTYPES else "float32"
        curve = self._collective_curve(function, placement, kind, count)
        point = curve.at(bytes)
        return self._cost(point, self._collective_traffic(function, point.algorithm, placement), bytes)

    def _collective_curve(self, function: str, placement: Placement, kind: str, count: int) -> Curve:
        def plan(comm: Communicator, reach: Reach) -> list[Planned]:
            return self._plan_collective(function, comm, reach, kind, SIZES, count)

        def steps(layout: Layout) -> Steps:
            comm, reach = self._communicator_of(layout)
            return self._steps((function, comm, reach, kind, count), plan, comm, reach)

        return self._over_nodes((function, kind, count), placement, steps)

    def _alone(self, name: str, bytes: int) -> Cost:
        """A group of one: NCCL copies input to output where they differ, reading and writing memory once."""
        accelerator = self.cluster.accelerator
        copy = 0.0 if name in _IN_PLACE else 2 * bytes / (accelerator.memory_bandwidth_bytes_per_s / 1e6)
        launch = accelerator.launch_overhead_us
        return Cost(launch + copy, launch + copy, "copy", "simple", 1, ())

    def _collective_traffic(self, function: str, algorithm: str, placement: Placement) -> Traffic:
        """Bytes per link and byte of the collective: each accelerator's, in and out, and each node's, over its NICs."""
        key = (function, algorithm, placement.ranks)
        traffic = self._traffic.get(key)
        if traffic is not None:
            return traffic
        n, m, g = len(placement.ranks), len(placement.nodes), placement.per_node
        passes = 2 if function == "all_reduce" else 1
        ring = passes * (n - 1) / n if function not in ("broadcast", "reduce") else 1.0
        if algorithm == "ring" and self._hccl is None:
            local, net = ring, ring
        elif algorithm == "tree":
            local, net = 2.0, 1.0 if m == 2 else 2.0
        elif algorithm in ("nvls", "nvls_tree"):
            local, net = 1.0 if function == "all_reduce" else (g - 1) / g, 1.0 if m == 2 else 2.0
        elif algorithm == "pat":
            local, net = 0.0, (m - 1) / m
        elif self._hccl is not None:  # level by level
            passes = 1 if function in ("all_gather", "reduce_scatter") else 2
            local, net = passes * (g - 1) / g, passes * (m - 1) / m
        else:
            local, net = 1.0, 1.0
        loads = self._links.scale_up(placement.ranks, local) if g > 1 and local else []
        if m > 1:
            # Rings and trees go through the nodes in order, so each switch is entered and left once.
            loads += self._links.fabric(placement, net, [net if spans > 1 else 0.0 for spans in placement.spans])
        traffic = self._traffic[key] = self._links.traffic(loads)
        return traffic

    # ---- sends and what is made of them ----

    def _plan_collective(
        self, function: str, comm: Communicator, reach: Reach, dtype: str, sizes: np.ndarray, count: int = 1
    ) -> list[Planned]:
        if self._hccl is not None:
            return plan_hccl(function, comm, reach, self._hccl, sizes)
        return plan_collective(function, comm, reach, self._rules, dtype, sizes, count=count)

    def _plan_send(
        self, comm: Communicator, reach: Reach, sizes: np.ndarray, carrier: Communicator | None = None
    ) -> list[Planned]:
        if self._hccl is not None:
            return plan_hccl_send(comm, reach, self._hccl, sizes)
        return plan_send(comm, reach, self._rules, sizes, carrier)

    def _carrier(self, comm: Communicator, nodes: int) -> Communicator | None:
        """The communicator on ``nodes`` nodes that carries a send between two ranks of one, None if it is theirs."""
        if nodes <= comm.nodes:
            return None
        cluster = self.cluster
        return replace(comm, nodes=nodes, per_node=cluster.accelerators_per_node, nics=cluster.nics_per_node)

    def _send_curve(self, comm: Communicator, reach: Reach, nodes: int) -> Curve:
        """Of a send between two ranks of a communicator on at least ``nodes`` nodes."""
        key = ("send", comm, reach, nodes)
        found = self._curves.get(key)
        if found is None:

            def plan(comm: Communicator, reach: Reach) -> list[Planned]:
                return self._plan_send(comm, reach, SIZES, self._carrier(comm, nodes))

            steps = self._steps(key, plan, comm, reach)
            found = self._curves[key] = Curve(steps.samples, steps.bounded)
        return found

    def _plan_exchange(self, comm: Communicator, reach: Reach, sizes: np.ndarray, busiest: float) -> list[Planned]:
        if self._hccl is not None:
            return plan_hccl_exchange(comm, reach, self._hccl, sizes, busiest)
        return plan_exchange(comm, reach, self._rules, sizes, busiest)

    def _exchange(
        self,
        name: str,
        placement: Placement,
        bytes: int,
        root: int,
        splits: Sequence[Sequence[int]] | None,
    ) -> Cost:
        """Grouped sends, timed by their fullest links."""
        curve = self._exchange_curve(name, placement, root)
        even = self._even(name, placement, root)
        if splits is None:
            point = curve.at(bytes)
            return self._cost(point, even, bytes)
        loads = self._matrix_traffic(placement, _matrix(splits, len(placement.ranks)))
        # It takes as long as an even one that loads the fullest link of the same kind as much.
        size = max(us / even_us for us, even_us in zip(self._fullest_us(loads), self._fullest_us(even)) if even_us > 0)
        point = curve.at(size)
        return self._cost(point, loads, 1)

    def _exchange_curve(self, name: str, placement: Placement, root: int) -> Curve:
        def steps(layout: Layout) -> Steps:
            comm, reach = self._communicator_of(layout)
            fullest = self._links.fullest_even_us(name, layout, root)
            if fullest is None:
                fullest = self._fullest_us(self._even(name, placement, root))

            def plan(step_comm: Communicator, step_reach: Reach) -> list[Planned]:
                inside, outside = fullest[0] * reach.scale_up / step_reach.scale_up, fullest[1]
                if comm.nodes > 1:
                    outside *= reach.node / step_reach.node
                return self._plan_exchange(step_comm, step_reach, SIZES, max(inside, outside))

            return self._steps((name, comm, reach, fullest), plan, comm, reach)

        return self._over_nodes((name, root), placement, steps)

    def _over_nodes(self, what: tuple, placement: Placement, steps: Callable[[Layout], Steps]) -> Curve:
        """The curve of a group, nowhere below that on fewer nodes (``spread``)."""
        key = (*what, placement.ranks)
        found = self._curves.get(key)
        if found is None:
            layout, full = placement.layout(self.cluster), self.cluster.accelerators_per_node
            own = steps(layout)
            duration = own.bounded
            if layout.nodes > 1:
                others = fuller(layout.per_node, full)
                if what[0] == "all_to_all":  # as many ranks on more nodes may have more NICs for it
                    share = layout.nics_per_rank
                    others = [g for g in others if placement.with_ranks(1, g, self.cluster).nics_per_rank >= share]

                def on(nodes: int, per_node: int) -> Steps:
                    return steps(placement.with_ranks(nodes, per_node, self.cluster))

                duration = over_nodes(layout.ranks, layout.nodes, layout.per_node, others, own, on)
            found = self._curves[key] = Curve(own.samples, duration)
        return found

    def _even(self, name: str, placement: Placement, root: int) -> Traffic:
        """Of one byte, equally spread."""
        key = (name, root, placement.ranks)
        traffic = self._traffic.get(key)
        if traffic is None:
            n = len(placement.ranks)
            share = np.zeros((n, n))
            at = placement.ranks.index(root) if root >= 0 else 0
            if name == "all_to_all":
                share[:] = 1 / n
            elif name == "gather":
                share[:, at] = 1 / n
            else:
                share[at, :] = 1 / n
            np.fill_diagonal(share, 0.0)
            traffic = self._traffic[key] = self._matrix_traffic(placement, share)
        return traffic

    def _matrix_traffic(self, placement: Placement, matrix: np.ndarray) -> Traffic:
        """Of ``matrix[i, j]`` bytes from place i to place j."""
        ranks = np.array(placement.ranks)
        i, j = np.nonzero(matrix)
        return self._links.pairs(ranks[i], ranks[j], matrix[i, j])

    def _fullest_us(self, traffic: Traffic) -> tuple[float, float]:
        """Time of the fullest link in a node, and of the fullest one outside."""
        times = traffic.per_byte / traffic.capacity
        inside = np.array(traffic.index, np.int64) < 2 * self.cluster.world_size
        return float(np.max(times, where=inside, initial=0.0)), float(np.max(times, where=~inside, initial=0.0))

    # ---- shared ----

    def _place(self, ranks: tuple[int, ...]) -> Placement:
        placement = self._placements.get(ranks)
        if placement is None:
            placement = self._placements[ranks] = place(tuple(ranks), self.cluster)
        return placement

    def _communicator(self, placement: Placement, group_size: int = 0) -> tuple[Communicator, Reach]:
        layout = placement.layout(self.cluster)
        return self._communicator_of(replace(layout, ranks=group_size) if group_size > layout.ranks else layout)

    def _communicator_of(self, layout: Layout) -> tuple[Communicator, Reach]:
        key = (layout.ranks, layout.nodes, layout.per_node, layout.nics, layout.crosses)
        found = self._communicators.get(key)
        if found is None:
            found = self._communicators[key] = self._new_communicator(layout)
        return found

    def _new_communicator(self, layout: Layout) -> tuple[Communicator, Reach]:
        cluster = self.cluster
        scale_up = usable_scale_up(cluster.accelerator) / 1e3
        if cluster.scale_up == "mesh" and cluster.accelerators_per_node > 1:
            scale_up *= max(1, layout.per_node - 1) / (cluster.accelerators_per_node - 1)
        pci = cluster.accelerator.host_link_bandwidth_bytes_per_s * PCI_SHARE / 1e9
        peer = self._environment.peer_to_peer
        nic = usable_nic(cluster) / 1e3
        comm = Communicator(
            ranks=layout.ranks,
            nodes=layout.nodes,
            per_node=layout.per_node,
            architecture=architecture(cluster.accelerator),
            nvlink=scale_up if peer else 0.0,
            pci=pci,
            multicast=cluster.multicast,
            nics=layout.nics,
            nic=nic,
            cpu=cluster.host_cpu,
        )
        node = math.inf
        if layout.nodes > 1:
            reached = reached_nic(cluster) / 1e3
            node = layout.nics * reached
            for level, crosses in zip(cluster.levels, layout.crosses):
                if crosses and blocks(level.nodes, level.oversubscription, cluster):
                    rails = layout.nics / cluster.nics_per_node if cluster.rails else 1.0
                    up = level.nodes * cluster.nics_per_node * rails * reached / level.oversubscription
                    node = min(node, up)
        return comm, Reach(scale_up if peer else pci, node)

    def _steps(
        self, key: tuple, plan: Callable[[Communicator, Reach], list[Planned]], comm: Communicator, reach: Reach
    ) -> Steps:
        found = self._known.get(key)
        if found is None:

            def sample(comm: Communicator, reach: Reach) -> Samples:
                scope = min(comm.nodes, 2)
                return samples(plan(comm, reach), lambda *choice: self._scaling(scope, *choice, key[0]))

            found = self._known[key] = Steps(sample, comm, reach)
        return found

    @staticmethod
    def _cost(point: Point, traffic: Traffic, bytes: int) -> Cost:
        transfer = point.duration_us - point.latency_us
        loads = Loads(traffic, bytes * WIRE[point.protocol], transfer)
        return Cost(point.duration_us, point.latency_us, point.algorithm, point.protocol, point.channels, loads)


def _notes(calibration: Calibration, cluster: Cluster, nccl_version: str) -> list[str]:
    notes = []
    if not calibration.scalings:
        notes.append("communication is not calibrated: durations rest on NCCL's own numbers")
    elif cluster.nodes > 1 and not any(scope == "network" for scope, *_ in calibration.scalings):
        notes.append(f"calibration {calibration.name} has no measurement between nodes")
    if calibration.accelerator and calibration.accelerator != cluster.accelerator.name:
        notes.append(f"calibration {calibration.name} is of {calibration.accelerator}, not {cluster.accelerator.name}")
    measured = calibration.nccl_version
    if measured and parse_version(measured)[:2] != parse_version(nccl_version)[:2]:
        notes.append(f"calibration {calibration.name} was measured with NCCL {measured}; the job has {nccl_version}")
    if cluster.accelerator.vendor == "huawei":
        notes.append("HCCL is modelled by its rules and has not been compared with measurements")
        if cluster.scale_up == "switch" and cluster.nodes > A3_SUPERPOD_NODES:
            notes.append(
                f"all {cluster.nodes} servers are taken as one superpod, which holds {A3_SUPERPOD_NODES}: RoCE between "
                "superpods is not described, so communication there takes longer"
            )
    if cluster.accelerator.vendor == "amd":
        notes.append("RCCL is modelled by NCCL's rules; its own tuning is not known here")
    return notes


def _check_bytes(bytes: int) -> None:
    if not 0 <= bytes <= _MOST_BYTES:
        raise UsageError(f"{bytes} bytes: a message should have from 0 to 2^50")


def _matrix(splits: Sequence[Sequence[int]], ranks: int) -> np.ndarray:
    matrix = np.array(splits, np.float64) if len({len(row) for row in splits}) == 1 else np.zeros((0, 0))
    if matrix.shape != (ranks, ranks) or (matrix < 0).any():
        raise UsageError(f"all_to_all: splits should be {ranks} rows of {ranks} byte counts")
    np.fill_diagonal(matrix, 0.0)
    return matrix
