"""Which records of different timelines are one communication, and how far apart the timelines' clocks are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from echo_hooks.compose.result import Composition, Timeline
from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import group_for, peer_for

CLOCK_TOLERANCE_US = 1.0


@dataclass(frozen=True)
class Meeting:
    """One communication seen by several timelines: ``members`` are (timeline index, record); the sender first."""

    members: tuple[tuple[int, int], ...]
    point_to_point: bool = False


def find_meetings(composition: Composition, groups: dict[int, GroupTable]) -> list[Meeting]:
    """Communications with members in two or more timelines, in the order the first of them issues them.

    ``groups``: by representative, the table its timeline's program indexes. Timelines stand for classes of ranks, so
    classes meet: those whose representatives' groups join the same classes, with the same running number.
    """
    timelines = composition.timelines
    class_of = {rank: i for i, timeline in enumerate(timelines) for rank in timeline.ranks}
    collectives: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    sends: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for i, timeline in enumerate(timelines):
        table = groups[timeline.representative]
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
            found += [Meeting((a, b), point_to_point=True) for a, b in zip(sent, receives[key]) if a[0] != b[0]]
    return sorted(found, key=lambda meeting: meeting.members)


def clock_offsets_us(composition: Composition, meetings: list[Meeting]) -> list[float]:
    """What to add to each timeline's times to put all on the critical one's clock: members of a meeting are ready at
    one instant. 0 for timelines that never meet another."""
    shifts: dict[tuple[int, int], list[float]] = defaultdict(list)
    for meeting in meetings:
        (i, a), *others = meeting.members
        for j, b in others:
            shift = _ready(composition, i, a) - _ready(composition, j, b)
            if np.isfinite(shift):
                shifts[i, j].append(shift)
                shifts[j, i].append(-shift)
    offsets = {composition.critical: 0.0}
    frontier = [composition.critical]
    while frontier:
        i = frontier.pop(0)
        for j in range(len(composition.timelines)):
            if j not in offsets and shifts.get((i, j)):
                offsets[j] = offsets[i] + float(np.median(shifts[i, j]))
                frontier.append(j)
    return [offsets.get(i, 0.0) for i in range(len(composition.timelines))]


def agree(composition: Composition, meeting: Meeting, offsets_us: list[float]) -> bool:
    """Whether the members are ready at one instant: a meeting matched wrongly is not."""
    ready = [_ready(composition, i, record) + offsets_us[i] for i, record in meeting.members]
    return bool(np.isfinite(ready).all()) and max(ready) - min(ready) <= CLOCK_TOLERANCE_US


def _ready(composition: Composition, i: int, record: int) -> float:
    return float(composition.timelines[i].ready_us[record])


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


def group_tables(run_traces, roles, timelines: list[Timeline]) -> dict[int, GroupTable]:
    """By representative: the group table of the traced rank whose program the timeline plays."""
    traced = {role.name: role.traced_rank for role in roles}
    return {t.representative: run_traces[traced[t.role]].groups for t in timelines}
