"""The timeline composer: all ranks of a plan against each other on one clock."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from echo_hooks.compose.agreement import mismatches
from echo_hooks.compose.breakdown import breakdown
from echo_hooks.compose.costs import Costs, Network
from echo_hooks.compose.critical import critical_path, evidence_shares
from echo_hooks.compose.engine import State, run
from echo_hooks.compose.folding import Partition, World, build_world, fold, unfolded
from echo_hooks.compose.hangs import diagnose
from echo_hooks.compose.programs import SYNC, role_program
from echo_hooks.compose.result import Breakdown, Composition, CriticalPath, Timeline
from echo_hooks.compose.tables import Tables, build_tables
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace

BUFFERED_SEND_BYTES = 4 << 20
"""A send that fits NCCL's buffer may end before its recv begins: NCCL_BUFFSIZE, 4 MiB by default (NCCL documentation,
"Environment variables"). Nothing promises it, so a plan that needs it is flagged."""

__all__ = ["Breakdown", "Composition", "CriticalPath", "Timeline", "compose"]


def compose(
    world_size: int,
    groups: GroupTable,
    roles: list[Role],
    traces: dict[int, RankTrace],
    network: Network,
    *,
    accelerators_per_node: int,
    folded: bool = True,
    repeat: int = 2,
    host_launch_us: float = 0.0,
) -> Composition:
    """Simulate ``repeat`` copies of every rank's program back to back and measure the last.

    ``traces``: by traced rank, durations filled. ``host_launch_us``: host time of a kernel launch that the trace could
    not see. ``folded=False`` simulates every rank by itself; the times are the same.

    Step time. A copy is complete on a rank when its host has come to the end and its streams have run dry of the
    copy's work. With d(k) the completion of copy k, the period is the largest d(last) - d(first) of any rank over
    ``repeat`` - 1: the simulation is a max-plus linear map of one copy's completion times to the next one's, for which
    the largest difference bounds the true period from above and never grows with k (Baccelli et al., Synchronization
    and Linearity, 1992, chapter 3). It is exact as soon as the differences of all ranks agree.

    A plan that hangs or whose calls do not match gives ``problems`` and no timelines; one that would hang if no send
    were buffered gives a problem of kind "unsafe" beside its timelines.

    Raises UsageError for input that fits no simulation: roles that do not cover the world, kernels without duration.
    """
    began = time.perf_counter()
    if repeat < 2:
        raise UsageError(f"repeat is {repeat}; at least 2 copies are needed to measure a period")
    programs = []
    for role in roles:
        if role.traced_rank not in traces:
            raise UsageError(f"role {role.name!r}: rank {role.traced_rank} was not traced")
        programs.append(role_program(role, traces[role.traced_rank], groups))
    world = build_world(world_size, groups, programs)
    costs = Costs(network, accelerators_per_node)
    partition = fold(world, costs) if folded else unfolded(world)
    scale = np.ones(len(partition.representative))
    tables = build_tables(world, partition, costs, repeat, scale)
    problems = mismatches(world, partition, tables)
    if problems:
        return Composition(float("nan"), problems=problems, seconds=time.perf_counter() - began)
    state, finished = run(tables, repeat, host_launch_us)
    if not finished:
        problems = [diagnose(world, partition, tables, state)]
        tables = build_tables(world, partition, costs, repeat, scale, buffered_bytes=BUFFERED_SEND_BYTES)
        state, finished = run(tables, repeat, host_launch_us)
        if finished:
            problems = [_unsafe(problems[0])]
    if finished:
        composition = _composition(world, partition, tables, state, repeat, host_launch_us)
    else:
        composition = Composition(float("nan"))
    composition.problems = problems
    composition.seconds = time.perf_counter() - began
    return composition


def _unsafe(hang: Problem) -> Problem:
    text = f"completes only if sends of up to {BUFFERED_SEND_BYTES} bytes are buffered; without that, {hang.message}"
    return replace(hang, kind="unsafe", message=text)


def _composition(
    world: World, partition: Partition, tables: Tables, state: State, repeat: int, host_launch_us: float
) -> Composition:
    done = completions(world, partition, tables, state, repeat)
    origin = float(state.origin.min())
    timelines = []
    for c, ranks in enumerate(partition.ranks()):
        program = world.programs[world.role_of[ranks[0]]]
        period = float(done[c, -1] - done[c, 0]) / (repeat - 1)
        timelines.append(_timeline(world, tables, state, c, ranks, repeat, float(done[c, -1]), period, origin))
        timelines[-1].breakdown.step_us = period / program.steps
    steps = {p.steps for p in world.programs}
    if len(steps) > 1:
        raise UsageError(f"the ranks' programs hold different numbers of steps: {sorted(steps)}")
    path = critical_path(world, tables, state, repeat, host_launch_us, done)
    path.begin_us, path.end_us = path.begin_us - origin, path.end_us - origin
    return Composition(
        step_time_us=max(t.breakdown.step_us for t in timelines),
        timelines=timelines,
        critical=max(range(len(timelines)), key=lambda i: (_busy(timelines[i].breakdown), -i)),
        evidence=evidence_shares(world, tables, path),
        critical_path=path,
    )


def completions(world: World, partition: Partition, tables: Tables, state: State, repeat: int) -> np.ndarray:
    """When each copy is over, host and device: [classes, copies]."""
    done = np.zeros((len(partition.representative), repeat))
    for c, rank in enumerate(partition.representative.tolist()):
        n = world.programs[world.role_of[rank]].n
        first = int(tables.classes.instance0[c])
        for times in (state.issue, state.end):
            rows = times[first : first + n * repeat].reshape(repeat, n)
            done[c] = np.maximum(done[c], np.fmax.reduce(rows, axis=1, initial=0.0))
    return done


def _timeline(
    world: World,
    tables: Tables,
    state: State,
    c: int,
    ranks: np.ndarray,
    repeat: int,
    until: float,
    period: float,
    origin: float,
) -> Timeline:
    program = world.programs[world.role_of[ranks[0]]]
    n = program.n
    last = int(tables.classes.last0[c])
    instance = int(tables.classes.instance0[c]) + (repeat - 1) * n
    start, ready = state.start[last : last + n].copy(), state.ready[last : last + n].copy()
    issue, end = state.issue[instance : instance + n].copy(), state.end[instance : instance + n].copy()
    end[program.action == SYNC] = np.nan  # the engine keeps when the host went on there

    names: list[str] = []
    name_of_port = []
    for port in program.ports:
        name = world.groups[port.group].name
        if name not in names:
            names.append(name)
        name_of_port.append(names.index(name))
    name_of = np.full(n, -1, np.int64)
    name_of[program.call_record] = np.asarray(name_of_port, np.int64)[program.call_port] if names else -1
    parts = breakdown(program.program.kind, name_of, names, start, ready, end, until, period, program.steps)
    zero = float(state.origin[c])
    return Timeline(
        representative=int(ranks[0]),
        ranks=tuple(ranks.tolist()),
        role=program.role.name,
        program=program.program,
        issue_us=issue - zero,
        start_us=start - zero,
        ready_us=ready - zero,
        end_us=end - zero,
        slowdown=np.ones(n),
        breakdown=parts,
        offset_us=zero - origin,
    )


def _busy(parts: Breakdown) -> float:
    return parts.compute_us + sum(parts.exposed_communication_us.values()) + parts.host_us
