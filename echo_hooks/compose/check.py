"""Whether the ranks' whole programs fit together, set-up and warm-up included; how long they take plays no part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.compose.agreement import mismatches
from echo_hooks.compose.costs import Costs
from echo_hooks.compose.engine import run
from echo_hooks.compose.folding import build_world, fold
from echo_hooks.compose.hangs import diagnose
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.tables import build_tables
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace


def check(world_size: int, groups: GroupTable, roles: list[Role], traces: dict[int, RankTrace]) -> list[Problem]:
    """Mismatched or unfinished communication anywhere in the programs, as problems; empty when all of it completes.

    The measured steps alone would not show a rank that makes another call while the job is being set up.
    """
    timeless = {rank: _timeless(trace) for rank, trace in traces.items() if len(trace.prologue) + len(trace.program)}
    if len(timeless) < len(roles):
        return []  # a rank that recorded nothing at all: there is nothing to compare
    programs = [role_program(role, timeless[role.traced_rank], groups) for role in roles]
    world = build_world(world_size, groups, programs)
    costs = Costs(_Instant(), accelerators_per_node=1)
    partition = fold(world, costs)
    tables = build_tables(world, partition, costs, 1, np.ones(len(partition.representative)))
    found = mismatches(world, partition, tables)
    if found:
        return found
    state, finished = run(tables, 1, 0.0)
    return [] if finished else [diagnose(world, partition, tables, state)]


@dataclass(frozen=True)
class _Cost:
    duration_us: float = 1.0
    evidence: str = "modelled"


class _Instant:
    """A network on which every call takes one microsecond."""

    def collective(self, *_args, **_kwargs) -> _Cost:
        return _Cost()

    def point_to_point(self, *_args, **_kwargs) -> _Cost:
        return _Cost()


def _timeless(trace: RankTrace) -> RankTrace:
    program = trace.whole()
    local = (program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY)
    program.columns["duration_us"] = np.where(local, 0.0, np.nan)
    program.columns["host_us"] = np.zeros(len(program))
    return replace(trace, program=program, prologue=program.slice(0, 0), steps=1)
