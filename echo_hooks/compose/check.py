"""Whether the ranks' whole programs fit together, set-up and warm-up included; how long they take plays no part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echo_hooks.compose.costs import Costs
from echo_hooks.compose.creation import unlike_groups
from echo_hooks.compose.programs import role_program
from echo_hooks.compose.simulation import simulate
from echo_hooks.compose.world import build_world
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace


def check(world_size: int, groups: GroupTable, roles: list[Role], traces: dict[int, RankTrace]) -> list[Problem]:
    """Mismatched or unfinished communication anywhere in the programs, as problems; empty when all of it completes.

    The measured steps alone would not show a rank that makes another call while the job is being set up.
    """
    of_role = [traces[role.traced_rank] for role in roles]
    if not all(len(trace.prologue) + len(trace.program) for trace in of_role):
        return []  # a rank that recorded nothing at all: there is nothing to compare
    unlike = unlike_groups(groups, roles, traces)
    if unlike is not None:
        return [unlike]
    programs = [role_program(role, trace, groups, timed=False) for role, trace in zip(roles, of_role)]
    costs = Costs(_Instant(), accelerators_per_node=1)
    return simulate(build_world(world_size, groups, programs), costs, folded=True, repeat=1).problems


@dataclass(frozen=True)
class _Cost:
    duration_us: float = 0.0


class _Instant:
    """A network on which every call takes no time."""

    def collective(self, *args: Any, **kwargs: Any) -> _Cost:
        return _Cost()

    def point_to_point(self, *args: Any, **kwargs: Any) -> _Cost:
        return _Cost()
