"""Arithmetic of layouts: what divides what, and the nearest legal choice; one line beside a framework's error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from types import FrameType, TracebackType


def frames(error: BaseException) -> list[FrameType]:
    """The frames that ``error`` came through, the script's first."""
    found: list[FrameType] = []
    part: TracebackType | None = error.__traceback__
    while part is not None:
        found.append(part.tb_frame)
        part = part.tb_next
    return found


def divisors(number: int) -> list[int]:
    """All of them in order; of numbers as layouts have them (below some millions)."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(candidates: Iterable[int], to: int, most: int = 2) -> list[int]:
    """The nearest candidate below ``to`` and above it, in order."""
    below = [c for c in candidates if c < to]
    above = [c for c in candidates if c > to]
    return [*([max(below)] if below else []), *([min(above)] if above else [])][:most]


def choices(name: str, values: Iterable[int]) -> str:
    """ "PP 3 or PP 5"."""
    return " or ".join(f"{name} {value}" for value in values)


def product(factors: Mapping[str, int]) -> str:
    """ "TP 7 x PP 12 x CP 1 = 84"."""
    return f"{' x '.join(f'{name} {value}' for name, value in factors.items())} = {prod(factors.values())}"


def world_line(
    world: int, factors: Mapping[str, int], rest: str = "DP", sources: Mapping[str, str] | None = None
) -> str | None:
    """What is wrong with a world that is no multiple of its factors, and what would be right; None when it is one.

    ``rest``: name of the factor that takes what is left. ``sources``: where a factor comes from, such as "default".
    """
    size = prod(factors.values())
    if size < 1 or world % size == 0:
        return None
    told = {f"{name} ({sources[name]})" if sources and name in sources else name: v for name, v in factors.items()}
    legal = []
    for name, value in factors.items():
        others = size // value
        if value > 1 and world % others == 0:
            near = sorted(nearest(divisors(world // others), value), key=lambda d: max(d / value, value / d))
            legal += [
                f"{name} {d} ({world} = {' x '.join(f'{n} {d if n == name else v}' for n, v in factors.items())} x "
                f"{rest} {world // others // d})"
                for d in near[:1]
            ]
    worlds = [w for w in (world // size * size, (world // size + 1) * size) if w]
    legal = [*legal[:2], choices("world", worlds)]
    return f"world {world} is no multiple of {product(told)}; nearest legal: {', or '.join(legal)}"


def split_line(what: str, amount: int, name: str, parts: int, extra: str = "") -> str | None:
    """What is wrong where ``amount`` of ``what`` cannot be cut into ``parts``; None when it can."""
    if parts < 1 or amount < 1 or amount % parts == 0:
        return None
    legal = choices(name, nearest(divisors(amount), parts))
    multiples = [m for m in (amount // parts * parts, (amount // parts + 1) * parts) if m]
    options = [legal, f"{' or '.join(map(str, multiples))} {what}", *([extra] if extra else [])]
    return f"{amount} {what} / {name} {parts} = {amount / parts:.4g}, not whole; nearest legal: {', or '.join(options)}"


def uneven_stages(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage with a shorter (or longer) first and last one, as even as can be; None if there is none."""
    if stages < 2 or layers < stages:
        return None
    if stages == 2:
        return (layers // 2, layers - layers // 2)
    mean = layers / stages
    best: tuple[float, tuple[int, ...]] | None = None
    for middle in range(max(1, int(mean) - 1), int(mean) + 3):
        ends = layers - middle * (stages - 2)
        if ends < 2:
            continue
        first = ends // 2
        counts = (first, *[middle] * (stages - 2), ends - first)
        worst = max(abs(c - mean) for c in counts)
        if best is None or (worst, counts) < best:  # of equals the shorter ends, which carry embedding and loss
            best = worst, counts
    return best[1] if best else None
