"""Each rule of the allocator on a small case whose figures are computed by hand."""

from __future__ import annotations

import pytest

from trainfit.allocator import (
    AllocationSequence,
    AllocatorOptions,
    CachingAllocator,
    OutOfMemory,
    parse_conf,
    replay,
)
from trainfit.errors import OptionError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OLDER = ("2.9", "2.10", "2.11")


def allocator(conf: str = "", capacity: int = GIB, version: str = "2.13", **more: object) -> CachingAllocator:
    return CachingAllocator(capacity, parse_conf(conf, version), **more)  # type: ignore[arg-type]


def reserved(conf: str, *sizes: int) -> int:
    """Return what is reserved for allocations that stay."""
    some = allocator(conf)
    for number, size in enumerate(sizes):
        some.allocate(number, size)
    return some.statistics().reserved


@pytest.mark.parametrize(
    ("size", "counted"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB - 1, MIB)]
)
def test_sizes_are_multiples_of_512(size: int, counted: int) -> None:
    some = allocator()
    some.allocate("x", size)
    assert some.statistics().allocated == counted
    assert some.statistics().requested == size


@pytest.mark.parametrize(
    ("size", "counted"),
    [
        (2048, 2048),  # not above 512 * 4: to 512 bytes only
        (2049, 2560),  # 2^11 / 4 = 512
        (5000, 5120),  # 2^12 / 4 = 1024
        (600 * KIB, 640 * KIB),  # 2^19 / 4 = 128 KiB
        (MIB, MIB),
    ],
)
def test_sizes_can_be_rounded_to_parts_of_powers_of_two(size: int, counted: int) -> None:
    some = allocator("roundup_power2_divisions:4")
    some.allocate("x", size)
    assert some.statistics().allocated == counted


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_new_segments(size: int, segment: int) -> None:
    assert reserved("", size) == segment


def test_small_and_large_have_pools_of_their_own() -> None:
    some = allocator()
    some.allocate("large", 2 * MIB)  # 18 MiB are left, and not for what is small
    some.allocate("small", 1)
    statistics = some.statistics()
    assert (statistics.reserved_large, statistics.reserved_small) == (20 * MIB, 2 * MIB)
    assert statistics.segments == 2


def test_streams_have_pools_of_their_own() -> None:
    some = allocator()
    some.allocate("x", 2 * MIB)
    some.allocate("y", 2 * MIB, stream=1)
    assert some.statistics().reserved == 40 * MIB


def test_the_low_part_of_a_split_block_is_handed_out() -> None:
    some = allocator()
    first = some.allocate("x", 3 * MIB)
    assert some.allocate("y", 3 * MIB) == first + 3 * MIB
    statistics = some.statistics()
    assert (statistics.inactive_split, statistics.inactive_split_blocks) == (14 * MIB, 1)


def test_a_large_block_is_handed_out_whole_if_at_most_1_mib_would_remain() -> None:
    some = allocator()
    some.allocate("x", 19 * MIB)  # of 20 MiB: 1 MiB would remain
    assert some.statistics().allocated == 20 * MIB
    some.free("x")
    some.allocate("y", 19 * MIB - 512)
    assert some.statistics().allocated == 19 * MIB - 512


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    some = allocator()
    some.allocate("x", MIB)
    some.allocate("y", MIB - 512)
    assert some.statistics().inactive_split == 512


def test_free_neighbours_merge() -> None:
    some = allocator()
    places = [some.allocate(name, 5 * MIB) for name in "abcd"]
    for name in "acb":
        some.free(name)
    assert some.statistics().inactive_split_blocks == 1
    assert some.allocate("e", 15 * MIB) == places[0]
    assert some.statistics().reserved == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    some = allocator()
    places = {size: some.allocate(size, size * MIB) for size in (40, 20, 30)}
    for size in places:
        some.free(size)
    assert some.allocate("x", 22 * MIB) == places[30]


def freed_out_of_order(version: str) -> tuple[int, int, int]:
    """Let a block of 12 MiB be free at a low address in a younger segment, and one in an older segment."""
    some = allocator(version=version)
    low = some.allocate("low", 12 * MIB)
    high = some.allocate("high", 12 * MIB)
    some.free("low")
    some.empty_cache()
    assert some.allocate("again", 12 * MIB) == low
    some.free("again")
    some.free("high")
    return low, high, some.allocate("x", 12 * MIB)


