"""One simulation of a world: do the calls agree, do the ranks come to their end, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.compose.agreement import mismatches
from echo_hooks.compose.costs import Costs
from echo_hooks.compose.engine import State, run
from echo_hooks.compose.folding import Partition, World, fold, unfolded
from echo_hooks.compose.hangs import diagnose
from echo_hooks.compose.tables import Tables, build_tables
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


def simulate(world: World, costs: Costs, folded: bool, repeat: int, host_launch_us: float) -> Simulation:
    """``repeat`` copies of the world's programs, after their calls were compared; a hang is explained."""
    partition = fold(world, costs) if folded else unfolded(world)
    scale = np.ones(len(partition.representative))
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
            problems = [_unsafe(problems[0])]
    return Simulation(world, partition, tables, state if finished else None, problems)


def _unsafe(hang: Problem) -> Problem:
    text = f"completes only if sends of up to {BUFFERED_SEND_BYTES} bytes are buffered; without that, {hang.message}"
    return replace(hang, kind="unsafe", message=text)
