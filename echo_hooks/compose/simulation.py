"""One simulation of a world: do the calls agree, do the ranks come to their end, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.compose.agreement import mismatches
from echo_hooks.compose.costs import Costs
from echo_hooks.compose.engine import run
from echo_hooks.compose.fluid import run_fluid
from echo_hooks.compose.folding import Partition, fold, unfolded
from echo_hooks.compose.hangs import diagnose, unreceived
from echo_hooks.compose.interference import Overlap, build_interference
from echo_hooks.compose.links import find_links
from echo_hooks.compose.state import State
from echo_hooks.compose.tables import Tables, build_tables
from echo_hooks.compose.world import World
from echo_hooks.graph.problems import Problem

BUFFERED_SEND_BYTES = 4 << 20
"""A send that fits NCCL's buffer may end before its recv begins: NCCL_BUFFSIZE, 4 MiB by default (NCCL documentation,
"Environment variables"). Nothing promises it, so a plan that needs it is flagged."""


@dataclass
class Simulation:
    """``state`` is None when the plan does not run; ``problems`` says why, or what it runs by luck only."""

    world: World
    partition: Partition
    tables: Tables
    state: State | None
    problems: list[Problem]


def simulate(
    world: World,
    costs: Costs,
    *,
    folded: bool,
    repeat: int,
    host_launch_us: float = 0.0,
    kernel_scale: np.ndarray | None = None,
    overlap: Overlap | None = None,
    share_links: bool = False,
) -> Simulation:
    """``repeat`` copies of the world's programs, after their calls were compared; a hang is explained.

    Whether a plan comes to its end does not depend on how long things take, so the clock of changing rates is only
    started for plans that do.
    """
    links = find_links(world, costs) if share_links else None
    partition = fold(world, costs, kernel_scale, links) if folded else unfolded(world, links)
    scale = np.ones(world.world_size) if kernel_scale is None else kernel_scale
    scale = scale[partition.representative]
    tables = build_tables(world, partition, costs, repeat, scale)
    problems = mismatches(world, partition, tables)
    if problems:
        return Simulation(world, partition, tables, None, problems)
    state, finished = run(tables, repeat, host_launch_us)
    if not finished:
        problems = [diagnose(world, partition, tables, state)]
        tables = build_tables(world, partition, costs, repeat, scale, buffered_bytes=BUFFERED_SEND_BYTES)
        state, finished = run(tables, repeat, host_launch_us)
        if finished:
            lost = unreceived(world, partition, tables, state, repeat)
            problems = [_unsafe(problems[0]) if lost is None else lost]
            finished = lost is None
    if not finished:
        return Simulation(world, partition, tables, None, problems)
    interference = build_interference(world, partition, tables, costs, overlap, links)
    if interference.matters:
        state = run_fluid(tables, interference, repeat, host_launch_us)
    return Simulation(world, partition, tables, state, problems)


def _unsafe(hang: Problem) -> Problem:
    text = f"completes only if sends of up to {BUFFERED_SEND_BYTES} bytes are buffered; without that, {hang.message}"
    return replace(hang, kind="unsafe", message=text)
