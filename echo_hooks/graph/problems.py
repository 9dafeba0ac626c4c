"""What is wrong with a plan: hangs, mismatches, memory; one record each, for people and machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """``kind``: "hang", "mismatch", "out_of_memory", "layout", "unsafe", "warning".

    ``message``: one or a few sentences naming ranks, call, group and source line. ``ranks``: global ranks concerned.
    ``site``: the user's source line(s), "; "-separated.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    site: str = ""


def rank_ranges(ranks) -> str:
    """Ranks as people write them: [0, 1, 2, 5] gives "0-2,5"; an even stride of three or more gives "0-88:8"."""
    ranks = sorted(set(ranks))
    if len(ranks) >= 3:
        stride = ranks[1] - ranks[0]
        if stride > 1 and all(b - a == stride for a, b in zip(ranks, ranks[1:])):
            return f"{ranks[0]}-{ranks[-1]}:{stride}"
    parts: list[str] = []
    start = None
    for i, rank in enumerate(ranks):
        if start is None:
            start = rank
        if i + 1 == len(ranks) or ranks[i + 1] != rank + 1:
            parts.append(str(start) if start == rank else f"{start}-{rank}")
            start = None
    return ",".join(parts)
