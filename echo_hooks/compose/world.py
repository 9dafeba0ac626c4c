"""Who meets whom: every port of every rank led to its group and its peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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


def calls_of_port(world: World, port: int) -> list[Call]:
    """The calls that a port (global number) makes in one copy, in order; none for port -1."""
    if port < 0:
        return []
    role, own = world.role_and_port(port)
    program = world.programs[role]
    return [program.calls[k] for k in program.call_kind[program.call_port == own].tolist()]
