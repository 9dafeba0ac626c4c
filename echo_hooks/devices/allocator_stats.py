"""The caching allocator's statistics, under the names of ``torch.cuda.memory_stats``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Stat:
    """Current value, peak, and sums of increases and decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount


_COUNTS = ("allocation", "segment", "inactive_split")
_SIZES = ("allocated_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes")
_NAMES = [(name, name) for name in _COUNTS + _SIZES] + [("active", "allocation"), ("active_bytes", "allocated_bytes")]
_PARTS = ("current", "peak", "allocated", "freed")


class Stats:
    """The statistics of one pool, or of all."""

    def __init__(self) -> None:
        for name in _COUNTS + _SIZES:
            setattr(self, name, Stat())

    def in_use(self, blocks: int, allocated: int, requested: int) -> None:
        self.allocation.add(blocks)
        self.allocated_bytes.add(allocated)
        self.requested_bytes.add(requested)

    allocation: Stat
    segment: Stat
    inactive_split: Stat
    allocated_bytes: Stat
    reserved_bytes: Stat
    requested_bytes: Stat
    inactive_split_bytes: Stat

    def __iter__(self) -> Iterator[Stat]:
        return (getattr(self, name) for name in _COUNTS + _SIZES)


def flat(pools: Mapping[str, Stats]) -> dict[str, int]:
    """ "allocated_bytes.all.current" and so on, of each pool by its name.

    Blocks in use on several streams are not modelled, so "active" equals "allocation". Oversize blocks exist only below
    a ``max_split_size``.
    """
    values: dict[str, int] = {}
    for name, source in _NAMES:
        for pool, stats in pools.items():
            stat = getattr(stats, source)
            for part in _PARTS:
                values[f"{name}.{pool}.{part}"] = getattr(stat, part)
    for name in ("oversize_allocations", "oversize_segments"):
        values.update({f"{name}.{part}": 0 for part in _PARTS})
    return values
