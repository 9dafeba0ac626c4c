"""The allocator model: sequences worked out by hand from the rules of CUDACachingAllocator.cpp, and its invariants."""

from __future__ import annotations

from itertools import pairwise

import pytest

from echo_hooks.devices.allocator import CachingAllocator, allocator_settings
from echo_hooks.devices.allocator_blocks import round_size, segment_size

KIB, MIB, GIB = 2**10, 2**20, 2**30


def allocator(**options) -> CachingAllocator:
    return CachingAllocator(80 * GIB, **options)


def test_rounding():
    assert [round_size(n) for n in (0, 1, 512, 513, 1024)] == [512, 512, 512, 1024, 1024]


def test_segments():
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB


def test_small_requests_share_a_segment():
    a = allocator()
    blocks = [a.allocate(100), a.allocate(MIB), a.allocate(MIB - 1024)]  # 512 + 1 MiB + (1 MiB - 1 KiB) fit in 2 MiB
    assert (a.allocated_bytes, a.reserved_bytes) == (2 * MIB - 512, 2 * MIB)
    blocks.append(a.allocate(512))
    assert a.reserved_bytes == 2 * MIB
    a.allocate(1)
    assert a.reserved_bytes == 4 * MIB
    for block in blocks:
        a.free(block)
    assert a.reserved_bytes == 4 * MIB
    a.empty_cache()
    assert a.reserved_bytes == 2 * MIB


def test_large_block_is_split_only_if_more_than_1_mib_remains():
    a = allocator()
    block = a.allocate(12 * MIB)
    a.free(block)
    whole = a.allocate(11 * MIB)  # 1 MiB would remain: not split
    assert (whole.size, a.allocated_bytes) == (12 * MIB, 12 * MIB)
    a.free(whole)
    part = a.allocate(11 * MIB - 512)
    assert (part.size, part.next.size) == (11 * MIB - 512, MIB + 512)
    assert a.reserved_bytes == 12 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    a = allocator()
    sizes = [30 * MIB, 12 * MIB, 20 * MIB]
    blocks = [a.allocate(size) for size in sizes]
    addresses = [block.address for block in blocks]
    for block in blocks:
        a.free(block)
    assert a.allocate(13 * MIB).address == addresses[2]
    assert a.reserved_bytes == 62 * MIB


def test_neighbours_merge_when_freed():
    a = allocator()
    first, second, third = (a.allocate(5 * MIB) for _ in range(3))  # of one 20 MiB segment
    start, end = first.address, third.address
    a.free(first)
    a.free(third)
    with_gap = a.allocate(6 * MIB)  # the 10 MiB behind the second block: third and the rest, merged
    assert with_gap.address == end
    assert a.reserved_bytes == 20 * MIB
    a.free(second)
    a.free(with_gap)
    assert a.allocate(20 * MIB).address == start
    assert a.reserved_bytes == 20 * MIB


def test_streams_do_not_share_cached_memory():
    a = allocator()
    a.free(a.allocate(16 * MIB, stream=0))
    a.allocate(16 * MIB, stream=1)
    assert a.reserved_bytes == 32 * MIB


def test_split_segments_stay_when_the_cache_is_emptied():
    a = allocator()
    kept, freed = a.allocate(5 * MIB), a.allocate(5 * MIB)
    a.free(freed)
    a.free(a.allocate(32 * MIB))
    a.empty_cache()
    assert a.reserved_bytes == 20 * MIB
    a.free(kept)
    a.empty_cache()
    assert a.reserved_bytes == 0


def test_peaks():
    a = allocator()
    a.free(a.allocate(16 * MIB))
    assert (a.peak_allocated_bytes, a.peak_reserved_bytes) == (16 * MIB, 16 * MIB)
    a.reset_peak()
    assert (a.peak_allocated_bytes, a.peak_reserved_bytes) == (0, 16 * MIB)


def test_cached_memory_is_returned_under_pressure():
    a = CachingAllocator(100 * MIB)
    a.free(a.allocate(60 * MIB))
    a.allocate(80 * MIB)
    assert (a.reserved_bytes, a.retries, a.exceeded) == (80 * MIB, 1, None)


def test_exceeding_the_device_is_remembered_once():
    a = CachingAllocator(100 * MIB)
    a.allocate(60 * MIB)
    a.free(a.allocate(30 * MIB))
    a.allocate(50 * MIB)
    assert (a.exceeded.requested_bytes, a.exceeded.allocated_bytes) == (50 * MIB, 60 * MIB)
    assert (a.exceeded.reserved_bytes, a.exceeded.capacity_bytes) == (60 * MIB, 100 * MIB)
    first = a.exceeded
    a.allocate(50 * MIB)
    assert a.exceeded is first
    assert a.reserved_bytes == 160 * MIB
    assert str(first) == "0.05 GiB asked for with 0.06 GiB allocated and 0.06 GiB reserved of 0.10 GiB"


def test_freeing_twice_is_an_error():
    a = allocator()
    block = a.allocate(1)
    a.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        a.free(block)


