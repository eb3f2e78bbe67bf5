"""Reading `PYTORCH_CUDA_ALLOC_CONF`: `key:value,key:[value,value]`, as torch reads it."""

from __future__ import annotations

import re

from trainfit.allocator.allocator_options import INTERVALS, AllocatorOptions
from trainfit.errors import OptionError

_DIVISIONS = "roundup_power2_divisions"

# How the value of a key is read, and since which 2.x there is the key. What is ignored is about host memory,
# graphs or locks, and changes nothing that is simulated.
_KEYS = {
    "backend": ("backend", 9),
    "expandable_segments": ("flag", 9),
    "max_split_size_mb": ("whole", 9),
    "max_non_split_rounding_mb": ("whole", 9),
    _DIVISIONS: ("divisions", 9),
    "garbage_collection_threshold": ("real", 9),
    "per_process_memory_fraction": ("real", 10),
    "large_segment_size_mb": ("whole", 11),
    "throw_on_cudamalloc_oom": ("refused flag", 12),
    "release_lock_on_cudamalloc": ("ignored flag", 9),
    "release_lock_on_hipmalloc": ("ignored flag", 9),
    "pinned_use_cuda_host_register": ("ignored flag", 9),
    "pinned_use_hip_host_register": ("ignored flag", 9),
    "pinned_use_background_threads": ("ignored flag", 9),
    "graph_capture_record_stream_reuse": ("ignored flag", 9),
    "pinned_num_register_threads": ("ignored number", 9),
    "pinned_reserve_segment_size_mb": ("ignored number", 10),
    "pinned_free_catch_all": ("ignored flag", 12),
    "pinned_max_round_threshold_mb": ("ignored number", 13),
    "pinned_max_cached_size_mb": ("ignored number", 13),
}


def parse_conf(text: str, torch_version: str = "2.13") -> AllocatorOptions:
    """Return the options that a string of `PYTORCH_CUDA_ALLOC_CONF` stands for; `OptionError` if for none."""
    minor = AllocatorOptions(torch_version=torch_version).minor_version
    values: dict[str, bool | int | float | tuple[int, ...]] = {}
    tokens = _Tokens(text)
    while tokens.left():
        key = tokens.next("a key")
        way, since = _KEYS.get(key, ("", 0))
        if not since:
            raise OptionError(f"{key!r} is no option of torch's CUDA allocator.")
        if minor < since:
            raise OptionError(f"{key!r} is no option of torch 2.{minor}; it exists since 2.{since}.")
        tokens.expect(":", f"after {key!r}")
        if way == "divisions":
            values[key] = _divisions(tokens, minor)
        else:
            value = _value(way, key, tokens.next(f"the value of {key}"))
            if value is not None:
                values[key] = value
        if tokens.left():
            tokens.expect(",", "between options")
    return AllocatorOptions(torch_version=torch_version, **values)  # type: ignore[arg-type]


def _value(way: str, key: str, text: str) -> bool | int | float | None:
    """Read the value of a key; None where it changes nothing."""
    if way == "backend":
        _check_backend(text)
        return None
    if way.endswith("flag"):
        if text not in ("True", "False"):
            raise OptionError(f"{key}: {text!r} is neither True nor False.")
        if way == "refused flag" and text == "True":
            raise OptionError(f"{key}:True is not simulated: it gives up before cached memory is released.")
        return text == "True" if way == "flag" else None
    if way == "real":
        return _real(key, text)
    number = _whole(key, text)
    return number if way == "whole" else None


class _Tokens:
    """Words and the marks between them; blanks do not count."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
        self._at = 0

    def left(self) -> bool:
        return self._at < len(self._tokens)

    def next(self, what: str) -> str:
        token = self.peek()
        if token in ("", ",", ":", "[", "]"):
            found = repr(token) if token else "the end"
            raise OptionError(f"{self._text!r}: {what} is missing, there is {found}.")
        self._at += 1
        return token

    def expect(self, mark: str, where: str) -> None:
        if self.peek() != mark:
            found = repr(self.peek()) if self.left() else "the end"
            raise OptionError(f"{self._text!r}: {mark!r} is missing {where}, there is {found}.")
        self._at += 1

    def peek(self) -> str:
        return self._tokens[self._at] if self.left() else ""


def _check_backend(backend: str) -> None:
    if backend == "cudaMallocAsync":
        raise OptionError(
            "backend:cudaMallocAsync is CUDA's own allocator, which is not simulated; only backend:native is."
        )
    if backend != "native":
        raise OptionError(f"backend:{backend} is unknown; torch has native and cudaMallocAsync.")


def _divisions(tokens: _Tokens, minor: int) -> int | tuple[int, ...]:
    """Read one number, or a list such as `[256:1,512:2,>:4]`: up to 256 MiB, up to 512 MiB, above."""
    if tokens.peek() != "[":
        value = _whole(_DIVISIONS, tokens.next("a value"))
        if value == 0:
            raise OptionError(f"{_DIVISIONS}: 0 is not a power of two.")
        return value
    tokens.expect("[", "before the list")
    found = [0] * INTERVALS
    after = 0  # where the rest begins; 2.9 lets it begin at the last boundary, not after it
    first = True
    while tokens.peek() != "]":
        boundary = tokens.next("a boundary")
        tokens.expect(":", f"after the boundary {boundary!r}")
        value = _whole(_DIVISIONS, tokens.next("a value"))
        if boundary == ">":
            begin = after if minor == 9 else after + 1
            found[begin:] = [value] * max(INTERVALS - begin, 0)
        else:
            size = _whole(_DIVISIONS, boundary)
            if size == 0 or size & (size - 1):
                raise OptionError(f"{_DIVISIONS}: the boundary {size} is not a power of two.")
            after = min(size.bit_length() - 1, INTERVALS - 1)
            if first:
                found[:after] = [value] * after
                first = False
            found[after] = value
        if tokens.peek() != "]":
            tokens.expect(",", "between entries of the list")
    tokens.expect("]", "after the list")
    return tuple(found)


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise OptionError(f"{key}: {text!r} is not a whole number.")
    return int(text)


def _real(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{key}: {text!r} is not a number.") from None
    if value == 0 and key == "garbage_collection_threshold":
        raise OptionError(f"{key}: 0 is too small; torch takes shares above 0 and below 1.")
    return value
