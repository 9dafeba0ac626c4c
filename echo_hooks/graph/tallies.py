"""What each rank built of something the whole model has: counts over a pipeline must add up to what was configured."""

from __future__ import annotations

from collections.abc import Mapping

from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace

_PIPELINES = ("pp", "pipeline", "pipe")
"""Names of the groups whose members hold different parts of one model."""


def missing_parts(groups: GroupTable, roles: list[Role], traces: Mapping[int, RankTrace]) -> list[Problem]:
    """One problem for each kind of part of which a pipeline builds fewer than were configured.

    Ranks that were not traced count as the traced rank of their role. More than configured is no problem: a model may
    have two towers of one size.
    """
    of_rank = {rank: traces[role.traced_rank] for role in roles for rank in role.ranks if role.traced_rank in traces}
    pipelines: list[Group] = [group for group in groups if group.name in _PIPELINES]
    problems: dict[str, Problem] = {}
    for group in pipelines:
        stages = [of_rank.get(rank) for rank in group.ranks]
        names = {name for trace in stages if trace is not None for name in trace.tallies}
        for name in sorted(names - problems.keys()):
            counts = [trace.tallies.get(name, (0, 0)) if trace is not None else (0, 0) for trace in stages]
            built, configured = [n for n, _ in counts], max(total for _, total in counts)
            if sum(built) < configured and None not in stages:
                problems[name] = Problem(
                    "layout",
                    f"{sum(built)} {name} are built of {configured} configured: the stages of pipeline "
                    f"{list(group.ranks)} have {'/'.join(map(str, built))}",
                    group.ranks,
                )
    return list(problems.values())