@pytest.mark.parametrize("version", OLDER)
def test_among_equals_the_lowest_address_is_taken_up_to_2_11(version: str) -> None:
    low, _, taken = freed_out_of_order(version)
    assert taken == low


@pytest.mark.parametrize("version", ["2.12", "2.13"])
def test_among_equals_the_oldest_segment_is_taken_since_2_12(version: str) -> None:
    _, high, taken = freed_out_of_order(version)
    assert taken == high


@pytest.mark.parametrize(("version", "taken"), [("2.11", 0), ("2.12", 1), ("2.13", 0)])
def test_in_2_12_ages_are_those_of_blocks(version: str, taken: int) -> None:
    some = allocator(version=version)
    places = [some.allocate(name, 5 * MIB) for name in "ab"]
    wall = some.allocate("wall", 5 * MIB)
    assert wall == places[1] + 5 * MIB
    last = some.allocate("last", 5 * MIB)  # the block that was split all along: the oldest object
    some.free("a")
    some.free("last")
    assert some.allocate("x", 5 * MIB) == (places[0], last)[taken]


def test_everything_unsplit_is_released_before_memory_runs_out() -> None:
    some = allocator(capacity=40 * MIB)
    some.allocate("kept", 2 * MIB)  # 20 MiB, split
    some.allocate("gone", 20 * MIB)
    some.free("gone")
    some.allocate("x", 18 * MIB)  # fits into what was split
    some.free("x")
    some.allocate("y", 19 * MIB)  # fits only into the other 20 MiB
    statistics = some.statistics()
    assert (statistics.num_alloc_retries, statistics.reserved) == (0, 40 * MIB)
    some.free("y")
    some.allocate("z", 20 * MIB, stream=1)
    statistics = some.statistics()
    assert (statistics.num_alloc_retries, statistics.num_device_free) == (1, 1)
    assert (statistics.cuda_malloc_failures, statistics.reserved_peak) == (1, 40 * MIB)


def test_out_of_memory_has_torchs_words_and_all_figures() -> None:
    some = allocator(capacity=30 * MIB, total_bytes=32 * MIB)
    some.allocate("x", 2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        some.allocate("y", 18 * MIB + 1, stream=3)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 32.00 MiB of which "
        "10.00 MiB is free. Of the allocated memory 2.00 MiB is allocated by PyTorch, and 18.00 MiB is "
        "reserved by PyTorch but unallocated."
    )
    assert (caught.value.name, caught.value.requested_bytes, caught.value.stream) == ("y", 18 * MIB + 1, 3)
    assert caught.value.statistics.num_ooms == 1
    assert caught.value.statistics == some.statistics()
    some.allocate("z", 18 * MIB)  # it goes on


def test_blocks_that_other_streams_use_wait_for_their_events() -> None:
    some = allocator(manual_events=True)
    place = some.allocate("x", 20 * MIB)
    some.record_stream("x", 1)
    some.free("x")
    assert (some.statistics().allocated, some.statistics().active) == (0, 20 * MIB)
    assert some.allocate("y", 20 * MIB) != place
    some.complete_events()
    assert some.statistics().active == 40 * MIB  # looked at when something is allocated
    assert some.allocate("z", 20 * MIB) == place


def test_use_on_its_own_stream_changes_nothing() -> None:
    some = allocator(manual_events=True)
    place = some.allocate("x", 20 * MIB, stream=2)
    some.record_stream("x", 2)
    some.free("x")
    assert some.allocate("y", 20 * MIB, stream=2) == place


def test_waiting_for_events_is_the_last_resort() -> None:
    some = allocator(capacity=20 * MIB, manual_events=True)
    some.allocate("x", 20 * MIB)
    some.record_stream("x", 1)
    some.free("x")
    some.allocate("y", 20 * MIB, stream=1)
    assert some.statistics().num_sync_all_streams == 1


def test_oversize_blocks_are_not_split_nor_lent_to_smaller_requests() -> None:
    some = allocator("max_split_size_mb:32")
    place = some.allocate("x", 40 * MIB)
    some.free("x")
    assert some.allocate("small", 31 * MIB) != place
    assert some.allocate("near", 34 * MIB) == place  # less than 20 MiB smaller: whole
    assert some.statistics().allocated == (32 + 40) * MIB
    some.free("near")
    far = AllocationSequence()
    far.allocate("x", 60 * MIB)
    far.free("x")
    far.allocate("y", 40 * MIB)  # 60 is not below 40 + 20
    assert replay(far, parse_conf("max_split_size_mb:32")).reserved_peak_bytes == 100 * MIB


