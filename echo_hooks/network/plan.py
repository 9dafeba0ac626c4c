"""What runs for a communication at each of many sizes, and the parts of its duration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.network import point_to_point as p2p
from echo_hooks.network.durations import Parts, Reach, UsualChannels, collective_parts
from echo_hooks.network.nccl_environment import Environment
from echo_hooks.network.nccl_graph import Communicator, ring_graph, usual
from echo_hooks.network.nccl_selection import Candidate, candidates, channels, choose
from echo_hooks.network.nccl_tables import Tables
from echo_hooks.network.nccl_tuning_log import TuningTable


@dataclass(frozen=True)
class Planned:
    """One algorithm and protocol. ``where``: indices of the sizes it runs at; ``channels`` and ``parts`` are for
    those."""

    algorithm: str
    protocol: str
    where: np.ndarray
    channels: np.ndarray
    parts: Parts


@dataclass(frozen=True)
class Rules:
    """``selection``: constants of the NCCL that runs; ``time``: those that durations are built on; ``environment``:
    the job's; ``printed``: tables that the real library printed, which replace the selection's."""

    selection: Tables
    time: Tables
    environment: Environment
    printed: tuple[TuningTable, ...] = ()


def plan_collective(
    function: str,
    comm: Communicator,
    reach: Reach,
    rules: Rules,
    dtype: str,
    sizes: np.ndarray,
    *,
    count: int = 1,
) -> list[Planned]:
    """all_reduce, all_gather, reduce_scatter, broadcast, reduce. ``count``: collectives coalesced into one call."""
    operations = -(-count // ring_graph(comm, rules.selection).launched)
    rows = _as_printed(candidates(function, comm, rules.selection, rules.environment), function, comm, rules)
    best, _ = choose(rows, function, comm, dtype, sizes, operations=operations)
    usual_rings = ring_graph(usual(comm), rules.selection).launched
    planned = []
    for i, row in enumerate(rows):
        where = np.flatnonzero(best == i)
        if len(where):
            taken = channels(row, comm, sizes[where], rules.environment)
            most = row.graph.launched if row.algorithm in ("nvls", "nvls_tree") else usual_rings
            usually = UsualChannels(channels(row, comm, sizes[where], rules.environment, most), most)
            parts = collective_parts(
                function, row, comm, reach, rules.time, sizes[where], taken, usually, operations=operations
            )
            planned.append(Planned(row.algorithm, row.protocol, where, taken, parts))
    return planned


def _as_printed(rows: list[Candidate], function: str, comm: Communicator, rules: Rules) -> list[Candidate]:
    """``rows`` with the numbers of the table printed for a communicator of this size, if there is one."""
    table = next((t for t in rules.printed if (t.ranks, t.nodes) == (comm.ranks, comm.nodes)), None)
    if table is None:
        return rows
    said = []
    for row in rows:
        latency, bandwidth = table.rows.get((function, row.algorithm, row.protocol), (row.latency_us, row.gb_per_s))
        if bandwidth > 0:
            said.append(replace(row, latency_us=latency, gb_per_s=bandwidth))
    return said or rows


def plan_send(
    comm: Communicator, reach: Reach, rules: Rules, sizes: np.ndarray, carrier: Communicator | None = None
) -> list[Planned]:
    """A send of each of ``sizes`` and its receive. ``comm``: the two ranks. ``carrier``: the communicator whose
    channels they take, if it spans more nodes than they do: NCCL gives all its pairs as few channels as the worst."""
    between = comm.nodes > 1
    whole = carrier or comm
    able = p2p.p2p_channels(whole, rules.selection, rules.environment)
    taken = p2p.send_channels(whole, able, sizes)
    counted = p2p.send_channels(whole, p2p.p2p_channels(usual(whole), rules.selection, rules.environment), sizes)
    ll = p2p.sends_as_ll(between, rules.environment, sizes, taken)
    return [
        Planned(
            "p2p", protocol, where, taken[where],
            p2p.send_parts(protocol, comm, reach, between, rules.time, sizes[where], taken[where], counted[where]),
        )
        for protocol, where in _by_protocol(ll)
    ]  # fmt: skip


def plan_exchange(
    comm: Communicator, reach: Reach, rules: Rules, sizes: np.ndarray, busiest_us_per_byte: float
) -> list[Planned]:
    """all_to_all, gather, scatter: ``sizes`` / ranks from each to each, with the fullest link given."""
    able = p2p.p2p_channels(comm, rules.selection, rules.environment)
    part = sizes / comm.ranks
    taken = p2p.send_channels(comm, able, part)
    usually = p2p.p2p_channels(usual(comm), rules.selection, rules.environment)
    counted = np.minimum(p2p.send_channels(comm, usually, part) * (comm.ranks - 1), usually.total)
    ll = p2p.sends_as_ll(comm.nodes > 1, rules.environment, part, taken)
    planned = []
    for protocol, where in _by_protocol(ll):
        parts = p2p.exchange_parts(
            protocol, comm, reach, rules.time, able, sizes[where], taken[where], counted[where], busiest_us_per_byte
        )
        launched = np.minimum(taken[where] * (comm.ranks - 1), able.total)
        planned.append(Planned("p2p", protocol, where, launched, parts))
    return planned


def _by_protocol(ll: np.ndarray) -> list[tuple[str, np.ndarray]]:
    split = (("ll", np.flatnonzero(ll)), ("simple", np.flatnonzero(~ll)))
    return [(protocol, where) for protocol, where in split if len(where)]
