"""World sizes, a global batch and dimensions as people write them: `8..1024`, `4M tokens`, `fsdp,tp`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.basics.count_text import parse_count, short_count
from trainfit.errors import OptionError
from trainfit.traces.ranks import MOST_RANKS

_MOST_SIZES = 24
_RANGE = re.compile(r"([0-9]{1,9})\s*\.\.\s*([0-9]{1,9})")
_HOW = "write it like 8..1024 (each twice the one before) or 8,16,64"
DIMENSIONS = ("replicate", "fsdp", "tp", "cp", "ep", "pp")
"""What a mesh can have; fsdp is always looked at."""


def parse_world_sizes(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Read the numbers of GPUs, ascending, each once."""
    if isinstance(given, str):
        found = [size for part in given.split(",") for size in _part(part.strip(), given)]
    elif isinstance(given, int) and not isinstance(given, bool):
        found = [given]
    elif isinstance(given, Sequence) and all(type(size) is int for size in given):
        found = [int(size) for size in given]
    else:
        raise OptionError(f"--world-sizes {given!r:.100} is not a list of numbers: {_HOW}.")
    sizes = tuple(sorted(set(found)))
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST_RANKS:
        raise OptionError(f"--world-sizes are numbers of GPUs from 1 to {MOST_RANKS:,}; got {given!r:.100}.")
    if len(sizes) > _MOST_SIZES:
        raise OptionError(f"--world-sizes takes {_MOST_SIZES} sizes at most, got {len(sizes)}.")
    return sizes


def _part(text: str, whole: str) -> list[int]:
    """Return the sizes of one part of a list: a number, or a range of which each is twice the one before."""
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        if not 1 <= first <= last <= MOST_RANKS:
            raise OptionError(
                f"--world-sizes {whole!r:.100}: a range goes from a smaller number to a larger one, of at "
                f"most {MOST_RANKS:,} GPUs; {_HOW}."
            )
        sizes = [first]
        while sizes[-1] * 2 <= last:
            sizes.append(sizes[-1] * 2)
        # The end that was named is asked about, too, where doubling misses it.
        return sizes if sizes[-1] == last else [*sizes, last]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise OptionError(f"--world-sizes {whole!r:.100}: {text!r:.60} is no number of GPUs; {_HOW}.")
    return [int(text)]


@dataclass(frozen=True)
class GlobalBatch:
    """What one step of all ranks together trains on: so many tokens, or so many sequences."""

    tokens: int | None = None
    sequences: int | None = None

    @property
    def words(self) -> str:
        """As people write it."""
        if self.tokens is not None:
            return f"{short_count(self.tokens)} tokens"
        return f"{short_count(self.sequences or 0)} sequences"

    def in_sequences(self, seq: int | None) -> int:
        """Return how many sequences, or images, that is; refuse tokens that are no whole number of them."""
        if self.sequences is not None:
            return self.sequences
        assert self.tokens is not None
        if not seq:
            raise OptionError(
                f"--global-batch {self.words}: the step does not say how many tokens a sample has; write how "
                "many samples, as in --global-batch 512."
            )
        if self.tokens % seq:
            down = max(self.tokens // seq, 1)
            raise OptionError(
                f"--global-batch {self.words} is no multiple of the sequence length {seq:,}: the next "
                f"smaller is --global-batch {down} sequences, {down * seq:,} tokens."
            )
        return self.tokens // seq


def parse_global_batch(given: str | int | None) -> GlobalBatch | None:
    """Read a global batch: `512` or `512 sequences`, `4M tokens`; `4Mi` is 2 ** 22."""
    if given is None:
        return None
    if not isinstance(given, str):
        return GlobalBatch(sequences=parse_count(given, "--global-batch"))
    text, of_tokens = given.strip(), False
    for word in ("sequences", "samples", "tokens"):
        if text.lower().endswith(word):
            text, of_tokens = text[: -len(word)].strip(), word == "tokens"
    binary = re.fullmatch(r"([0-9]{1,6})\s*([kKMG])i", text)
    if binary:
        count = int(binary[1]) << {"k": 10, "m": 20, "g": 30}[binary[2].lower()]
        count = parse_count(count, "--global-batch")
    else:
        count = parse_count(text, "--global-batch")
    return GlobalBatch(tokens=count) if of_tokens else GlobalBatch(sequences=count)


def parse_dimensions(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Read which dimensions a mesh may have; None if nobody says."""
    if given is None:
        return None
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    names = ["fsdp" if name == "dp" else name for name in names]
    unknown = next((name for name in names if name not in DIMENSIONS), None)
    if unknown is not None or not names:
        raise OptionError(
            f"--dimensions {given!r:.100}: {unknown!r:.40} is no dimension; write those that a mesh may "
            f"have, of {', '.join(DIMENSIONS)}, as in fsdp,tp."
        )
    return tuple(dict.fromkeys(names))
