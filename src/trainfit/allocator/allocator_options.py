"""The allocator's options, under torch's names and with torch's defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainfit.errors import OptionError

INTERVALS = 16
"""Sizes from 1 MiB to 64 GiB, by powers of two: each may be rounded in its own way."""


@dataclass(frozen=True)
class AllocatorOptions:
    """What `PYTORCH_CUDA_ALLOC_CONF` says, and the torch version that reads it; see docs/allocator.md.

    `roundup_power2_divisions` is one number for all sizes, or sixteen for the intervals between powers of two
    from 1 MiB on (`parse_conf` reads torch's lists); 0 and 1 mean that sizes are rounded to 512 bytes only.
    A `garbage_collection_threshold` of 0 means that there is none.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_size_mb: int = 20
    torch_version: str = "2.13"

    def __post_init__(self) -> None:
        """Refuse what torch refuses."""
        if not re.fullmatch(r"2\.(9|1[0-3])(\.\d+)?(\+\w+)?", self.torch_version):
            raise OptionError(f"torch {self.torch_version}: only the allocators of 2.9 to 2.13 are known.")
        for divisions in self.divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise OptionError(f"roundup_power2_divisions: {divisions} is not a power of two.")
        if len(self.divisions) not in (0, INTERVALS):
            raise OptionError(
                f"roundup_power2_divisions has {len(self.divisions)} values; it has one, or {INTERVALS}."
            )
        if self.large_segment_size_mb <= 10:
            raise OptionError(f"large_segment_size_mb: {self.large_segment_size_mb} is not more than 10.")
        smallest = 21 if self.minor_version == 9 else self.large_segment_size_mb
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size: int | None = getattr(self, name)
            if size is not None and size < smallest:
                raise OptionError(f"{name}: {size} is too small; it is at least {smallest}.")
        for name in ("garbage_collection_threshold", "per_process_memory_fraction"):
            share: float = getattr(self, name)
            if not 0 <= share <= 1 or (share == 1 and name == "garbage_collection_threshold"):
                raise OptionError(f"{name}: {share:g} is not a share between 0 and 1.")

    @property
    def divisions(self) -> tuple[int, ...]:
        """How sizes of each interval are rounded; empty where none is."""
        given = self.roundup_power2_divisions
        if isinstance(given, int):
            return (given,) * INTERVALS if given else ()
        return given

    @property
    def minor_version(self) -> int:
        """The 13 of torch 2.13."""
        return int(self.torch_version.split(".")[1])
