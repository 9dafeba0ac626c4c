"""The arrays that the engine runs over: programs, classes and channels, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echo_hooks.compose.costs import Costs, split_bytes, uneven
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.programs import Call, RoleProgram
from echo_hooks.compose.world import World, calls_of_port
from echo_hooks.graph.program import Evidence, Kind


class Programs(NamedTuple):
    """All role programs end to end. ``*0[role]`` is where the role's part of an array begins."""

    n: np.ndarray
    record0: np.ndarray
    action: np.ndarray
    host_us: np.ndarray
    thread: np.ndarray
    run_us: np.ndarray
    stream: np.ndarray
    place: np.ndarray
    wait_start: np.ndarray
    waits: np.ndarray
    part_start: np.ndarray
    parts: np.ndarray
    call0: np.ndarray
    call_record: np.ndarray
    call_port: np.ndarray
    call_kind: np.ndarray
    call_number: np.ndarray
    call_share: np.ndarray
    stream0: np.ndarray
    stream_start: np.ndarray
    stream_records: np.ndarray


class Classes(NamedTuple):
    """``port0``/``cost0``: where the class's rows of ``channel`` (per port) and ``cost_us`` (per distinct call) begin;
    ``instance0``: of its records over all copies; ``last0``: of its records of the last copy; ``node0``: of its calls
    over all copies; ``agent0``: of its agents (host threads, then streams). ``buffered``: per distinct call, whether
    it is a send that completes without its recv."""

    role: np.ndarray
    scale: np.ndarray
    port0: np.ndarray
    channel: np.ndarray
    cost0: np.ndarray
    cost_us: np.ndarray
    buffered: np.ndarray
    instance0: np.ndarray
    last0: np.ndarray
    node0: np.ndarray
    agent0: np.ndarray
    threads: np.ndarray
    streams: np.ndarray
    agent_class: np.ndarray


class Channels(NamedTuple):
    """Where calls meet. ``need``: arrivals that complete a call; ``calls``: how many in one copy of the programs;
    ``slot0``: number of the first call; ``slot_us``: duration per call of a copy (0: take the members' own)."""

    need: np.ndarray
    calls: np.ndarray
    slot0: np.ndarray
    first0: np.ndarray
    slot_us: np.ndarray


@dataclass
class Tables:
    """``ends[channel]``: the (class, port) pairs that lead to it; ``missing[channel]``: group places or partners that
    no program serves."""

    programs: Programs
    classes: Classes
    channels: Channels
    ends: list[list[tuple[int, int]]]
    missing: list[bool]
    call_evidence: np.ndarray
    call_latency_us: np.ndarray


def concatenate(programs: Sequence[RoleProgram]) -> Programs:
    """All programs one after the other, with where each begins."""

    def bases(lengths: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(p, name)) for p in programs]).astype(dtype)

    def csr(start: str, values: str) -> tuple[np.ndarray, np.ndarray]:
        shift, starts = 0, []
        for p in programs:
            starts.append(getattr(p, start)[:-1] + shift)
            shift += len(getattr(p, values))
        return np.concatenate([*starts, [shift]]).astype(np.int64), joined(values, np.int64)

    wait_start, waits = csr("wait_start", "waits")
    part_start, parts = csr("part_start", "parts")
    stream_start, stream_records = csr("stream_start", "stream_records")
    return Programs(
        n=np.asarray([p.n for p in programs], np.int64),
        record0=bases([p.n for p in programs]),
        action=joined("action", np.uint8),
        host_us=np.concatenate([p.host_us for p in programs]).astype(np.float64),
        thread=joined("thread", np.int64),
        run_us=joined("run_us", np.float64),
        stream=np.concatenate([p.program.stream for p in programs]).astype(np.int64),
        place=joined("place", np.int64),
        wait_start=wait_start,
        waits=waits,
        part_start=part_start,
        parts=parts,
        call0=bases([len(p.call_record) for p in programs]),
        call_record=joined("call_record", np.int64),
        call_port=joined("call_port", np.int64),
        call_kind=joined("call_kind", np.int64),
        call_number=joined("call_number", np.int64),
        call_share=joined("call_share", np.float64),
        stream0=bases([len(p.stream_start) - 1 for p in programs]),
        stream_start=stream_start,
        stream_records=stream_records,
    )


