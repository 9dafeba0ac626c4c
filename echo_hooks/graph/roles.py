"""Roles: which ranks run the same program, and how a role's traced program becomes any member's."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_hooks.graph.groups import Group, GroupTable


@dataclass
class MemorySummary:
    """Peak device memory of one rank, in bytes.

    ``held_at_peak``: bytes by holder ("parameters", "gradients", "optimizer", "activations", "communication",
    "other") at the moment of the allocated peak. ``extra``: what no tensor holds, by name ("context",
    "communicators", "workspace"). ``host_peak_bytes``: what large CPU tensors and page-locked memory take of the host
    at most; ``host_pinned_bytes``: page-locked in the end. 0 where nothing is known of them.
    """

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    held_at_peak: dict[str, int] = field(default_factory=dict)
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    host_peak_bytes: int = 0
    host_pinned_bytes: int = 0


@dataclass
class Role:
    """Ranks that run one program, that of ``traced_rank``.

    ``proven``: ranks traced and found equal; the rest of ``ranks`` is assumed equal, for the reason ``why``.
    """

    name: str
    traced_rank: int
    ranks: tuple[int, ...]
    proven: tuple[int, ...]
    why: str = ""
    memory: MemorySummary = field(default_factory=MemorySummary)


def group_for(groups: GroupTable, group: Group, rank: int) -> Group:
    """The group that ``rank`` uses where the traced rank of its role uses ``group``.

    That is the group of the same family that has ``rank`` as a member; ``group`` itself when it has.
    Raises ValueError when the family has none: the ranks cannot be in one role.
    """
    if rank in group.ranks:
        return group
    found = groups.of_rank(group.family, rank)
    if found is None:
        raise ValueError(f"rank {rank} is in no group of the family of group {group.index} ({group.name})")
    return found


def peer_for(group: Group, peer: int, mapped: Group) -> int:
    """Global rank in ``mapped`` at the place that ``peer`` has in ``group``; -1 stays -1."""
    return peer if peer < 0 or mapped is group else mapped.ranks[group.position(peer)]
