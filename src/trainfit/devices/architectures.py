"""GPU architectures: what `sm_86` and `gfx942` mean, and which of them choose the same kernels."""

from __future__ import annotations

import re

Capability = tuple[int, int]

FLASH_CAPABILITY: Capability = (8, 0)
"""The first NVIDIA generation (Ampere) with bfloat16 and flash attention."""
_NVIDIA = re.compile(r"sm_([0-9]{1,2})([0-9])[a-z]?")
_AMD = re.compile(r"gfx([0-9]{1,2})([0-9])[0-9a-f]")


def is_amd(architecture: str) -> bool:
    """Whether an architecture is AMD's."""
    return architecture.startswith("gfx")


def capability_of(architecture: str) -> Capability | None:
    """Return what torch calls the compute capability, (8, 6) for `sm_86` and (9, 4) for `gfx942`.

    None for what is neither.
    """
    found = _NVIDIA.fullmatch(architecture) or _AMD.fullmatch(architecture)
    return None if found is None else (int(found[1]), int(found[2]))


def threads_per_multiprocessor(architecture: str) -> int:
    """Return how many threads a multiprocessor holds at once (CUDA C++ Programming Guide, appendix)."""
    capability = capability_of(architecture)
    if is_amd(architecture) or capability is None:
        return 2048
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12 else 2048


def same_kernels(first: str, second: str) -> bool:
    """Whether steps choose the same kernels on both architectures: attention asks for the generation.

    What is not known counts as recent, as a capture takes it. Heads of more than 192 values, which some
    recent chips do not run with flash attention, are not looked at.
    """
    return _generation(first) == _generation(second)


def same_attention(first: str, second: str) -> bool:
    """Whether every call of attention runs the same kernel on both, heads of more than 192 values too.

    Chips for desktops have too little shared memory for the backward of some of these; and of AMD's, only
    some have the kernels at all.
    """
    if is_amd(first) or is_amd(second):
        return first == second
    return same_kernels(first, second) and _is_small(first) == _is_small(second)


def _is_small(architecture: str) -> bool:
    capability = capability_of(architecture)
    return capability is not None and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)


def _generation(architecture: str) -> str:
    if is_amd(architecture):
        return "amd"
    capability = capability_of(architecture)
    return "recent" if capability is None or capability >= FLASH_CAPABILITY else "before Ampere"