def test_one_oversize_block_is_released_if_that_is_enough() -> None:
    some = allocator("max_split_size_mb:32", capacity=120 * MIB)
    for name, size in (("a", 70), ("b", 40)):
        some.allocate(name, size * MIB)
    some.free("a")
    some.free("b")
    some.allocate("x", 31 * MIB)  # 10 MiB are left; the smallest that is at least 32 MiB goes
    statistics = some.statistics()
    assert (statistics.num_device_free, statistics.num_alloc_retries) == (1, 0)
    assert statistics.reserved == (70 + 32) * MIB


def test_a_fraction_of_the_total_is_the_limit() -> None:
    some = allocator(capacity=100 * MIB, fraction=0.5)
    some.allocate("x", 30 * MIB)
    with pytest.raises(OutOfMemory, match=r"50\.00 MiB allowed; Of"):
        some.allocate("y", 22 * MIB)
    some.allocate("z", 20 * MIB)
    assert some.statistics().cuda_malloc_failures == 0


def test_garbage_is_collected_above_the_threshold() -> None:
    some = allocator(
        "garbage_collection_threshold:0.5", capacity=200 * MIB, total_bytes=200 * MIB, fraction=0.9
    )
    for name, size in (("old", 40), ("new", 50), ("kept", 20)):
        some.allocate(name, size * MIB)
    some.free("old")
    some.allocate("y", 60 * MIB)  # 110 reserved: above 90, and nothing else is free
    some.free("new")
    assert some.statistics().num_device_free == 1
    some.allocate("z", 51 * MIB)
    assert some.statistics().num_device_free == 2


def test_expandable_segments_map_pages_next_to_each_other() -> None:
    some = allocator("expandable_segments:True")
    first = some.allocate("x", 15 * MIB)
    assert some.statistics().reserved == 20 * MIB
    assert some.allocate("y", 15 * MIB) == first + 15 * MIB  # 5 MiB are there, 20 more are mapped
    statistics = some.statistics()
    assert (statistics.reserved, statistics.mem_create_calls, statistics.address_reservations) == (
        40 * MIB,
        2,
        1,
    )
    assert (statistics.segments, statistics.inactive_split) == (0, 0)
    some.free("x")
    some.empty_cache()  # its page is shared with y
    assert some.statistics().reserved == 40 * MIB
    some.free("y")
    some.empty_cache()
    assert some.statistics().reserved == 0
    some.allocate("z", 1)
    assert some.statistics().address_reservations == 2


def test_pages_that_cannot_all_be_had_are_given_back() -> None:
    some = allocator("expandable_segments:True", capacity=50 * MIB, total_bytes=GIB)
    some.allocate("x", 20 * MIB)
    with pytest.raises(OutOfMemory):
        some.allocate("y", 30 * MIB)  # two pages of 20 MiB, of which one fits
    statistics = some.statistics()
    assert (statistics.device_used, statistics.device_used_peak) == (20 * MIB, 40 * MIB)
    assert (statistics.mem_create_calls, statistics.mem_create_failures) == (1 + 2 + 2, 2)


def test_nothing_is_reserved_for_no_bytes() -> None:
    some = allocator()
    assert some.allocate("x", 0) == 0
    some.record_stream("x", 1)
    some.free("x")
    assert some.statistics().allocations == 0


def test_peaks_can_be_reset() -> None:
    some = allocator()
    some.allocate("x", 30 * MIB)
    some.free("x")
    some.empty_cache()
    some.reset_peaks()
    statistics = some.statistics()
    assert (statistics.allocated_peak, statistics.reserved_peak, statistics.device_used_peak) == (
        0,
        0,
        30 * MIB,
    )


def test_what_makes_no_sense_is_refused() -> None:
    some = allocator()
    some.allocate("x", 1)
    with pytest.raises(OptionError, match="x is alive already"):
        some.allocate("x", 1)
    with pytest.raises(OptionError, match="y is not alive"):
        some.free("y")
    with pytest.raises(OptionError, match="y is not alive"):
        some.record_stream("y", 1)
    with pytest.raises(OptionError, match="not negative"):
        some.allocate("z", -1)
    with pytest.raises(OptionError, match="no negative number"):
        CachingAllocator(-1)
    with pytest.raises(OptionError, match=r"fraction of 1\.5 is not within 0 and 1"):
        CachingAllocator(1, fraction=1.5)
    assert list(some.placements()) == ["x"]
    assert AllocatorOptions() == parse_conf("")
