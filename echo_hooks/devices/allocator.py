"""PyTorch's caching allocator as arithmetic: which requests reuse cached memory, and how much the device must give.

The rules are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.9 to 2.14) with its
default settings, and with ``expandable_segments``. Addresses are invented, everything else is the same: rounding, two
pools, best fit, splitting, merging, release of cached segments under pressure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass

# c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
MIN_BLOCK_BYTES = 512  # kMinBlockSize: all sizes are rounded up to a multiple
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request served from the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer: small requests come out of segments of this size
LARGE_SEGMENT_BYTES = 20 << 20  # kLargeBuffer: so do requests between SMALL_BYTES and
MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc: from here on a segment is made to measure
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge: and rounded up to a multiple of this

# Distance between invented segments: larger than any device, and a whole number of steps of an expandable segment.
_ADDRESS_SPACE = LARGE_SEGMENT_BYTES << 22


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


class Block:
    """A piece of a segment; the handle that ``allocate`` returns and ``free`` takes."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "requested", "size", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, mapped: bool = True):
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.mapped = mapped
        self.allocated = False
        self.requested = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class _Stat:
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


class _Stats:
    """The statistics of one pool, or of all."""

    def __init__(self) -> None:
        for name in _COUNTS + _SIZES:
            setattr(self, name, _Stat())

    def in_use(self, blocks: int, allocated: int, requested: int) -> None:
        self.allocation.add(blocks)
        self.allocated_bytes.add(allocated)
        self.requested_bytes.add(requested)

    allocation: _Stat
    segment: _Stat
    inactive_split: _Stat
    allocated_bytes: _Stat
    reserved_bytes: _Stat
    requested_bytes: _Stat
    inactive_split_bytes: _Stat