def test_statistics_under_torchs_names():
    a = allocator()
    a.free(a.allocate(100))
    a.allocate(3 * MIB)
    stats = a.stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB
    assert stats["allocated_bytes.small_pool.peak"] == 512
    assert stats["allocated_bytes.small_pool.freed"] == 512
    assert stats["requested_bytes.all.allocated"] == 100 + 3 * MIB
    assert stats["reserved_bytes.all.current"] == 22 * MIB
    assert stats["segment.all.current"] == 2
    assert stats["allocation.large_pool.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB  # the small segment is whole again
    assert stats["active_bytes.all.current"] == 3 * MIB
    assert stats["num_device_alloc"] == 2
    a.reset_accumulated()
    assert a.stats()["allocation.all.allocated"] == 0


def test_expandable_segments_grow_in_place():
    a = allocator(expandable_segments=True)
    first = a.allocate(30 * MIB)  # two steps of 20 MiB
    assert a.reserved_bytes == 40 * MIB
    second = a.allocate(30 * MIB)  # 10 MiB are there, 20 MiB are added
    assert second.address == first.address + 30 * MIB
    assert a.reserved_bytes == 60 * MIB
    a.free(first)
    a.free(second)
    whole = a.allocate(100 * MIB)  # 60 MiB are there, 40 MiB are added at the end
    assert (whole.address, a.reserved_bytes) == (first.address, 100 * MIB)


def test_expandable_segments_return_whole_steps():
    a = allocator(expandable_segments=True)
    kept, freed = a.allocate(10 * MIB), a.allocate(70 * MIB)
    assert a.reserved_bytes == 80 * MIB
    a.free(freed)
    a.empty_cache()
    assert a.reserved_bytes == 20 * MIB  # the first step holds the kept block
    again = a.allocate(30 * MIB)
    assert (again.address, a.reserved_bytes) == (kept.address + 10 * MIB, 40 * MIB)


def test_expandable_small_pool_has_steps_of_2_mib():
    a = allocator(expandable_segments=True)
    blocks = [a.allocate(MIB) for _ in range(3)]
    assert a.reserved_bytes == 4 * MIB
    a.free(blocks[0])
    a.free(blocks[1])
    a.empty_cache()
    assert a.reserved_bytes == 2 * MIB


def test_expandable_segments_fragment_less():
    """The classic: blocks that grow. Segments made to measure cannot be reused, an expandable one is extended."""
    growing = [n * 16 * MIB for n in range(1, 9)]
    made_to_measure, expandable = allocator(), allocator(expandable_segments=True)
    for a in (made_to_measure, expandable):
        for size in growing:
            a.free(a.allocate(size))
    assert made_to_measure.reserved_bytes == sum(growing) == 576 * MIB
    assert expandable.reserved_bytes == 140 * MIB  # 128 MiB in steps of 20


def test_settings_from_the_environment():
    assert allocator_settings({}) == (False, [])
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) == (True, [])
    text = "max_split_size_mb:128, expandable_segments:False"
    assert allocator_settings({"PYTORCH_ALLOC_CONF": text}) == (False, ["max_split_size_mb"])
    assert allocator_settings({"PYTORCH_ALLOC_CONF": ",,:x,nonsense"}) == (False, [])


# ---- invariants ----

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SIZES = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(0, 64 * MIB))
STEPS = st.lists(st.tuples(st.sampled_from("aaaffe"), SIZES, st.integers(0, 1), st.integers(0, 10**6)), max_size=60)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(STEPS, st.booleans(), st.sampled_from([64 * MIB, 80 * GIB]))
def test_invariants(steps, expandable, capacity):
    a = CachingAllocator(capacity, expandable_segments=expandable)
    live = []
    for action, size, stream, choice in steps:
        if action == "a":
            block = a.allocate(size, stream)
            assert block.size >= round_size(size) and block.stream == stream
            live.append(block)
        elif action == "f" and live:
            a.free(live.pop(choice % len(live)))
        elif action == "e":
            a.empty_cache()
        check(a, live)
    for block in live:
        a.free(block)
    a.empty_cache()
    assert (a.allocated_bytes, a.reserved_bytes) == (0, 0)
    assert a.stats()["inactive_split_bytes.all.current"] == a.stats()["inactive_split.all.current"] == 0


def check(a: CachingAllocator, live: list) -> None:
    """Live blocks do not overlap, chains are whole, and the books agree with the blocks."""
    assert a.allocated_bytes == sum(block.size for block in live)
    spans = sorted((block.address, block.address + block.size) for block in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    free = [block for pool in (a._small, a._large) for blocks in pool.free.values() for _, _, block in blocks]
    assert a.reserved_bytes == a.allocated_bytes + sum(block.size for block in free)
    unmapped = [b for pool in (a._small, a._large) for blocks in pool.unmapped.values() for _, b in blocks]
    for block in (*live, *free, *unmapped):
        if block.next is not None:
            assert block.next.prev is block and block.next.address == block.address + block.size
            neighbours = (block, block.next)
            assert any(n.allocated for n in neighbours) or block.mapped != block.next.mapped
    for pool in (a._small, a._large):
        for blocks in pool.free.values():
            assert blocks == sorted(blocks)
            assert all((size, address) == (block.size, block.address) for size, address, block in blocks)
    if not a.expandable_segments:
        inactive = [block for block in free if block.is_split]
        assert a.stats()["inactive_split.all.current"] == len(inactive)
        assert a.stats()["inactive_split_bytes.all.current"] == sum(block.size for block in inactive)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(STEPS)
def test_same_input_same_output(steps):
    def run():
        a, live = allocator(), []
        for action, size, stream, choice in steps:
            if action == "a":
                live.append(a.allocate(size, stream))
            elif action == "f" and live:
                a.free(live.pop(choice % len(live)))
        return a.stats(), [block.address for block in live]

    assert run() == run()
