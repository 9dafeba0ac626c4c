"""Host memory: sums by hand, and the rounding of PyTorch's CachingHostAllocator (a request takes a power of two)."""

from __future__ import annotations

from echo_hooks.devices.host_memory import HostMemory, pinned_size


def test_sizes_of_page_locked_requests():
    assert [pinned_size(n) for n in (1, 2, 3, 1 << 20, (1 << 20) + 1)] == [1, 2, 4, 1 << 20, 2 << 20]


def test_tensors_are_added_up_while_they_live():
    host = HostMemory()
    first, second = host.allocate(1000), host.allocate(500)
    host.free(first)
    host.allocate(200)
    host.free(second)
    assert (host.peak_bytes, host.pinned_bytes) == (1500, 0)


def test_page_locked_memory_is_rounded_up_and_kept():
    host = HostMemory()
    block = host.allocate(5000)
    host.pin(block)
    host.pin(block)
    assert (host.peak_bytes, host.pinned_bytes) == (8192, 8192)
    host.free(block)
    again = host.allocate(4100)  # pageable at first, on top of what is kept
    assert host.peak_bytes == 8192 + 4100
    host.pin(again)  # the block that was given back serves it
    assert host.pinned_bytes == 8192
    host.pin(host.allocate(4100))
    assert (host.peak_bytes, host.pinned_bytes) == (2 * 8192, 2 * 8192)
