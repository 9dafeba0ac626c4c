"""Which calls load which links: group by group and pair by pair, for the partition and for the engine's shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo_hooks.compose.costs import Costs, split_bytes, uneven
from echo_hooks.compose.programs import Call
from echo_hooks.compose.world import World, calls_of_port
from echo_hooks.graph.program import Kind


@dataclass
class Links:
    """``capacity``: bytes per us by resource. Equally long arrays, one entry per (owner, call, resource): ``owner`` is
    a group (its place in ``groups``) or, behind those, one of ``senders`` (rank, port); ``call``: number in
    ``call_numbers``; ``demand``: bytes per us that the call moves over ``resource`` at its pace alone.
    """

    capacity: np.ndarray
    groups: list[int]
    senders: np.ndarray
    owner: np.ndarray
    call: np.ndarray
    resource: np.ndarray
    demand: np.ndarray
    call_numbers: dict[tuple, int]

    def number(self, call: Call) -> int:
        """The call's number; -1 for one that loads no link."""
        return self.call_numbers.get(_key(call), -1)


def find_links(world: World, costs: Costs) -> Links | None:
    """All loads of a world's calls; None when the network names no resources.

    Those of an uneven all-to-all are of its whole duration, by what each member sends to each; where a group makes
    several that one member sees alike and another does not, all take the loads of the first.
    """
    if not costs.capacity:
        return None
    numbers: dict[tuple, int] = {}
    pieces: list[tuple[np.ndarray, ...]] = []  # owner, call, resource, demand

    def add(call: Call, owner: np.ndarray, resource: np.ndarray, demand: np.ndarray) -> None:
        loaded = demand > 0.0
        if loaded.any():
            number = numbers.setdefault(_key(call), len(numbers))
            owner, resource, demand = owner[loaded], resource[loaded], demand[loaded]
            pieces.append((owner, np.full(len(owner), number), resource, demand))

    groups = sorted(world.members)
    of_port: dict[int, list[Call]] = {}
    for i, g in enumerate(groups):
        calls: dict[tuple, Call] = {}
        for port in set(world.member_port[g].tolist()):
            if port not in of_port:
                of_port[port] = list(dict.fromkeys(c for c in calls_of_port(world, port) if not uneven(c)))
            calls |= {_key(call): call for call in of_port[port]}
        for call in calls.values():
            resource, demand = costs.loads_of_collective(call, world.members[g])
            add(call, np.full(len(resource), i), resource, demand)
        for call, (resource, demand) in _uneven_loads(world, costs, g).items():
            add(call, np.full(len(resource), i), resource, demand)
    senders: list[np.ndarray] = []
    owners = len(groups)
    for role, program in enumerate(world.programs):
        ranks = np.asarray(program.role.ranks, np.int64)
        for j, port in enumerate(program.ports):
            if port.kind != Kind.SEND:
                continue
            size = world.groups[port.group].size
            for call in {_key(call): call for call in program.calls if call.port == j}.values():
                send, resource, demand = costs.loads_of_sends(call, ranks, world.port_peer[role][:, j], size)
                add(call, owners + send, resource, demand)
            senders.append(np.stack([ranks, np.full(len(ranks), j)], axis=1))
            owners += len(ranks)
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    owner, number, resource, demand = (np.concatenate(columns) for columns in zip(empty, *pieces))
    return Links(
        capacity=np.asarray(costs.capacity, np.float64),
        groups=groups,
        senders=np.concatenate([np.zeros((0, 2), np.int64), *senders]),
        owner=owner,
        call=number,
        resource=resource,
        demand=demand,
        call_numbers=numbers,
    )


def _uneven_loads(world: World, costs: Costs, group: int) -> dict[Call, tuple[np.ndarray, np.ndarray]]:
    """(resource, bytes per us) of a group's uneven all-to-alls, by the call as each member makes it."""
    loads: dict[Call, tuple[np.ndarray, np.ndarray]] = {}
    ports, ranks = world.member_port[group], world.members[group]
    if (ports < 0).any() or not any(any(map(uneven, calls_of_port(world, int(p)))) for p in set(ports.tolist())):
        return loads
    known: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    for made in zip(*(calls_of_port(world, int(port)) for port in ports)):
        made_uneven = [call for call in made if uneven(call)]  # those of the others count as even
        if all(call in loads for call in made_uneven):
            continue
        splits = split_bytes(made)
        if any(len(row) != len(ranks) for row in splits):
            continue  # a mismatch, which is told elsewhere
        if splits not in known:
            known[splits] = costs.loads_of_collective(made[0], ranks, splits)
        for call in made_uneven:
            loads.setdefault(call, known[splits])
    return loads


def _key(call: Call) -> tuple:
    kind = "collective" if call.kind == Kind.COLLECTIVE else "send"
    name = call.name if kind == "collective" else ""
    splits = (call.input_splits, call.output_splits) if uneven(call) else ()
    return (kind, name, call.total_bytes, call.dtype, call.root, call.count, *splits)


class LinkColours:
    """Refinement over resources: those of one colour are loaded alike by calls of like colours.

    Multisets are compared by sums of mixed 64-bit numbers; two different ones agree by chance once in 2**64.
    """

    def __init__(self, links: Links):
        self._links = links
        self._by_owner = np.argsort(links.owner, kind="stable")
        self._by_resource = np.argsort(links.resource, kind="stable")
        self._weight = _mixed(links.demand.view(np.uint64) ^ _mixed(links.call.astype(np.uint64)))
        self.of_resource = np.unique(links.capacity, return_inverse=True)[1].reshape(-1)

    def of_owners(self) -> np.ndarray:
        """Number per owner: equal where the loads are, up to resources of one colour."""
        links = self._links
        value = _mixed(self._weight ^ _mixed(self.of_resource[links.resource].astype(np.uint64)))
        sums = np.zeros(len(links.groups) + len(links.senders), np.uint64)
        _add_sorted(sums, links.owner, self._by_owner, value)
        return np.unique(sums, return_inverse=True)[1].reshape(-1)

    def refine(self, owner_colour: np.ndarray) -> int:
        """Colour the resources anew by the colours of the owners that load them; the number of colours."""
        links = self._links
        value = _mixed(self._weight ^ _mixed(owner_colour[links.owner].astype(np.uint64)))
        sums = np.zeros(len(links.capacity), np.uint64)
        _add_sorted(sums, links.resource, self._by_resource, value)
        pair = np.stack([self.of_resource.astype(np.uint64), sums], axis=1)
        self.of_resource = np.unique(pair, axis=0, return_inverse=True)[1].reshape(-1)
        return int(self.of_resource.max(initial=-1)) + 1


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _add_sorted(sums: np.ndarray, index: np.ndarray, order: np.ndarray, value: np.ndarray) -> None:
    if not len(order):
        return
    sorted_index = index[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(sorted_index)) + 1])
    sums[sorted_index[starts]] = np.add.reduceat(value[order], starts)
