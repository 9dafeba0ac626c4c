"""--jitter, --slow-node and --slow-rank: what may differ from the modelled machine, checked and in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from echo_hooks.errors import UsageError
from echo_hooks.graph.problems import parse_rank_ranges

MAX_JITTER = 2.0
"""Beyond it a log-normal factor has a P90 of 13: a typing error, not a machine."""

JITTER_HELP = (
    "noise of single kernels: standard deviation of the logarithm of their duration, such as 0.05 or 5%% (default: 0)"
)
SLOW_NODE_HELP = (
    "NODE=FACTOR, nodes from 0: kernels there take FACTOR times as long, such as 3=1.1 or 0-2=1.05; repeatable"
)
OVERLAP_HELP = (
    "slowdown of kernels and communication that run together: a model of echo-sim overlap train, formula, or none"
    " for no slowdown (default: the model that comes with the accelerator, else the formula)"
)
SLOW_RANK_HELP = "RANK=FACTOR, the same for single ranks; repeatable"


def parse_jitter(text: str | None) -> float:
    """Sigma of the noise of single kernels: "0.05" and "5%" are the same. UsageError unless 0 to MAX_JITTER."""
    if text is None:
        return 0.0
    try:
        jitter = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        jitter = math.nan
    if not 0.0 <= jitter <= MAX_JITTER:
        raise UsageError(f"--jitter {text}: a number from 0 to {MAX_JITTER:g}, or a percentage, is needed")
    return jitter


def parse_slow(
    nodes: Iterable[str] | None, ranks: Iterable[str] | None, world_size: int, per_node: int
) -> dict[int, float]:
    """Factor on the kernel times by rank. ``nodes``, ``ranks``: "3=1.1", "0-2=1.05"; a rank's own factor multiplies its
    node's. UsageError names the part that is wrong."""
    slow: dict[int, float] = {}
    for option, texts, count, width in (
        ("--slow-node", nodes, -(-world_size // per_node), per_node),
        ("--slow-rank", ranks, world_size, 1),
    ):
        for text in texts or ():
            where, factor = _split(option, text)
            for number in where:
                if number >= count:
                    raise UsageError(f"{option} {text}: {number} is outside 0 to {count - 1}")
                for rank in range(number * width, min((number + 1) * width, world_size)):
                    slow[rank] = slow.get(rank, 1.0) * factor
    return slow


def _split(option: str, text: str) -> tuple[tuple[int, ...], float]:
    where, equals, value = text.partition("=")
    try:
        factor = float(value) if equals else math.nan
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0.0):
        raise UsageError(f"{option} {text}: NUMBER=FACTOR with a factor above 0 is needed, such as 3=1.1")
    try:
        return parse_rank_ranges(where), factor
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None