class _Pool:
    """Small or large requests.

    ``free``: by stream, (size, address, block) of free blocks, in order: smallest first, then lowest address.
    ``unmapped``: by stream, (address, block) of the holes of expandable segments, in order.
    """

    def __init__(self, small: bool):
        self.small = small
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.stats = _Stats()
        # An expandable segment grows in steps of this size (ExpandableSegment, segment_size_).
        self.step = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES

    def insert(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]


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
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._all = _Stats()
        self._segments = 0
        self._device_calls = [0, 0]  # frees, allocations

    # ---- what callers do ----

    def allocate(self, bytes: int, stream: int = 0) -> Block:
        """Memory for ``bytes`` used first on ``stream``; give the result to ``free``. Amortised a few µs."""
        size = round_size(bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, stream, size) or self._new_block(pool, stream, size)
        was_split = block.prev is not None or block.next is not None
        remaining = block.size - size
        if remaining >= MIN_BLOCK_BYTES if pool.small or self.expandable_segments else remaining > SMALL_BYTES:
            block = self._split(block, size)
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
            if neighbour is not None and _mergeable(block, neighbour):
                pool.remove(neighbour)
                blocks, size = blocks - 1, size - neighbour.size
                _absorb(block, neighbour)
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
                        self._unmap(block)
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
        """Flat statistics under the names of ``torch.cuda.memory_stats`` ("allocated_bytes.all.current", ...).

        Blocks in use on several streams are not modelled, so "active" equals "allocation".
        """
        flat: dict[str, int] = {}
        names = [(name, name) for name in _COUNTS + _SIZES] + [
            ("active", "allocation"),
            ("active_bytes", "allocated_bytes"),
        ]
        pools = (("all", self._all), ("small_pool", self._small.stats), ("large_pool", self._large.stats))
        for name, source in names:
            for pool_name, stats in pools:
                stat = getattr(stats, source)
                for part in ("current", "peak", "allocated", "freed"):
                    flat[f"{name}.{pool_name}.{part}"] = getattr(stat, part)
        for name in ("oversize_allocations", "oversize_segments"):  # they exist only below a max_split_size
            flat.update({f"{name}.{part}": 0 for part in ("current", "peak", "allocated", "freed")})
        return flat | {
            "max_split_size": -1,
            "num_alloc_retries": self.retries,
            "num_ooms": 0 if self.exceeded is None else 1,
            "num_sync_all_streams": 0,
            "num_device_alloc": self._device_calls[True],
            "num_device_free": self._device_calls[False],
        }

    # ---- finding memory ----

    def _best_fit(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """get_free_block: the smallest free block that is large enough."""
        blocks = pool.free.get(stream)
        if not blocks:
            return None
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        if self.expandable_segments:  # the free end of a segment counts with all that it could grow to
            while at + 1 < len(blocks) and _reach(blocks[at + 1][2]) < _reach(blocks[at][2]):
                at += 1
        return blocks.pop(at)[2]

    def _new_block(self, pool: _Pool, stream: int, size: int) -> Block:
        """alloc_block: a new segment, or a longer expandable one."""
        if self.expandable_segments:
            return self._grow(pool, stream, size)
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

    def _split(self, block: Block, size: int) -> Block:
        """Cut the first ``size`` bytes off; returns that block, whose ``next`` is the rest."""
        front = Block(block.pool, block.stream, block.address, size, block.mapped)
        front.prev, front.next = block.prev, block
        if block.prev is not None:
            block.prev.next = front
        block.prev = front
        block.address += size
        block.size -= size
        return front

    # ---- expandable segments ----

    def _grow(self, pool: _Pool, stream: int, size: int) -> Block:
        """try_allocate_expandable_block: map memory at the lowest address that has room, using a free end before it."""
        candidate = self._room_to_grow(pool, stream, size)
        if self._make_room(_missing_bytes(candidate, size), size):  # unmapping may have moved the place to grow
            candidate = self._room_to_grow(pool, stream, size)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        while candidate.size < size:
            rest = candidate.next
            assert rest is not None
            candidate = self._map(rest, min(size - candidate.size, rest.size))
        pool.remove(candidate)
        return candidate

    def _room_to_grow(self, pool: _Pool, stream: int, size: int) -> Block:
        """find_expandable_block: an unmapped block, or the free block before it, with address space for ``size``."""
        for _, block in pool.unmapped.get(stream, []):
            if block.prev is not None and not block.prev.allocated:
                block = block.prev
            space, at = 0, block
            while space < size and at is not None and not at.allocated:
                space, at = space + at.size, at.next  # type: ignore[assignment]
            if space >= size:
                return block
        block = Block(pool, stream, self._new_address(), _ADDRESS_SPACE // 2, mapped=False)
        insort(pool.unmapped.setdefault(stream, []), (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Back the first ``size`` bytes of an unmapped block; returns it, merged with its free neighbours."""
        pool = block.pool
        size = _round_up(size, pool.step)
        unmapped = pool.unmapped[block.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]
        if size < block.size:
            rest, block = block, self._split(block, size)
            insort(unmapped, (rest.address, rest))
        block.mapped = True
        self._reserve(pool, size)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and _mergeable(block, neighbour):
                pool.remove(neighbour)
                _absorb(block, neighbour)
        pool.insert(block)
        return block

    def _unmap(self, block: Block) -> None:
        """unmap_block: return the whole steps inside a free block; what is left at its ends stays cached."""
        pool = block.pool
        step = pool.step
        start = _round_up(block.address, step)
        end = (block.address + block.size) // step * step
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            front = self._split(block, start - block.address)
            pool.insert(front)
        if end < block.address + block.size:
            middle = self._split(block, end - block.address)
            pool.insert(block)
            block = middle
        block.mapped = False
        self._reserve(pool, start - end)
        unmapped = pool.unmapped.setdefault(block.stream, [])
        for neighbour in (block.prev, block.next):
            if neighbour is not None and _mergeable(block, neighbour):
                del unmapped[bisect_left(unmapped, (neighbour.address,))]
                _absorb(block, neighbour)
        insort(unmapped, (block.address, block))

    # ---- bookkeeping ----

    def _new_address(self) -> int:
        self._segments += 1
        return self._segments * _ADDRESS_SPACE

    def _reserve(self, pool: _Pool, size: int) -> None:
        self._device_calls[size > 0] += 1
        for stats in (self._all, pool.stats):
            stats.reserved_bytes.add(size)
            if not self.expandable_segments:
                stats.segment.add(1 if size > 0 else -1)

    def _inactive(self, pool: _Pool, blocks: int, size: int) -> None:
        if self.expandable_segments:  # left out there in PyTorch too: whole steps of a segment can always be returned
            return
        for stats in (self._all, pool.stats):
            if blocks:
                stats.inactive_split.add(blocks)
            if size:
                stats.inactive_split_bytes.add(size)

    def _each_stat(self):
        for stats in (self._all, self._small.stats, self._large.stats):
            for name in _COUNTS + _SIZES:
                yield getattr(stats, name)


def round_size(bytes: int) -> int:
    """What a request takes: the next multiple of 512 B, at least 512 B (round_size)."""
    return max(_round_up(bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """What the device is asked for to serve a rounded request (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return _round_up(size, ROUND_LARGE_BYTES)


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


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def _mergeable(block: Block, neighbour: Block) -> bool:
    return not neighbour.allocated and neighbour.mapped == block.mapped


def _absorb(block: Block, neighbour: Block) -> None:
    """Make a free neighbour part of the block."""
    if block.prev is neighbour:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def _reach(block: Block) -> int:
    """Size that a free block of an expandable segment can grow to."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _missing_bytes(block: Block, size: int) -> int:
    """What must be mapped so that ``size`` bytes from this block on are backed."""
    missing, left, at = 0, size, block
    while left > 0:
        if not at.mapped:
            missing += _round_up(min(left, at.size), at.pool.step)
        left, at = left - at.size, at.next  # type: ignore[assignment]
    return missing


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
