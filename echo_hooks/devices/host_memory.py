"""Host memory of one rank: what its large CPU tensors hold, and what is page-locked for copies.

Page-locked memory comes from PyTorch's caching host allocator (aten/src/ATen/core/CachingHostAllocator.h, torch 2.9 to
2.14, default settings): sizes are rounded up to a power of two, and a block that is given back stays page-locked, for
the next request of its size.
"""

from __future__ import annotations

from collections import defaultdict


class HostBlock:
    """A piece of host memory; the handle that ``allocate`` returns and ``free`` takes."""

    __slots__ = ("bytes", "pinned")

    def __init__(self, bytes: int):
        self.bytes = bytes
        self.pinned = False


class HostMemory:
    """``pageable_bytes``: in use now. ``pinned_bytes``: page-locked, in use or kept. ``peak_bytes``: the most that both
    took together."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self.peak_bytes = 0
        self.pageable_bytes = 0
        self._in_use: dict[int, int] = defaultdict(int)  # page-locked blocks by their rounded size
        self._made: dict[int, int] = defaultdict(int)

    def allocate(self, bytes: int) -> HostBlock:
        self.pageable_bytes += bytes
        self._look()
        return HostBlock(bytes)

    def pin(self, block: HostBlock) -> None:
        """The block's content moves to page-locked memory."""
        if block.pinned:
            return
        self.pageable_bytes -= block.bytes
        block.pinned = True
        size = pinned_size(block.bytes)
        self._in_use[size] += 1
        if self._in_use[size] > self._made[size]:
            self._made[size] += 1
            self.pinned_bytes += size
        self._look()

    def free(self, block: HostBlock) -> None:
        if block.pinned:
            self._in_use[pinned_size(block.bytes)] -= 1
        else:
            self.pageable_bytes -= block.bytes

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.pageable_bytes + self.pinned_bytes)


def pinned_size(bytes: int) -> int:
    """What a page-locked request takes: the next power of two."""
    return 1 << max(bytes - 1, 0).bit_length()
