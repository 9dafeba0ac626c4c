"""PyTorch's caching allocator as arithmetic: which requests reuse cached memory, and how much the device must give.

The rules are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.9 to 2.14) with its
default settings, and with ``expandable_segments``. Addresses are invented, everything else is the same: rounding, two
pools, best fit, splitting, merging, release of cached segments under pressure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from echo_hooks.devices.allocator_blocks import (
    ADDRESS_SPACE,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    Block,
    Pool,
    absorb,
    mergeable,
    round_size,
    segment_size,
    split,
)
from echo_hooks.devices.allocator_stats import Stat, Stats, flat
from echo_hooks.devices.expandable_segments import ExpandableSegments, reach


@dataclass(frozen=True)
class Exceeded:
    """The first time that the device could not give what was asked, after all cached memory had been returned."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        return (
            f"{_gib(self.requested_bytes)} asked for with {_gib(self.allocated_bytes)} allocated and "
            f"{_gib(self.reserved_bytes)} reserved of {_gib(self.capacity_bytes)}"
        )


class CachingAllocator:
    """What ``torch.cuda`` would have allocated and reserved on a device of ``capacity_bytes``.

    It never fails for lack of memory: ``exceeded`` remembers the first time that it would have, and it goes on as if
    the device were larger.
    """

    def __init__(self, capacity_bytes: int, expandable_segments: bool = False):
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.exceeded: Exceeded | None = None
        self.retries = 0  # num_alloc_retries: how often cached memory had to be returned to serve a request
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._all = Stats()
        self._segments = 0
        self._device_calls = [0, 0]  # frees, allocations
        self._expandable = ExpandableSegments(self._new_address, self._reserve, self._make_room)

    # ---- what callers do ----

    def allocate(self, bytes: int, stream: int = 0) -> Block:
        """Memory for ``bytes`` used first on ``stream``; give the result to ``free``. Amortised a few µs."""
        size = round_size(bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, stream, size) or self._new_block(pool, stream, size)
        was_split = block.prev is not None or block.next is not None
        remaining = block.size - size
        if remaining >= MIN_BLOCK_BYTES if pool.small or self.expandable_segments else remaining > SMALL_BYTES:
            block = split(block, size)
            pool.insert(block.next)  # type: ignore[arg-type]
            self._inactive(pool, 0 if was_split else 1, -size if was_split else remaining)
        elif was_split:
            self._inactive(pool, -1, -block.size)
        block.allocated, block.requested = True, bytes
        self._all.in_use(1, block.size, bytes)
        pool.stats.in_use(1, block.size, bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool; neighbours that are free become one block with it.

        Raises ValueError when the block is not allocated.
        """
        if not block.allocated:
            raise ValueError(f"block at {block.address:#x} is not allocated (freed twice?)")
        pool = block.pool
        block.allocated = False
        self._all.in_use(-1, -block.size, -block.requested)
        pool.stats.in_use(-1, -block.size, -block.requested)
        blocks, size = 0, 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and mergeable(block, neighbour):
                pool.remove(neighbour)
                blocks, size = blocks - 1, size - neighbour.size
                absorb(block, neighbour)
        pool.insert(block)
        if block.is_split:
            blocks, size = blocks + 1, size + block.size
        self._inactive(pool, blocks, size)

    def empty_cache(self) -> None:
        """Return to the device every segment (expandable: every step of one) that holds no allocated block."""
        for pool in (self._small, self._large):
            for blocks in list(pool.free.values()):
                for _, _, block in list(blocks):
                    if self.expandable_segments:
                        self._expandable.unmap(block)
                    elif not block.is_split:
                        pool.remove(block)
                        self._reserve(pool, -block.size)

    # ---- what callers ask ----

    @property
    def allocated_bytes(self) -> int:
        return self._all.allocated_bytes.current

    @property
    def reserved_bytes(self) -> int:
        return self._all.reserved_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        return self._all.allocated_bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        return self._all.reserved_bytes.peak

    def reset_peak(self) -> None:
        """Peaks start again from the current values."""
        for stat in self._each_stat():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """Sums of allocations and frees, and the number of retries, start again from zero."""
        for stat in self._each_stat():
            stat.allocated = stat.freed = 0
        self.retries = 0
        self._device_calls = [0, 0]

    def stats(self) -> dict[str, int]:
        """Flat statistics under the names of ``torch.cuda.memory_stats`` ("allocated_bytes.all.current", ...)."""
        pools = {"all": self._all, "small_pool": self._small.stats, "large_pool": self._large.stats}
        return flat(pools) | {
            "max_split_size": -1,
            "num_alloc_retries": self.retries,
            "num_ooms": 0 if self.exceeded is None else 1,
            "num_sync_all_streams": 0,
            "num_device_alloc": self._device_calls[True],
            "num_device_free": self._device_calls[False],
        }

    # ---- finding memory ----

    def _best_fit(self, pool: Pool, stream: int, size: int) -> Block | None:
        """get_free_block: the smallest free block that is large enough."""
        blocks = pool.free.get(stream)
        if not blocks:
            return None
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        if self.expandable_segments:  # the free end of a segment counts with all that it could grow to
            while at + 1 < len(blocks) and reach(blocks[at + 1][2]) < reach(blocks[at][2]):
                at += 1
        return blocks.pop(at)[2]

    def _new_block(self, pool: Pool, stream: int, size: int) -> Block:
        """alloc_block: a new segment, or a longer expandable one."""
        if self.expandable_segments:
            return self._expandable.grow(pool, stream, size)
        segment_bytes = segment_size(size)
        self._make_room(segment_bytes, size)
        self._reserve(pool, segment_bytes)
        return Block(pool, stream, self._new_address(), segment_bytes)

    def _make_room(self, more: int, requested: int) -> bool:
        """Return cached memory when the device lacks ``more`` bytes; True when something was returned."""
        if self.reserved_bytes + more <= self.capacity_bytes:
            return False
        before = self.reserved_bytes
        self.empty_cache()
        self.retries += 1
        if self.exceeded is None and self.reserved_bytes + more > self.capacity_bytes:
            self.exceeded = Exceeded(requested, self.allocated_bytes, self.reserved_bytes, self.capacity_bytes)
        return self.reserved_bytes < before

    # ---- bookkeeping ----

    def _new_address(self) -> int:
        self._segments += 1
        return self._segments * ADDRESS_SPACE

    def _reserve(self, pool: Pool, size: int) -> None:
        self._device_calls[size > 0] += 1
        for stats in (self._all, pool.stats):
            stats.reserved_bytes.add(size)
            if not self.expandable_segments:
                stats.segment.add(1 if size > 0 else -1)

    def _inactive(self, pool: Pool, blocks: int, size: int) -> None:
        if self.expandable_segments:  # left out there in PyTorch too: whole steps of a segment can always be returned
            return
        for stats in (self._all, pool.stats):
            if blocks:
                stats.inactive_split.add(blocks)
            if size:
                stats.inactive_split_bytes.add(size)

    def _each_stat(self) -> Iterator[Stat]:
        return chain(self._all, self._small.stats, self._large.stats)


def allocator_settings(environ: Mapping[str, str]) -> tuple[bool, list[str]]:
    """(expandable_segments, names of settings that are not modelled) from the environment.

    ``PYTORCH_ALLOC_CONF`` wins over ``PYTORCH_CUDA_ALLOC_CONF``, its older name.
    """
    text = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    expandable, ignored = False, []
    for setting in text.split(","):
        name, _, value = (part.strip() for part in setting.partition(":"))
        if name == "expandable_segments":
            expandable = value.lower() == "true"
        elif name and ":" in setting:
            ignored.append(name)
    return expandable, ignored


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
