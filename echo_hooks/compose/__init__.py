"""The timeline composer: all ranks of a plan against each other on one clock."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from echo_hooks.compose.check import check
from echo_hooks.compose.concurrency import communicators_at_once
from echo_hooks.compose.costs import Costs, Network
from echo_hooks.compose.folding import unfolded
from echo_hooks.compose.interference import Overlap
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.result import Band, Breakdown, Composition, CriticalPath, Timeline
from echo_hooks.compose.simulation import Simulation, simulate
from echo_hooks.compose.tables import build_tables
from echo_hooks.compose.timelines import measure
from echo_hooks.compose.variability import NOISY_RECORDS, Variability, band
from echo_hooks.compose.world import build_world
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace

__all__ = ["Band", "Breakdown", "Composition", "CriticalPath", "Timeline", "Variability", "check", "compose"]


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
    slow_ranks: Mapping[int, float] | None = None,
    overlap: Overlap | None = None,
    share_links: bool = True,
    variability: Variability | None = None,
    slack: bool = False,
) -> Composition:
    """Simulate ``repeat`` copies of every rank's program back to back and measure the last.

    ``traces``: by traced rank, durations filled. ``host_launch_us``: host time of a kernel launch that the trace could
    not see. ``folded=False`` simulates every rank by itself; the times are the same. ``slow_ranks``: factor on the
    kernel times of a rank (1.1: ten percent slower). ``overlap``: how much kernels and communication slow each other
    down. ``share_links``: operations that load one link of the network share it max-min fairly. ``variability``: how
    to find the band of the step time; None for no band. ``slack``: work out every record's slack too (in worlds of up
    to ``slack.MOST_RECORDS`` records).

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
    if without_steps or any(len(traces[role.traced_rank].prologue) for role in roles):
        problems = check(world_size, groups, roles, traces)
    if not without_steps and all(problem.kind == "unsafe" for problem in problems):
        programs = [role_program(role, traces[role.traced_rank], groups) for role in roles]
        costs = Costs(network, accelerators_per_node)
        scales = _scales(world_size, slow_ranks)
        done = simulate(
            build_world(world_size, groups, programs),
            costs,
            folded=folded,
            repeat=repeat,
            host_launch_us=host_launch_us,
            kernel_scale=scales,
            overlap=overlap,
            share_links=share_links,
        )
        problems = problems or done.problems
        if done.state is not None:
            composition = measure(done.world, done.partition, done.tables, done.state, repeat, host_launch_us, slack)
            at_once = communicators_at_once(composition.timelines, groups)
            composition.notes = [at_once] if at_once else []
            if variability is not None:
                composition.band = _band(done, costs, repeat, host_launch_us, scales, composition, variability)
    composition.problems = problems
    composition.seconds = time.perf_counter() - began
    return composition


def _band(
    done: Simulation,
    costs: Costs,
    repeat: int,
    host_launch_us: float,
    scales: np.ndarray | None,
    composition: Composition,
    variability: Variability,
) -> Band | None:
    """The band, on every rank by itself where noise is wanted and the world is small enough for it."""
    world, partition, tables = done.world, done.partition, done.tables
    records = repeat * int(np.asarray([p.n for p in world.programs])[world.role_of].sum())
    if variability.jitter > 0.0 and records <= NOISY_RECORDS and not done.problems:
        partition = unfolded(world)
        tables = build_tables(world, partition, costs, repeat, np.ones(world.world_size) if scales is None else scales)
    return band(world, partition, tables, repeat, host_launch_us, composition.step_time_us, variability)


def _scales(world_size: int, slow_ranks: Mapping[int, float] | None) -> np.ndarray | None:
    if not slow_ranks:
        return None
    scales = np.ones(world_size)
    for rank, factor in slow_ranks.items():
        if not 0 <= rank < world_size:
            raise UsageError(f"slow rank {rank} is outside the world of {world_size}")
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(f"slow rank {rank}: factor {factor} should be a number above 0")
        scales[rank] = factor
    return scales
