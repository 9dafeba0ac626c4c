"""Which records of different timelines are one communication."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from echo_hooks.compose.result import Timeline
from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import group_for, peer_for

TOLERANCE_US = 0.01


@dataclass(frozen=True)
class Meeting:
    """One communication seen by several timelines: ``members`` are (timeline index, record)."""

    members: tuple[tuple[int, int], ...]


def find_meetings(timelines: list[Timeline], table: GroupTable) -> list[Meeting]:
    """Communications with members in two or more timelines, in the order the first of them issues them.

    Timelines stand for classes of ranks, so classes meet: those whose representatives' groups join the same classes,
    with the same running number.
    """
    class_of = {rank: i for i, timeline in enumerate(timelines) for rank in timeline.ranks}
    collectives: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    sends: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for i, timeline in enumerate(timelines):
        program = timeline.program
        mapped = {int(g): own_group(table, int(g), timeline.representative) for g in np.unique(program.group) if g >= 0}
        classes = {g: tuple(sorted({class_of.get(r, -1) for r in own.ranks})) for g, own in mapped.items()}
        moves = np.isin(program.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) & (program.group >= 0)
        for record in np.flatnonzero(moves).tolist():
            g, kind = int(program.group[record]), int(program.kind[record])
            if kind == Kind.COLLECTIVE:
                collectives[table[g].family, int(program.seq[record]), classes[g]].append((i, record))
                continue
            peer = own_peer(table[g], int(program.peer[record]), mapped[g])
            other = class_of.get(peer, -1)
            if kind == Kind.SEND:
                sends[i, other, table[g].family].append((i, record))
            else:
                receives[other, i, table[g].family].append((i, record))
    found = [Meeting(tuple(m)) for m in collectives.values() if len({i for i, _ in m}) == len(m) > 1]
    for key, sent in sends.items():
        if len(receives[key]) == len(sent):  # matched in order, as NCCL does on an ordered pair
            found += [Meeting((a, b)) for a, b in zip(sent, receives[key]) if a[0] != b[0]]
    return sorted(found, key=lambda meeting: meeting.members)


def agree(timelines: list[Timeline], meeting: Meeting) -> bool:
    """Whether the members are ready at one instant: those of a meeting matched wrongly are not."""
    ready = [float(timelines[i].ready_us[record]) + timelines[i].offset_us for i, record in meeting.members]
    return bool(np.isfinite(ready).all()) and max(ready) - min(ready) <= TOLERANCE_US


def own_group(table: GroupTable, index: int, rank: int) -> Group:
    """The group ``rank`` uses for group ``index`` of its role's program; the program's own where that is not known."""
    try:
        return group_for(table, table[index], rank)
    except ValueError:
        return table[index]


def own_peer(group: Group, peer: int, mapped: Group) -> int:
    """Global rank of ``peer`` for the member whose group is ``mapped``."""
    try:
        return peer_for(group, peer, mapped)
    except ValueError:  # a peer outside the group: point-to-point on a damaged table
        return peer
