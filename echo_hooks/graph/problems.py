"""What is wrong with a plan: hangs, mismatches, memory; one record each, for people and machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

BROKEN_PLAN = ("hang", "mismatch", "out_of_memory", "layout")
"""Kinds of problem with which a job would not get through its step."""


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
        if stride > 1 and all(b - a == stride for a, b in pairwise(ranks)):
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


def parse_rank_ranges(text: str) -> tuple[int, ...]:
    """What rank_ranges writes, in the order given: "5,0-2" gives (5, 0, 1, 2), "0-88:8" every eighth.

    Raises ValueError that names the part which is no rank, no range, or was named before.
    """
    ranks: dict[int, None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?\s*", part, re.ASCII)
        first, last, stride = (int(n) if n else None for n in found.groups()) if found else (None, None, None)
        if first is None or stride == 0 or (last is not None and last < first):
            raise ValueError(f'{part!r} is no rank, no "FIRST-LAST" and no "FIRST-LAST:STRIDE"')
        span = range(first, (first if last is None else last) + 1, stride or 1)
        if not ranks.keys().isdisjoint(span):
            raise ValueError(f"{part!r} names a rank twice")
        ranks.update(dict.fromkeys(span))
    return tuple(ranks)
