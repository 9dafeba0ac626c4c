"""What a call costs where it runs: each distinct (call, placement) is asked of the network once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from echo_hooks.compose.programs import Call
from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import itemsize
from echo_hooks.graph.program import Kind


class Cost(Protocol):
    """What the composer reads of the network's answer."""

    @property
    def duration_us(self) -> float: ...


class Network(Protocol):
    """How long communication takes alone; see ``echo_hooks.network``."""

    def collective(
        self,
        name: str,
        ranks: tuple[int, ...],
        bytes: int,
        dtype: str,
        *,
        root: int = -1,
        count: int = 1,
        splits: Any = None,
    ) -> Any: ...

    def point_to_point(self, source: int, destination: int, bytes: int, *, group_size: int) -> Any: ...


def placement(ranks: np.ndarray, accelerators_per_node: int, switch_nodes: tuple[int, ...] = ()) -> bytes:
    """Where a group lies, up to which nodes they are: each member's node and, per level of the fabric, its switch
    (over ``switch_nodes`` nodes), numbered in order of first appearance, and its place in the node. Nodes are alike,
    so groups of one placement have one cost."""
    node = ranks // accelerators_per_node
    columns = [ranks % accelerators_per_node, _renumbered(node)]
    columns += [_renumbered(node // nodes) for nodes in switch_nodes]
    return np.stack(columns).astype(np.int32).tobytes()


def _renumbered(values: np.ndarray) -> np.ndarray:
    """Values as numbers in order of first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse.reshape(-1)]


class Costs:
    """Memo of the network's answers by placement.

    ``splits`` of an uneven all-to-all goes to the network as a tuple of rows in bytes: row i is what place i sends to
    each place.
    """

    def __init__(self, network: Network, accelerators_per_node: int):
        self._network = network
        self.accelerators_per_node = accelerators_per_node
        self.capacity = [r.capacity_bytes_per_us for r in getattr(network, "resources", ())]
        """Bytes per us of each resource that the costs' loads name."""
        levels = getattr(getattr(network, "cluster", None), "levels", ())
        self._switch_nodes = tuple(int(level.nodes) for level in levels)
        self._placements: dict[bytes, int] = {}
        self._known: dict[tuple, Any] = {}

    def placement(self, ranks: np.ndarray) -> int:
        """Running number of the placement of ``ranks`` (global ranks in group order)."""
        return self._placements.setdefault(
            placement(ranks, self.accelerators_per_node, self._switch_nodes), len(self._placements)
        )

    def pair_placements(self, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """The same for many pairs at once, as numbers of their own."""
        code = (
            source % self.accelerators_per_node * self.accelerators_per_node + destination % self.accelerators_per_node
        )
        for nodes in (1, *self._switch_nodes):
            reach = self.accelerators_per_node * nodes
            code = code * 2 + (source // reach == destination // reach)
        return code

    def collective(self, call: Call, ranks: np.ndarray, place: int, splits: tuple | None = None) -> Any:
        key = (place, call.name, call.total_bytes, call.dtype, call.root, call.count, splits)
        cost = self._known.get(key)
        if cost is None:
            members = tuple(ranks.tolist())
            root = members[call.root] if call.root >= 0 else -1
            cost = self._network.collective(
                call.name, members, call.total_bytes, call.dtype, root=root, count=call.count, splits=splits
            )
            self._known[key] = _checked(cost, f"{call.name} of {call.total_bytes} bytes on {len(members)} ranks")
        return cost

    def loads_of_sends(
        self, call: Call, source: np.ndarray, destination: np.ndarray, group_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the sends of ``call`` from rank to rank load: (place of the send, resource, bytes per us at its pace
        alone). Networks that can are asked for all sends of one cost at once."""
        together = getattr(self._network, "loads_of_sends", None)
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        placed = self.pair_placements(source, destination)
        for place in np.unique(placed).tolist():
            at = np.flatnonzero(placed == place)
            first = (int(source[at[0]]), int(destination[at[0]]))
            cost = self.point_to_point(call, *first, place, group_size)
            moving = cost.duration_us - getattr(cost, "latency_us", 0.0)
            if moving <= 0.0:
                continue
            if together is not None:
                send, resource, bytes = together(source[at], destination[at], call.total_bytes, cost)
                found.append((at[send], resource, bytes / moving))
                continue
            for i in at.tolist():
                ends = (int(source[i]), int(destination[i]))
                own = self._network.point_to_point(*ends, call.total_bytes, group_size=group_size)
                resource, bytes = _columns(own.loads)
                found.append((np.full(len(resource), i), resource, bytes / moving))
        return _joined(found)

    def loads_of_collective(
        self, call: Call, ranks: np.ndarray, splits: tuple | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What this very group's ``call`` loads: (resource, bytes per us at its pace alone)."""
        members = tuple(ranks.tolist())
        root = members[call.root] if call.root >= 0 else -1
        cost = self._network.collective(
            call.name, members, call.total_bytes, call.dtype, root=root, count=call.count, splits=splits
        )
        moving = cost.duration_us - cost.latency_us
        resource, bytes = _columns(cost.loads if moving > 0.0 else ())
        return resource, bytes / moving if moving > 0.0 else bytes

    def point_to_point(self, call: Call, source: int, destination: int, place: int, group_size: int) -> Any:
        key = ("p2p", place, call.total_bytes, group_size)
        cost = self._known.get(key)
        if cost is None:
            cost = self._network.point_to_point(source, destination, call.total_bytes, group_size=group_size)
            self._known[key] = _checked(cost, f"send of {call.total_bytes} bytes from {source} to {destination}")
        return cost


def _columns(loads: Any) -> tuple[np.ndarray, np.ndarray]:
    pairs = list(loads)
    return np.asarray([r for r, _ in pairs], np.int64), np.asarray([b for _, b in pairs], np.float64)


def _joined(pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    send, resource, demand = (np.concatenate(columns) for columns in zip(empty, *pieces))
    return send, resource, demand


def uneven(call: Call) -> bool:
    """An all-to-all with splits of its own, whose cost depends on all members'."""
    return call.kind == Kind.COLLECTIVE and bool(call.input_splits or call.output_splits)


def even_split(call: Call, places: int) -> int:
    """Elements that an all-to-all without splits sends to each place, and expects from it."""
    return call.bytes // itemsize(call.dtype) // places


def split_bytes(members: Sequence[Call]) -> tuple[tuple[int, ...], ...]:
    """Rows of bytes that each member of an uneven all-to-all sends to each place."""
    rows = []
    for call in members:
        sent = call.input_splits or (even_split(call, len(members)),) * len(members)
        rows.append(tuple(int(x) * itemsize(call.dtype) for x in sent))
    return tuple(rows)


def _checked(cost: Any, what: str) -> Any:
    if not (math.isfinite(cost.duration_us) and cost.duration_us >= 0):
        raise UsageError(f"the network model gives {cost.duration_us} us for {what}")
    return cost
