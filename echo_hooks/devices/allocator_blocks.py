"""Blocks of the caching allocator, the pools that its free ones wait in, and the sizes it rounds requests to."""

from __future__ import annotations

from bisect import bisect_left, insort

from echo_hooks.devices.allocator_stats import Stats

# c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
MIN_BLOCK_BYTES = 512  # kMinBlockSize: all sizes are rounded up to a multiple
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request served from the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer: small requests come out of segments of this size
LARGE_SEGMENT_BYTES = 20 << 20  # kLargeBuffer: so do requests between SMALL_BYTES and
MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc: from here on a segment is made to measure
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge: and rounded up to a multiple of this

# Distance between invented segments: larger than any device, and a whole number of steps of an expandable segment.
ADDRESS_SPACE = LARGE_SEGMENT_BYTES << 22


class Block:
    """A piece of a segment; the handle that ``allocate`` returns and ``free`` takes."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "requested", "size", "stream")

    def __init__(self, pool: Pool, stream: int, address: int, size: int, mapped: bool = True):
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


class Pool:
    """Small or large requests.

    ``free``: by stream, (size, address, block) of free blocks, in order: smallest first, then lowest address.
    ``unmapped``: by stream, (address, block) of the holes of expandable segments, in order.
    """

    def __init__(self, small: bool):
        self.small = small
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.stats = Stats()
        # An expandable segment grows in steps of this size (ExpandableSegment, segment_size_).
        self.step = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES

    def insert(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]


def split(block: Block, size: int) -> Block:
    """Cut the first ``size`` bytes off; returns that block, whose ``next`` is the rest."""
    front = Block(block.pool, block.stream, block.address, size, block.mapped)
    front.prev, front.next = block.prev, block
    if block.prev is not None:
        block.prev.next = front
    block.prev = front
    block.address += size
    block.size -= size
    return front


def mergeable(block: Block, neighbour: Block) -> bool:
    return not neighbour.allocated and neighbour.mapped == block.mapped


def absorb(block: Block, neighbour: Block) -> None:
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


def round_size(bytes: int) -> int:
    """What a request takes: the next multiple of 512 B, at least 512 B (round_size)."""
    return max(round_up(bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """What the device is asked for to serve a rounded request (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, ROUND_LARGE_BYTES)


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
