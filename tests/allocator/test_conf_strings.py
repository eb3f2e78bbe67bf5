"""Strings of PYTORCH_CUDA_ALLOC_CONF: what they mean, and what is refused with which words."""

from __future__ import annotations

import pytest

from trainfit.allocator import AllocatorOptions, parse_conf
from trainfit.errors import OptionError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", AllocatorOptions()),
        ("expandable_segments:True", AllocatorOptions(expandable_segments=True)),
        (" expandable_segments : True , ", AllocatorOptions(expandable_segments=True)),
        ("max_split_size_mb:128", AllocatorOptions(max_split_size_mb=128)),
        ("max_split_size_mb:64,max_split_size_mb:32", AllocatorOptions(max_split_size_mb=32)),
        ("garbage_collection_threshold:0.8", AllocatorOptions(garbage_collection_threshold=0.8)),
        ("per_process_memory_fraction:0.5", AllocatorOptions(per_process_memory_fraction=0.5)),
        ("large_segment_size_mb:64", AllocatorOptions(large_segment_size_mb=64)),
        ("max_non_split_rounding_mb:30", AllocatorOptions(max_non_split_rounding_mb=30)),
        ("roundup_power2_divisions:8", AllocatorOptions(roundup_power2_divisions=8)),
        ("backend:native,pinned_use_background_threads:True", AllocatorOptions()),
        ("pinned_num_register_threads:8,release_lock_on_cudamalloc:False", AllocatorOptions()),
        ("throw_on_cudamalloc_oom:False", AllocatorOptions()),
    ],
)
def test_what_a_string_means(text: str, options: AllocatorOptions) -> None:
    assert parse_conf(text) == options


@pytest.mark.parametrize(
    ("version", "text", "divisions"),
    [
        ("2.13", "[256:1,512:2,>:4]", (1,) * 9 + (2,) + (4,) * 6),
        ("2.9", "[256:1,512:2,>:4]", (1,) * 9 + (4,) * 7),  # 2.9 replaces the last interval as well
        ("2.13", "[1:2,4:4]", (2, 0, 4) + (0,) * 13),  # between boundaries nothing is rounded
        ("2.13", "[>:8]", (0,) + (8,) * 15),
        ("2.13", "[131072:2,>:4]", (2,) * 16),  # beyond 64 GiB there is only the last interval
    ],
)
def test_lists_of_divisions(version: str, text: str, divisions: tuple[int, ...]) -> None:
    """As torch's own parser has them: the tables were read off allocations of the real one."""
    assert parse_conf(f"roundup_power2_divisions:{text}", version).divisions == divisions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split:10", "'max_split' is no option of torch's CUDA allocator."),
        ("expandable_segments=True", "'expandable_segments=True' is no option of torch's CUDA allocator."),
        ("expandable_segments", "'expandable_segments': ':' is missing after 'expandable_segments'"),
        ("expandable_segments:", "the value of expandable_segments is missing, there is the end."),
        ("expandable_segments:true", "expandable_segments: 'true' is neither True nor False."),
        (
            "expandable_segments:True max_split_size_mb:30",
            "'Truemax_split_size_mb' is neither True nor False",
        ),
        ("expandable_segments:True:", "',' is missing between options, there is ':'."),
        (",expandable_segments:True", "a key is missing, there is ','."),
        ("max_split_size_mb:19", "max_split_size_mb: 19 is too small; it is at least 20."),
        ("max_split_size_mb:1.5", "max_split_size_mb: '1.5' is not a whole number."),
        (
            "max_split_size_mb:30,large_segment_size_mb:40",
            "max_split_size_mb: 30 is too small; it is at least 40.",
        ),
        ("max_non_split_rounding_mb:5", "max_non_split_rounding_mb: 5 is too small"),
        ("large_segment_size_mb:10", "large_segment_size_mb: 10 is not more than 10."),
        ("garbage_collection_threshold:0", "garbage_collection_threshold: 0 is too small"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold: 1 is not a share between 0 and 1."),
        ("garbage_collection_threshold:half", "garbage_collection_threshold: 'half' is not a number."),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold: nan is not a share"),
        (
            "per_process_memory_fraction:1.1",
            "per_process_memory_fraction: 1.1 is not a share between 0 and 1.",
        ),
        ("roundup_power2_divisions:3", "roundup_power2_divisions: 3 is not a power of two."),
        ("roundup_power2_divisions:0", "roundup_power2_divisions: 0 is not a power of two."),
        ("roundup_power2_divisions:[3:1]", "roundup_power2_divisions: the boundary 3 is not a power of two."),
        ("roundup_power2_divisions:[256:1", "',' is missing between entries of the list, there is the end."),
        (
            "backend:cudaMallocAsync",
            "backend:cudaMallocAsync is CUDA's own allocator, which is not simulated",
        ),
        ("backend:other", "backend:other is unknown; torch has native and cudaMallocAsync."),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:True is not simulated"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_conf(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "text", "message"),
    [
        ("2.9", "max_split_size_mb:20", "it is at least 21"),
        ("2.9", "per_process_memory_fraction:0.5", "'per_process_memory_fraction' is no option of torch 2.9"),
        ("2.10.1", "large_segment_size_mb:30", "no option of torch 2.10; it exists since 2.11"),
        ("2.8", "", "torch 2.8: only the allocators of 2.9 to 2.13 are known."),
        ("2.14.0", "", "torch 2.14.0: only"),
        ("nightly", "", "torch nightly: only"),
    ],
)
def test_versions_differ(version: str, text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_conf(text, version)
    assert message in str(caught.value)


def test_options_in_python_are_checked_too() -> None:
    assert AllocatorOptions(torch_version="2.13.0+cu130").minor_version == 13
    with pytest.raises(OptionError, match="has 2 values; it has one, or 16"):
        AllocatorOptions(roundup_power2_divisions=(1, 2))
