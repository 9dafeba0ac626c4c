"""Do the ranks that meet in a call mean the same call? Checked on the programs alone, before any time passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from echo_hooks.compose.costs import even_split, uneven
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.programs import Call, RoleProgram
from echo_hooks.compose.tables import Tables
from echo_hooks.compose.world import World, calls_of_port
from echo_hooks.graph.problems import Problem, rank_ranges
from echo_hooks.graph.program import Kind


def mismatches(world: World, partition: Partition, tables: Tables) -> list[Problem]:
    """One Problem of kind "mismatch" per family of groups (or pair of ports) whose calls disagree, at the first call
    that does. A rank that makes fewer calls than the others is not a mismatch but a hang."""
    found: dict[tuple, list[tuple[int, str, str, tuple[int, ...]]]] = {}
    checked: dict[tuple, tuple | None] = {}
    for ends in tables.ends:
        c, port = ends[0]
        rank = int(partition.representative[c])
        program = world.programs[world.role_of[rank]]
        group = world.group_of(rank, port)
        if program.ports[port].kind == Kind.COLLECTIVE:
            ports = world.member_port[group]
            key: tuple = (world.groups[group].family, ports.tobytes())
            if key not in checked:
                checked[key] = _collective_mismatch(world, ports)
            if checked[key] is None:
                continue
            number, place = checked[key]  # type: ignore[misc]
            problem = _describe_collective(world, group, number, place)
        else:
            partner = world.partner_of(rank, port)
            if partner < 0:
                continue
            own = int(world.port_base[world.role_of[rank]]) + port
            key = ("pair", *sorted((own, partner)))
            if key in found:
                continue
            problem = _pair_mismatch(world, rank, port, partner)
            if problem is None:
                continue
        found.setdefault(key, []).append(problem)
    return [
        Problem("mismatch", text if len(same) == 1 else f"{text} (and in {len(same) - 1} more groups)", ranks, site)
        for same in found.values()
        for _, text, site, ranks in same[:1]
    ]


def _collective_mismatch(world: World, ports: np.ndarray) -> tuple[int, tuple[int, int] | None] | None:
    """The number of the first call on which the places disagree; for splits also the two places."""
    distinct = [int(p) for p in np.unique(ports) if p >= 0]
    sequences = {p: calls_of_port(world, p) for p in distinct}
    for number in range(min(len(s) for s in sequences.values())):
        calls = {p: s[number] for p, s in sequences.items()}
        any_uneven = any(uneven(call) for call in calls.values())
        if len({_agreement(call, any_uneven) for call in calls.values()}) > 1:
            return number, None
        if any_uneven and (ports >= 0).all():
            crossing = _split_mismatch([calls[int(p)] for p in ports])
            if crossing is not None:
                return number, crossing
    return None


def _agreement(call: Call, without_bytes: bool) -> tuple:
    return (call.name, call.reduce, -1 if without_bytes or call.objects else call.bytes, call.dtype, call.root)


def _split_mismatch(members: Sequence[Call]) -> tuple[int, int] | None:
    """First (i, j) such that what place i sends to j is not what j expects from i."""
    size = len(members)
    sent, expected = np.zeros((size, size), np.int64), np.zeros((size, size), np.int64)
    for i, call in enumerate(members):
        for row, splits in ((sent[i], call.input_splits), (expected[i], call.output_splits)):
            if splits and len(splits) != size:
                return i, i
            row[:] = splits or even_split(call, size)
    wrong = np.argwhere(sent != expected.T)
    return (int(wrong[0][0]), int(wrong[0][1])) if len(wrong) else None


def _describe_collective(world: World, group: int, number: int, crossing: tuple[int, int] | None):
    of_group = world.groups[group]
    ports = world.member_port[group]
    if crossing is not None:
        i, j = crossing
        a, b = of_group.ranks[i], of_group.ranks[j]
        call_a, call_b = (calls_of_port(world, int(ports[x]))[number] for x in (i, j))
        site = _sites([site_of_call(world, int(ports[x]), number) for x in (i, j)])
        what = f"{running_number(world, int(ports[i]), number)} on {group_text(world, group)}, {call_a.name}: "
        if i == j:
            what += f"rank {a} gives {len(call_a.input_splits)} splits for {of_group.size} ranks"
        else:
            sends = call_a.input_splits[j] if call_a.input_splits else even_split(call_a, of_group.size)
            wants = call_b.output_splits[i] if call_b.output_splits else even_split(call_b, of_group.size)
            what += (
                f"rank {a} sends {sends} elements to rank {b} (input split {j}), which expects {wants}"
                f" (output split {i})"
            )
        return number, f"{what}, at {site}", site, tuple(sorted({a, b}))
    by_call: dict[tuple, list[int]] = {}
    for place, port in enumerate(ports.tolist()):
        if port >= 0:
            call = calls_of_port(world, port)[number]
            by_call.setdefault((call.agreement, where_of_call(world, port, number)), []).append(place)
    parts, sites, ranks = [], [], []
    common = Counter({key: len(places) for key, places in by_call.items()}).most_common()
    for (_, where), places in ((key, by_call[key]) for key, _ in common):
        call = calls_of_port(world, int(ports[places[0]]))[number]
        who = [of_group.ranks[p] for p in places]
        parts.append(f"{rank_text(who)} {'calls' if len(who) == 1 else 'call'} {call_text(world, call)} at {where}")
        sites.append(site_of_call(world, int(ports[places[0]]), number))
        ranks += who
    few = min(by_call.values(), key=len)
    text = f"{running_number(world, int(ports[few[0]]), number)} on {group_text(world, group)} does not match: "
    text += ", ".join(parts)
    before = last_calls(world, int(ports[few[0]]), number)
    if before:
        text += f"; before it, {rank_text([of_group.ranks[p] for p in few])} called {before}"
    return number, text, _sites(sites), tuple(sorted(ranks))


def _pair_mismatch(world: World, rank: int, port: int, partner: int):
    own = int(world.port_base[world.role_of[rank]]) + port
    peer = world.peer_of(rank, port)
    if world.programs[world.role_of[rank]].ports[port].kind == Kind.RECV:
        own, partner, rank, peer = partner, own, peer, rank
    group = world.role_and_port(own)
    group_index = world.group_of(rank, group[1])
    for number, (send, recv) in enumerate(zip(calls_of_port(world, own), calls_of_port(world, partner))):
        if send.bytes != recv.bytes:
            sites = [site_of_call(world, own, number), site_of_call(world, partner, number)]
            text = (
                f"rank {rank} sends {send.bytes} bytes to rank {peer} at {sites[0]}, which receives {recv.bytes} bytes"
                f" at {sites[1]} (#{number} in this direction on {group_text(world, group_index)})"
            )
            return number, text, _sites(sites), tuple(sorted([rank, peer]))
    return None


# ---- words for calls, shared with the hang report ----


def rank_text(ranks: Iterable[int]) -> str:
    """ "rank 3", or "ranks 0-2,5"."""
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"


def group_text(world: World, group: int) -> str:
    """A group with its number, name and ranks, as messages show it."""
    of_group = world.groups[group]
    return f"group {group} ({of_group.name}, ranks {rank_ranges(of_group.ranks)})"


def call_text(world: World, call: Call) -> str:
    """A call's name, reduction, size, dtype and root, as messages show it."""
    root = f" with root at place {call.root}" if call.root >= 0 else ""
    reduce = f" ({call.reduce})" if call.reduce else ""
    return f"{call.name}{reduce} of {call.bytes} bytes {call.dtype}{root}".rstrip()


