"""Do all ranks make the same process groups? torch wants every new_group call of every rank, members or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_hooks.compose.agreement import rank_text
from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace


def unlike_groups(groups: GroupTable, roles: Sequence[Role], traces: Mapping[int, RankTrace]) -> Problem | None:
    """The first place at which ranks make different groups, in calls that all ranks must make alike and in one order.

    A communicator meets under the running number of its group: ranks that count differently meet in the wrong one, or
    wait for ever. Groups made with local synchronisation, or by splitting another, are named by their members and do
    not count. A rank that makes fewer groups is no mistake by itself: if it is missed, its calls are.
    """
    sequences = {role.traced_rank: [groups[g] for g in traces[role.traced_rank].created] for role in roles}
    for place in range(max((len(s) for s in sequences.values()), default=0)):
        made: dict[tuple[int, ...], list[Role]] = {}
        for role in roles:
            if place < len(sequences[role.traced_rank]):
                made.setdefault(sequences[role.traced_rank][place].ranks, []).append(role)
        if len(made) > 1:
            return _describe(place, made, sequences)
    return None


def _describe(
    place: int, made: Mapping[tuple[int, ...], list[Role]], sequences: Mapping[int, Sequence[Group]]
) -> Problem:
    parts, sites, ranks = [], [], []
    for members, roles in made.items():
        who = sorted(rank for role in roles for rank in role.ranks)
        site = sequences[roles[0].traced_rank][place].site
        verb = "makes" if len(who) == 1 else "make"
        parts.append(f"{rank_text(who)} {verb} one of {rank_text(members)} at {site or 'unknown line'}")
        sites.append(site)
        ranks += who
    text = (
        f"new_group call #{place} differs between the ranks: {', '.join(parts)}. All ranks must make the same calls in"
        " the same order, members or not; only with use_local_synchronization=True may the members make theirs alone"
    )
    return Problem("mismatch", text, tuple(sorted(ranks)), "; ".join(dict.fromkeys(s for s in sites if s)))
