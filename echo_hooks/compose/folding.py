"""Folding: which ranks do the same at the same time, so that one of them is simulated for all.

Why it is exact
---------------
Unfolded, every time in the simulation is the value of an expression over a rank's own records and the calls it shares:
a record starts at a maximum of earlier times and ends a constant later; a call is ready at the maximum of its members'
arrivals. Take a partition of the ranks into classes such that any two ranks r, s of a class

1. run the same program, at the same speed;
2. for every port of that program (a group's collectives, or sends to or recvs from a peer): the group that r's port
   leads to and the one that s's leads to hold, place by place, ranks of the same classes that reach it by the same
   ports; for a send or recv, the peers are in one class and answer through the same port;
3. and every call on that port costs the same for both.

Claim: r's and s's records have equal times. By induction over the order in which the times become known: a record that
depends on its own rank only has the same operands in r and s (1). A call is ready at the maximum over arrivals of its
members; by (2) the n-th call of r's group and of s's have members of equal classes, arriving with the same record of
the same program, whose times are equal by induction; a maximum does not depend on the order of its operands and picks
one of them unrounded, so both are equal to the last bit; by (3) so are their ends. A value that never becomes known
(a hang) stays unknown in both, for the same reason. Hence one representative per class suffices, and a folded call is
complete when each (class, port) that leads to it has arrived once, because all the others would arrive just then.

The partition is found by refinement: begin with (program, speed), colour groups by the colours of their members, ranks
by the colours of their groups and peers, and repeat until the number of colours stands still. That is the coarsest
partition with properties 1 to 3, because each round only separates ranks that differ in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from echo_hooks.compose.costs import Costs, uneven
from echo_hooks.compose.programs import Call, RoleProgram
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.program import Kind


@dataclass
class World:
    """Who meets whom, rank by rank. A port's global number is ``port_base[role] + port``.

    ``role_of[rank]``. Per role, arrays [ranks of the role, ports]: ``port_group`` (the group that the port leads to),
    ``port_peer`` (global rank, -1 for collectives), ``port_partner`` (global port number by which the peer answers, -1
    if it never does). ``member_port[group]``: for each place of the group the global number of the port by which its
    rank calls collectives there, -1 if it makes none.
    """

    world_size: int
    groups: GroupTable
    programs: list[RoleProgram]
    role_of: np.ndarray
    row_of: np.ndarray
    port_base: np.ndarray
    port_group: list[np.ndarray]
    port_peer: list[np.ndarray]
    port_partner: list[np.ndarray]
    members: dict[int, np.ndarray] = field(default_factory=dict)
    member_port: dict[int, np.ndarray] = field(default_factory=dict)

    def role_and_port(self, port: int) -> tuple[int, int]:
        """Role and its own port number of a global port number."""
        role = int(np.searchsorted(self.port_base, port, side="right")) - 1
        return role, port - int(self.port_base[role])

    def group_of(self, rank: int, port: int) -> int:
        return int(self.port_group[self.role_of[rank]][self.row_of[rank], port])

    def peer_of(self, rank: int, port: int) -> int:
        return int(self.port_peer[self.role_of[rank]][self.row_of[rank], port])

    def partner_of(self, rank: int, port: int) -> int:
        return int(self.port_partner[self.role_of[rank]][self.row_of[rank], port])


def build_world(world_size: int, groups: GroupTable, programs: Sequence[RoleProgram]) -> World:
    """Lead every port of every rank to its group and peer (``graph.roles`` says how; here for all ranks at once).

    Raises UsageError when the roles do not cover each rank once, or a rank has no group of the family it needs.
    """
    role_of = np.full(world_size, -1, np.int64)
    row_of = np.zeros(world_size, np.int64)
    for number, program in enumerate(programs):
        ranks = np.asarray(program.role.ranks, np.int64)
        if not len(ranks) or ranks.min() < 0 or ranks.max() >= world_size or (role_of[ranks] >= 0).any():
            raise UsageError(f"role {program.role.name!r}: its ranks are empty, outside the world or in two roles")
        role_of[ranks] = number
        row_of[ranks] = np.arange(len(ranks))
    if (role_of < 0).any():
        raise UsageError(f"rank {int(np.argmin(role_of))} has no role; every rank of the world needs one")

    family_of_rank: dict[int, np.ndarray] = {}
    world = World(world_size, groups, list(programs), role_of, row_of, np.zeros(len(programs), np.int64), [], [], [])
    base = 0
    for number, program in enumerate(programs):
        world.port_base[number] = base
        base += len(program.ports)
        ranks = np.asarray(program.role.ranks, np.int64)
        group = np.zeros((len(ranks), len(program.ports)), np.int64)
        peer = np.full((len(ranks), len(program.ports)), -1, np.int64)
        for j, port in enumerate(program.ports):
            family = groups[port.group].family
            if family not in family_of_rank:
                family_of_rank[family] = _group_of_rank(world_size, groups, family)
            group[:, j] = family_of_rank[family][ranks]
            if (group[:, j] < 0).any():
                lost = int(ranks[np.argmin(group[:, j])])
                name = groups[port.group].name
                raise UsageError(
                    f"role {program.role.name!r}: rank {lost} is in no group like group {port.group} ({name}), so it"
                    f" cannot run the program of rank {program.role.traced_rank}"
                )
            if port.peer >= 0:
                place = groups[port.group].position(port.peer)
                distinct, inverse = np.unique(group[:, j], return_inverse=True)
                try:
                    peer[:, j] = np.asarray([groups[g].ranks[place] for g in distinct.tolist()])[inverse.reshape(-1)]
                except IndexError:
                    raise UsageError(
                        f"role {program.role.name!r}: a group of the family of group {port.group} has no place {place}"
                    ) from None
        world.port_group.append(group)
        world.port_peer.append(peer)
    _find_partners(world)
    _find_members(world)
    return world


def _group_of_rank(world_size: int, groups: GroupTable, family: int) -> np.ndarray:
    of_rank = np.full(world_size, -1, np.int64)
    for group in groups.family(family):
        of_rank[list(group.ranks)] = group.index
    return of_rank


def _find_partners(world: World) -> None:
    """Pair each port for sends with the port by which the peer receives, and the reverse."""
    key, port_number, slot = [], [], []
    for number, program in enumerate(world.programs):
        world.port_partner.append(np.full(world.port_peer[number].shape, -1, np.int64))
        ranks = np.asarray(program.role.ranks, np.int64)
        for j, port in enumerate(program.ports):
            if port.kind == Kind.COLLECTIVE:
                continue
            peer = world.port_peer[number][:, j]
            source, destination = (ranks, peer) if port.kind == Kind.SEND else (peer, ranks)
            pair = (world.port_group[number][:, j] * world.world_size + source) * world.world_size + destination
            key.append(pair * 2 + (port.kind == Kind.RECV))
            port_number.append(np.full(len(ranks), world.port_base[number] + j))
            slot.append((number, j))
    if not key:
        return
    all_keys, all_ports = np.concatenate(key), np.concatenate(port_number)
    order = np.argsort(all_keys)
    sorted_keys = all_keys[order]
    for keys, (number, j) in zip(key, slot):
        at = np.minimum(np.searchsorted(sorted_keys, keys ^ 1), len(sorted_keys) - 1)
        found = sorted_keys[at] == keys ^ 1
        world.port_partner[number][:, j] = np.where(found, all_ports[order[at]], -1)


def _find_members(world: World) -> None:
    place_of: dict[int, np.ndarray] = {}
    for number, program in enumerate(world.programs):
        ranks = np.asarray(program.role.ranks, np.int64)
        for j, port in enumerate(program.ports):
            if port.kind != Kind.COLLECTIVE:
                continue
            of_port = world.port_group[number][:, j]
            family = world.groups[port.group].family
            for g in np.unique(of_port).tolist():
                if g not in world.members:
                    world.members[g] = np.asarray(world.groups[g].ranks, np.int64)
                    world.member_port[g] = np.full(world.groups[g].size, -1, np.int64)
                    place_of.setdefault(family, np.zeros(world.world_size, np.int64))[world.members[g]] = np.arange(
                        world.groups[g].size
                    )
            places = place_of[family][ranks]
            order = np.argsort(of_port, kind="stable")
            bounds = np.flatnonzero(np.diff(of_port[order])) + 1
            for chunk in np.split(order, bounds):
                world.member_port[int(of_port[chunk[0]])][places[chunk]] = world.port_base[number] + j


@dataclass
class Partition:
    """``class_of[rank]``; ``representative[class]``, its lowest rank; ``colour_of_group``: groups of one colour are
    the same call partners, class by class."""

    class_of: np.ndarray
    representative: np.ndarray
    colour_of_group: dict[int, int]

    def ranks(self) -> list[np.ndarray]:
        """Ranks of each class, ascending."""
        order = np.argsort(self.class_of, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.class_of))[:-1])


def unfolded(world: World) -> Partition:
    ranks = np.arange(world.world_size)
    return Partition(ranks, ranks.copy(), {g: g for g in world.members})


def fold(world: World, costs: Costs, speed: np.ndarray | None = None) -> Partition:
    """The coarsest partition that the module's docstring describes. ``speed``: float per rank; ranks of different
    speed stay apart."""
    colour = world.role_of.copy()
    if speed is not None:
        colour = _pair(colour, np.unique(speed, return_inverse=True)[1].reshape(-1))
    group_ids = sorted(world.members)
    group_cost = _group_cost_colours(world, costs, group_ids)
    pair_cost = [_pair_cost_colours(world, costs, number) for number in range(len(world.programs))]
    concatenated = np.concatenate([world.members[g] for g in group_ids]) if group_ids else np.zeros(0, np.int64)
    ports = np.concatenate([world.member_port[g] for g in group_ids]) if group_ids else np.zeros(0, np.int64)
    ends = np.cumsum([len(world.members[g]) for g in group_ids]).tolist()

    count = -1
    while True:
        present = np.where(ports >= 0, colour[concatenated], -1)
        interned: dict[tuple, int] = {}
        colour_of_group = np.full(len(world.groups), -1, np.int64)
        start = 0
        for i, g in enumerate(group_ids):
            key = (world.groups[g].family, group_cost[i], present[start : ends[i]].tobytes())
            colour_of_group[g] = interned.setdefault(key, len(interned))
            start = ends[i]
        found = int(colour.max()) + 1
        if found == count:
            break
        count = found
        fresh = colour.copy()
        base = 0
        for number, program in enumerate(world.programs):
            ranks = np.asarray(program.role.ranks, np.int64)
            mine = np.unique(colour[ranks], return_inverse=True)[1].reshape(-1)
            for j, port in enumerate(program.ports):
                if port.kind == Kind.COLLECTIVE:
                    mine = _pair(mine, colour_of_group[world.port_group[number][:, j]])
                else:
                    mine = _pair(mine, colour[world.port_peer[number][:, j]])
                    mine = _pair(mine, world.port_partner[number][:, j] + 1)
                    mine = _pair(mine, pair_cost[number][j])
            fresh[ranks] = mine + base
            base += int(mine.max()) + 1
        colour = fresh
    _, representative, class_of = np.unique(colour, return_index=True, return_inverse=True)
    # Classes in order of their lowest rank: the numbering does not depend on how colours came about.
    order = np.argsort(representative)
    rename = np.empty(len(order), np.int64)
    rename[order] = np.arange(len(order))
    groups = {g: int(colour_of_group[g]) for g in group_ids}
    return Partition(rename[class_of.reshape(-1)], representative[order], groups)


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Number the distinct pairs (a[i], b[i]) from 0."""
    return np.unique(a * (int(b.max()) + 1) + b, return_inverse=True)[1].reshape(-1)