def record_of_call(program: RoleProgram, port: int, number: int) -> int:
    """Record of a port's call ``number``."""
    return int(program.call_record[np.flatnonzero(program.call_port == port)[number]])


def site_of_call(world: World, port: int, number: int) -> str:
    """Source line of the port's call ``number``."""
    role, own = world.role_and_port(port)
    program = world.programs[role]
    return program.site(record_of_call(program, own, number)) or "unknown line"


def where_of_call(world: World, port: int, number: int) -> str:
    """Source line of the port's call ``number``, with module and optimizer steps before it as far as known."""
    role, own = world.role_and_port(port)
    program = world.programs[role]
    return program.where(record_of_call(program, own, number))


def running_number(world: World, port: int, number: int) -> str:
    """The call's number on its group as the rank counts from the start of the run, where the trace has it."""
    role, own = world.role_and_port(port)
    program = world.programs[role]
    seq = int(program.program.seq[record_of_call(program, own, number)])
    return f"call #{seq if seq >= 0 else number}"


def last_calls(world: World, port: int, number: int, count: int = 3) -> str:
    """Up to ``count`` calls that the rank made on this port before call ``number``."""
    calls = calls_of_port(world, port)
    wanted = range(max(0, number - count), min(number, len(calls)))
    return ", ".join(f"{call_text(world, calls[i])} at {where_of_call(world, port, i)}" for i in wanted)


def _sites(sites: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(s for s in sites if s))
