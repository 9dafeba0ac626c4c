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
3. and every call on that port costs the same for both, and loads links that are loaded alike: by calls of like
   classes, with the same bytes (where links are shared; see ``links``).

Claim: r's and s's records have equal times. By induction over the order in which the times become known: a record that
depends on its own rank only has the same operands in r and s (1). A call is ready at the maximum over arrivals of its
members; by (2) the n-th call of r's group and of s's have members of equal classes, arriving with the same record of
the same program, whose times are equal by induction; a maximum does not depend on the order of its operands and picks
one of them unrounded, so both are equal to the last bit; by (3) so are their ends. A value that never becomes known
(a hang) stays unknown in both, for the same reason. Hence one representative per class suffices, and a folded call is
complete when each (class, port) that leads to it has arrived once, because all the others would arrive just then.

Where rates change, they are sums and max-min shares over what runs on a GPU or a link at that moment; by (2) and (3)
both see equal ones, up to the order of the sums: equal times up to rounding.

The partition is found by refinement: begin with (program, speed), colour groups by the colours of their members, ranks
by the colours of their groups and peers, and repeat until the number of colours stands still. That is the coarsest
partition with properties 1 to 3, because each round only separates ranks that differ in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echo_hooks.compose.costs import Costs, uneven
from echo_hooks.compose.links import LinkColours, Links
from echo_hooks.compose.programs import Call
from echo_hooks.compose.world import World
from echo_hooks.graph.program import Kind


@dataclass
class Partition:
    """``class_of[rank]``; ``representative[class]``, its lowest rank; ``colour_of_group``: groups of one colour are
    the same call partners, class by class; ``resources``: one link of each class of links that are loaded alike."""

    class_of: np.ndarray
    representative: np.ndarray
    colour_of_group: dict[int, int]
    resources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def ranks(self) -> list[np.ndarray]:
        """Ranks of each class, ascending."""
        order = np.argsort(self.class_of, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.class_of))[:-1])


def unfolded(world: World, links: Links | None = None) -> Partition:
    """Every rank, group and link a class of its own."""
    ranks = np.arange(world.world_size)
    resources = np.arange(len(links.capacity) if links else 0)
    return Partition(ranks, ranks.copy(), {g: g for g in world.members}, resources)


def fold(world: World, costs: Costs, speed: np.ndarray | None = None, links: Links | None = None) -> Partition:
    """The coarsest partition that the module's docstring describes. ``speed``: float per rank; ranks of different
    speed stay apart. ``links``: where given, calls on links that are loaded differently stay apart too."""
    colour = world.role_of.copy()
    if speed is not None:
        colour = _pair(colour, np.unique(speed, return_inverse=True)[1].reshape(-1))
    group_ids = sorted(world.members)
    group_cost = _group_cost_colours(world, costs, group_ids)
    pair_cost = [_pair_cost_colours(world, costs, number) for number in range(len(world.programs))]
    concatenated = np.concatenate([world.members[g] for g in group_ids]) if group_ids else np.zeros(0, np.int64)
    ports = np.concatenate([world.member_port[g] for g in group_ids]) if group_ids else np.zeros(0, np.int64)
    ends = np.cumsum([len(world.members[g]) for g in group_ids]).tolist()

    of_links = LinkColours(links) if links else None
    first_sender = _first_senders(world, links) if links else {}
    link_count = 0
    count = (-1, -1)
    while True:
        of_owner = of_links.of_owners() if of_links else np.zeros(len(group_ids), np.int64)
        present = np.where(ports >= 0, colour[concatenated], -1)
        interned: dict[tuple, int] = {}
        colour_of_group = np.full(len(world.groups), -1, np.int64)
        start = 0
        for i, g in enumerate(group_ids):
            key = (world.groups[g].family, group_cost[i], int(of_owner[i]), present[start : ends[i]].tobytes())
            colour_of_group[g] = interned.setdefault(key, len(interned))
            start = ends[i]
        found = (int(colour.max()) + 1, link_count)
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
                if (number, j) in first_sender:
                    at = first_sender[number, j]
                    mine = _pair(mine, of_owner[at : at + len(ranks)])
            fresh[ranks] = mine + base
            base += int(mine.max()) + 1
        colour = fresh
        if of_links and links:
            senders = int(colour_of_group.max(initial=0)) + 1 + _sending(links, colour)
            link_count = of_links.refine(np.concatenate([colour_of_group[group_ids], senders]))
    _, representative, class_of = np.unique(colour, return_index=True, return_inverse=True)
    # Classes in order of their lowest rank: the numbering does not depend on how colours came about.
    order = np.argsort(representative)
    rename = np.empty(len(order), np.int64)
    rename[order] = np.arange(len(order))
    groups = {g: int(colour_of_group[g]) for g in group_ids}
    resources = np.unique(of_links.of_resource, return_index=True)[1] if of_links else np.zeros(0, np.int64)
    return Partition(rename[class_of.reshape(-1)], representative[order], groups, np.sort(resources))


def _first_senders(world: World, links: Links) -> dict[tuple[int, int], int]:
    """Per (role, port) that sends, the place of its first rank among the owners; its other ranks follow."""
    first: dict[tuple[int, int], int] = {}
    for i, (rank, port) in enumerate(links.senders.tolist()):
        first.setdefault((int(world.role_of[rank]), port), len(links.groups) + i)
    return first


def _sending(links: Links, colour: np.ndarray) -> np.ndarray:
    """Number per sender: equal for one port of ranks of one colour."""
    if not len(links.senders):
        return np.zeros(0, np.int64)
    return _pair(colour[links.senders[:, 0]], links.senders[:, 1])


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