def build_tables(
    world: World, partition: Partition, costs: Costs, repeat: int, scale: np.ndarray, buffered_bytes: int = -1
) -> Tables:
    """``scale``: factor on the kernel times, per class. ``buffered_bytes``: sends up to this size complete alone."""
    roles = world.role_of[partition.representative]
    programs = [world.programs[r] for r in roles]

    def bases(lengths: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)

    channel_of, ends, missing = _channels(world, partition)
    cost_us, evidence, latency = _call_costs(world, partition, costs)
    buffered = np.concatenate(
        [[call.kind == Kind.SEND and call.bytes <= buffered_bytes for call in p.calls] for p in programs] or [[]]
    ).astype(np.uint8)
    streams = [len(p.stream_start) - 1 for p in programs]
    agents = [p.threads + s for p, s in zip(programs, streams)]
    classes = Classes(
        role=roles.astype(np.int64),
        scale=scale.astype(np.float64),
        port0=bases([len(p.ports) for p in programs]),
        channel=channel_of,
        cost0=bases([len(p.calls) for p in programs]),
        cost_us=cost_us,
        buffered=buffered,
        instance0=bases([p.n * repeat for p in programs]),
        last0=bases([p.n for p in programs]),
        node0=bases([len(p.call_record) * repeat for p in programs]),
        agent0=bases(agents),
        threads=np.asarray([p.threads for p in programs], np.int64),
        streams=np.asarray(streams, np.int64),
        agent_class=np.repeat(np.arange(len(programs)), agents),
    )
    count = np.zeros(len(ends), np.int64)
    for channel, of_channel in enumerate(ends):
        count[channel] = max(int(programs[c].port_count[p]) for c, p in of_channel)
    first0 = bases(count.tolist()) if len(count) else np.zeros(0, np.int64)
    channels = Channels(
        need=np.asarray([len(e) + m for e, m in zip(ends, missing)], np.int64),
        calls=count,
        slot0=first0 * repeat,
        first0=first0,
        slot_us=_uneven_costs(world, partition, costs, ends, count, first0),
    )
    return Tables(concatenate(world.programs), classes, channels, ends, missing, evidence, latency)


def _channels(world: World, partition: Partition) -> tuple[np.ndarray, list[list[tuple[int, int]]], list[bool]]:
    """Number the channels: one per colour of groups, one per (sending class, port)."""
    numbers: dict[tuple, int] = {}
    ends: list[list[tuple[int, int]]] = []
    missing: list[bool] = []
    channel_of = []
    for c, rank in enumerate(partition.representative.tolist()):
        role = int(world.role_of[rank])
        for j, port in enumerate(world.programs[role].ports):
            own = int(world.port_base[role]) + j
            if port.kind == Kind.COLLECTIVE:
                group = world.group_of(rank, j)
                key: tuple = ("group", partition.colour_of_group[group])
                lacks = bool((world.member_port[group] < 0).any())
            else:
                partner = world.partner_of(rank, j)
                lacks = partner < 0
                if port.kind == Kind.SEND or lacks:
                    key = ("pair", port.kind, c, own)
                else:
                    key = ("pair", int(Kind.SEND), int(partition.class_of[world.peer_of(rank, j)]), partner)
            channel = numbers.setdefault(key, len(numbers))
            if channel == len(ends):
                ends.append([])
                missing.append(lacks)
            ends[channel].append((c, j))
            channel_of.append(channel)
    return np.asarray(channel_of, np.int64), ends, missing


_EVIDENCE = {e.name.lower(): int(e) for e in Evidence}


def _call_costs(world: World, partition: Partition, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Duration, evidence and latency per class and distinct call; uneven calls have none of their own (0)."""
    durations, evidence, latencies = [], [], []
    for rank in partition.representative.tolist():
        program = world.programs[world.role_of[rank]]
        place_of: dict[int, int] = {}
        for call in program.calls:
            cost = None if uneven(call) else cost_of(world, costs, rank, call, place_of)
            durations.append(0.0 if cost is None else cost.duration_us)
            latencies.append(0.0 if cost is None else getattr(cost, "latency_us", 0.0))
            name = "modelled" if cost is None else getattr(cost, "evidence", "modelled")
            evidence.append(_EVIDENCE.get(name, int(Evidence.MODELLED)))
    return np.asarray(durations, np.float64), np.asarray(evidence, np.uint8), np.asarray(latencies, np.float64)


def cost_of(world: World, costs: Costs, rank: int, call: Call, place_of: dict[int, int]):
    """The network's answer for ``call`` as ``rank`` makes it. ``place_of``: memo of placements by group."""
    group = world.group_of(rank, call.port)
    if call.kind == Kind.COLLECTIVE:
        ranks = world.members[group]
        if group not in place_of:
            place_of[group] = costs.placement(ranks)
        return costs.collective(call, ranks, place_of[group])
    peer = world.peer_of(rank, call.port)
    source, destination = (rank, peer) if call.kind == Kind.SEND else (peer, rank)
    place = int(costs.pair_placements(np.asarray([source]), np.asarray([destination]))[0])
    return costs.point_to_point(call, source, destination, place, world.groups[group].size)


def _uneven_costs(
    world: World, partition: Partition, costs: Costs, ends: list, count: np.ndarray, first0: np.ndarray
) -> np.ndarray:
    """Duration of every uneven all-to-all, from what all its members send; 0 for the other calls."""
    slot_us = np.zeros(int(count.sum()))
    for channel, of_channel in enumerate(ends):
        c, j = of_channel[0]
        rank = int(partition.representative[c])
        if world.programs[world.role_of[rank]].ports[j].kind != Kind.COLLECTIVE:
            continue
        if not any(_any_uneven(world, partition, *end) for end in of_channel):
            continue
        group = world.group_of(rank, j)
        ranks = world.members[group]
        place = costs.placement(ranks)
        sequences = [calls_of_port(world, int(port)) for port in world.member_port[group]]
        for i, members in enumerate(zip(*sequences)):
            if any(uneven(call) for call in members):
                cost = costs.collective(members[0], ranks, place, split_bytes(members))
                slot_us[int(first0[channel]) + i] = cost.duration_us
    return slot_us


def _any_uneven(world: World, partition: Partition, c: int, port: int) -> bool:
    program = world.programs[world.role_of[partition.representative[c]]]
    return any(uneven(call) for call in program.calls if call.port == port)