def _group_cost_colours(world: World, costs: Costs, group_ids: list[int]) -> list[int]:
    """Groups of one family have one colour when every call made in the family costs the same on them."""
    calls: dict[int, dict[Call, None]] = {}
    for program in world.programs:
        for call in program.calls:
            if call.kind == Kind.COLLECTIVE:
                family = world.groups[program.ports[call.port].group].family
                calls.setdefault(family, {}).setdefault(call)
    colour_of: dict[tuple[int, int], int] = {}
    interned: dict[tuple, int] = {}
    colours = []
    for g in group_ids:
        ranks, family = world.members[g], world.groups[g].family
        place = costs.placement(ranks)
        if (family, place) not in colour_of:
            # The cost of an uneven call depends on all its members' splits: such groups fold only on one placement.
            durations = tuple(
                place if uneven(call) else costs.collective(call, ranks, place).duration_us
                for call in calls[family]
                if call.root < len(ranks)
            )
            colour_of[family, place] = interned.setdefault((family, durations), len(interned))
        colours.append(colour_of[family, place])
    return colours


def _pair_cost_colours(world: World, costs: Costs, number: int) -> dict[int, np.ndarray]:
    """Per port for sends or recvs: equal numbers where all its calls cost the same."""
    program = world.programs[number]
    ranks = np.asarray(program.role.ranks, np.int64)
    colours = {}
    for j, port in enumerate(program.ports):
        if port.kind == Kind.COLLECTIVE:
            continue
        peer = world.port_peer[number][:, j]
        source, destination = (ranks, peer) if port.kind == Kind.SEND else (peer, ranks)
        places, first, inverse = np.unique(
            costs.pair_placements(source, destination), return_index=True, return_inverse=True
        )
        size = world.groups[port.group].size
        calls = [call for call in program.calls if call.port == j]
        interned: dict[tuple, int] = {}
        of_place = [
            interned.setdefault(
                tuple(
                    costs.point_to_point(call, int(source[i]), int(destination[i]), place, size).duration_us
                    for call in calls
                ),
                len(interned),
            )
            for place, i in zip(places.tolist(), first.tolist())
        ]
        colours[j] = np.asarray(of_place)[inverse.reshape(-1)]
    return colours
