"""Quantities as people write them ("3.35 TB/s", "80 GB", "1.9 us"), turned into numbers of one unit per dimension."""

from __future__ import annotations

import math
import re

from echo_hooks.errors import UsageError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _with_prefixes(unit: str, scale: float, prefixes: dict[str, float]) -> dict[str, float]:
    return {prefix + unit: factor * scale for prefix, factor in prefixes.items()}


_BYTES = _with_prefixes("B", 1.0, _DECIMAL | _BINARY)
_BITS = _with_prefixes("b", 1 / 8, _DECIMAL) | _with_prefixes("bit", 1 / 8, _DECIMAL)

# By dimension: what its numbers are in, examples for messages, and the factor of each unit.
_DIMENSIONS: dict[str, tuple[str, str, dict[str, float]]] = {
    "bandwidth": (
        "bytes/s",
        '"400 Gb/s" (bits) or "3.35 TB/s" (bytes)',
        {f"{u}/s": f for u, f in (_BYTES | _BITS).items()},
    ),
    "bytes": ("bytes", '"80 GB" or "4 MiB"', _BYTES),
    "time": ("microseconds", '"1.9 us"', {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}),
    "flops": (
        "FLOP/s",
        '"989 TFLOP/s"',
        _with_prefixes("FLOP/s", 1.0, _DECIMAL) | _with_prefixes("OP/s", 1.0, _DECIMAL),
    ),
    "frequency": ("Hz", '"1.98 GHz"', _with_prefixes("Hz", 1.0, _DECIMAL)),
}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*(\S*)\s*", re.ASCII)
_MAX_LENGTH = 64


def parse_quantity(text: str, dimension: str) -> float:
    """The number that ``text`` says, in the unit of ``dimension``.

    ``dimension``: "bandwidth" (bytes/s), "bytes", "time" (microseconds), "flops" (FLOP/s) or "frequency" (Hz).
    "Gb" is 10^9 bits, "GB" 10^9 bytes, "GiB" 2^30 bytes; prefixes and units are told apart by case.

    Raises UsageError for a bare number, a negative or infinite one, and a unit of another dimension.
    """
    unit_name, examples, factors = _DIMENSIONS[dimension]
    if not isinstance(text, str):
        raise UsageError(f"{text!r} says no unit; a {dimension} is written like {examples}")
    found = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if found is None:
        raise UsageError(f"{text[:_MAX_LENGTH]!r} is no quantity; a {dimension} is written like {examples}")
    number, unit = found.groups()
    if not unit:
        raise UsageError(f"{text!r} says no unit; a {dimension} is written like {examples}")
    factor = factors.get(unit)
    if factor is None:
        raise UsageError(f"{text!r}: {unit!r} is no unit of {dimension} ({unit_name}); write it like {examples}")
    value = float(number) * factor
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is too large for a {dimension}")
    return value
