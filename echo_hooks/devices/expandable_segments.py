"""Expandable segments: one range of addresses per pool and stream, backed with memory as it is needed.

The rules are those of ``ExpandableSegment`` in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from echo_hooks.devices.allocator_blocks import ADDRESS_SPACE, Block, Pool, absorb, mergeable, round_up, split


class ExpandableSegments:
    """Grows and shrinks the segments of a caching allocator.

    ``new_address()``: where a new segment starts. ``reserve(pool, bytes)``: so much more (or less) memory is backed.
    ``make_room(bytes, requested)``: returns cached memory where the device lacks so much; True when it returned some.
    """

    def __init__(
        self,
        new_address: Callable[[], int],
        reserve: Callable[[Pool, int], None],
        make_room: Callable[[int, int], bool],
    ):
        self._new_address = new_address
        self._reserve = reserve
        self._make_room = make_room

    def grow(self, pool: Pool, stream: int, size: int) -> Block:
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

    def _room_to_grow(self, pool: Pool, stream: int, size: int) -> Block:
        """find_expandable_block: an unmapped block, or the free block before it, with address space for ``size``."""
        for _, block in pool.unmapped.get(stream, []):
            if block.prev is not None and not block.prev.allocated:
                block = block.prev
            space, at = 0, block
            while space < size and at is not None and not at.allocated:
                space, at = space + at.size, at.next  # type: ignore[assignment]
            if space >= size:
                return block
        block = Block(pool, stream, self._new_address(), ADDRESS_SPACE // 2, mapped=False)
        insort(pool.unmapped.setdefault(stream, []), (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Back the first ``size`` bytes of an unmapped block; returns it, merged with its free neighbours."""
        pool = block.pool
        size = round_up(size, pool.step)
        unmapped = pool.unmapped[block.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]
        if size < block.size:
            rest, block = block, split(block, size)
            insort(unmapped, (rest.address, rest))
        block.mapped = True
        self._reserve(pool, size)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and mergeable(block, neighbour):
                pool.remove(neighbour)
                absorb(block, neighbour)
        pool.insert(block)
        return block

    def unmap(self, block: Block) -> None:
        """unmap_block: return the whole steps inside a free block; what is left at its ends stays cached."""
        pool = block.pool
        step = pool.step
        start = round_up(block.address, step)
        end = (block.address + block.size) // step * step
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            front = split(block, start - block.address)
            pool.insert(front)
        if end < block.address + block.size:
            middle = split(block, end - block.address)
            pool.insert(block)
            block = middle
        block.mapped = False
        self._reserve(pool, start - end)
        unmapped = pool.unmapped.setdefault(block.stream, [])
        for neighbour in (block.prev, block.next):
            if neighbour is not None and mergeable(block, neighbour):
                del unmapped[bisect_left(unmapped, (neighbour.address,))]
                absorb(block, neighbour)
        insort(unmapped, (block.address, block))


def reach(block: Block) -> int:
    """Size that a free block of an expandable segment can grow to."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _missing_bytes(block: Block, size: int) -> int:
    """What must be mapped so that ``size`` bytes from this block on are backed."""
    missing, left, at = 0, size, block
    while left > 0:
        if not at.mapped:
            missing += round_up(min(left, at.size), at.pool.step)
        left, at = left - at.size, at.next  # type: ignore[assignment]
    return missing
