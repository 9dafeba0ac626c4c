"""What may differ from the modelled machine: --jitter, --slow-node, --slow-rank, --host-speed, --moe-skew; checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
MOE_SKEW_HELP = (
    "load of experts: hot=FACTOR, the first of each layer chosen FACTOR times as often as the mean, or sampled, each"
    " token drawing its experts at random; a balanced run is made beside it (default: balanced alone)"
)


@dataclass(frozen=True)
class MoeSkew:
    """``hot``: load of the first expert over the mean; ``sampled``: experts drawn at random. ``text``: as given."""

    hot: float = 1.0
    sampled: bool = False
    text: str = ""


def parse_moe_skew(text: str | None) -> MoeSkew:
    """ "hot=2.0", "sampled" or None, balanced. UsageError for another word or a factor below 1."""
    if text is None:
        return MoeSkew()
    if text == "sampled":
        return MoeSkew(sampled=True, text=text)
    name, _, value = text.partition("=")
    try:
        hot = float(value) if name == "hot" else math.nan
    except ValueError:
        hot = math.nan
    if not (math.isfinite(hot) and hot >= 1.0):
        raise UsageError(f"--moe-skew {text}: hot=FACTOR with a factor from 1, such as hot=2.0, or sampled is needed")
    return MoeSkew(hot=hot, text=text)


HOST_SPEED_HELP = (
    "how many times as fast as this machine's processor the target's runs the script's host code, such as 1.2 or 0.8 "
    "(default: as the host on which the accelerator's profile was recorded, where there is one; else 1)"
)
HOST_SPEEDS = (0.01, 100.0)
"""Beyond it a factor is a typing error."""


def parse_host_speed(text: str | None) -> float | None:
    """None where nothing is asked for. UsageError unless a number within HOST_SPEEDS."""
    if text is None:
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    low, high = HOST_SPEEDS
    if not low <= factor <= high:
        raise UsageError(f"--host-speed {text}: a factor from {low:g} to {high:g} is needed, such as 1.2")
    return factor


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
