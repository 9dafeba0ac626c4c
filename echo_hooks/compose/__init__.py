"""The timeline composer: all ranks of a plan against each other on one clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.compose.agreement import mismatches
from echo_hooks.compose.costs import Costs, FreeNetwork, Network
from echo_hooks.compose.engine import State, run
from echo_hooks.compose.folding import Partition, World, build_world, fold, unfolded
from echo_hooks.compose.hangs import diagnose
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.result import Breakdown, Composition, CriticalPath, Timeline
from echo_hooks.compose.tables import Tables, build_tables
from echo_hooks.compose.timelines import measure
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Kind
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

    What the ranks did before the first step (``RankTrace.prologue``) is checked with the steps, but takes no time. A
    plan that hangs or whose calls do not match gives ``problems`` and no timelines, and so does one without steps; one
    that would hang if no send were buffered gives a problem of kind "unsafe" beside its timelines.

    Raises UsageError for input that fits no simulation: roles that do not cover the world, kernels without duration.
    """
    began = time.perf_counter()
    if repeat < 2:
        raise UsageError(f"repeat is {repeat}; at least 2 copies are needed to measure a period")
    for role in roles:
        if role.traced_rank not in traces:
            raise UsageError(f"role {role.name!r}: rank {role.traced_rank} was not traced")
    problems: list[Problem] = []
    composition = Composition(float("nan"))
    without_steps = any(not len(traces[role.traced_rank].program) for role in roles)
    if without_steps or any(_communicates(traces[role.traced_rank]) for role in roles):
        programs = [role_program(role, traces[role.traced_rank], groups, timed=False) for role in roles]
        free = Costs(FreeNetwork(), accelerators_per_node)
        problems = _simulate(build_world(world_size, groups, programs), free, folded, 1, 0.0).problems
    if not without_steps and all(problem.kind == "unsafe" for problem in problems):
        programs = [role_program(role, traces[role.traced_rank], groups) for role in roles]
        costs = Costs(network, accelerators_per_node)
        done = _simulate(build_world(world_size, groups, programs), costs, folded, repeat, host_launch_us)
        problems = problems or done.problems
        if done.state is not None:
            composition = measure(done.world, done.partition, done.tables, done.state, repeat, host_launch_us)
    composition.problems = problems
    composition.seconds = time.perf_counter() - began
    return composition


def _communicates(trace: RankTrace) -> bool:
    """Whether anything before the first step could hang."""
    return bool(np.isin(trace.prologue.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)).any())


@dataclass
class _Simulation:
    """``state`` is None when the plan does not run."""

    world: World
    partition: Partition
    tables: Tables
    state: State | None
    problems: list[Problem]


def _simulate(world: World, costs: Costs, folded: bool, repeat: int, host_launch_us: float) -> _Simulation:
    partition = fold(world, costs) if folded else unfolded(world)
    scale = np.ones(len(partition.representative))
    tables = build_tables(world, partition, costs, repeat, scale)
    problems = mismatches(world, partition, tables)
    if problems:
        return _Simulation(world, partition, tables, None, problems)
    state, finished = run(tables, repeat, host_launch_us)
    if not finished:
        problems = [diagnose(world, partition, tables, state)]
        tables = build_tables(world, partition, costs, repeat, scale, buffered_bytes=BUFFERED_SEND_BYTES)
        state, finished = run(tables, repeat, host_launch_us)
        if finished:
            problems = [_unsafe(problems[0])]
    return _Simulation(world, partition, tables, state if finished else None, problems)


def _unsafe(hang: Problem) -> Problem:
    text = f"completes only if sends of up to {BUFFERED_SEND_BYTES} bytes are buffered; without that, {hang.message}"
    return replace(hang, kind="unsafe", message=text)
