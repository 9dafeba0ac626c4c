"""Numbers as people read them: with a unit and three to four significant digits."""

from __future__ import annotations

import math
from collections.abc import Collection

from echo_hooks.graph.problems import rank_ranges

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z")


def bytes_text(count: float) -> str:
    """1536 gives "1.50 KiB"; whole bytes stay whole."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit + 1 < len(_BINARY):
        value, unit = value / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{_digits(value)} {_BINARY[unit]}"


def decimal_text(value: float, unit: str) -> str:
    """Decimal prefix: (9.89e14, "FLOP/s") gives "989 TFLOP/s"."""
    prefix = 0
    while abs(value) >= 1000 and prefix + 1 < len(_DECIMAL):
        value, prefix = value / 1000, prefix + 1
    return f"{_digits(value)} {_DECIMAL[prefix]}{unit}"


def duration_text(milliseconds: float | None) -> str:
    """Milliseconds in the unit that suits them: "812 us", "12.3 ms", "4.56 s"; "unknown" for None."""
    if milliseconds is None or not math.isfinite(milliseconds):
        return "unknown"
    if abs(milliseconds) >= 10_000:
        return f"{_digits(milliseconds / 1e3)} s"
    if abs(milliseconds) >= 1 or milliseconds == 0:
        return f"{_digits(milliseconds)} ms"
    return f"{_digits(milliseconds * 1e3)} us"


def ranks_text(ranks: Collection[int]) -> str:
    """[3] gives "rank 3", [0, 1, 2] gives "ranks 0-2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"


def percent_text(share: float) -> str:
    """A share of 0 to 1; small ones are not rounded away."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def decimals_for(step_ms: float | None) -> int:
    """Decimal places for milliseconds in the tables of a step of this length."""
    if not step_ms or step_ms < 10:
        return 3
    return 2 if step_ms < 1000 else 1


def _digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
