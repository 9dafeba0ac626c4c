"""Whether the steps that were traced communicate alike: a step that still differs from the next is no typical one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind, Program

_COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
_SHOWN = 3


def unsteady(
    program: Program, ops: list[OpSignature], groups: GroupTable, steps: Sequence[tuple[int, int]], first: int
) -> str | None:
    """One sentence about the first step of ``steps`` ([begin, end) of records) that communicates otherwise than the
    one before; None when all are alike. ``first``: number of the first step."""
    calls = [_calls(program, ops, groups, begin, end) for begin, end in steps]
    for number, (before, after) in enumerate(itertools.pairwise(calls), first + 1):
        if before == after:
            continue
        lost, new = before - after, after - before
        changes = [f"{n} {name} fewer" for name, n in _by_name(lost)] + [
            f"{n} {name} more" for name, n in _by_name(new)
        ]
        return (
            f"step {number} does not communicate as step {number - 1} does ({'; '.join(changes[:_SHOWN])}; sizes "
            f"counted apart): the script has not settled, --warmup-steps {number} or more would measure later steps"
        )
    return None


def _by_name(calls: Counter) -> list[tuple[str, int]]:
    names: Counter = Counter()
    for (name, group, _bytes, _peer), count in calls.items():
        names[f"{name} on {group}"] += count
    return sorted(names.items())


def _calls(program: Program, ops: list[OpSignature], groups: GroupTable, begin: int, end: int) -> Counter:
    records = begin + np.flatnonzero(np.isin(program.kind[begin:end], _COMMUNICATION))
    columns = (program.op, program.group, program.bytes, program.peer)
    rows = zip(*(column[records].tolist() for column in columns))
    return Counter((ops[op].name, groups[group].name, size, peer) for op, group, size, peer in rows)
