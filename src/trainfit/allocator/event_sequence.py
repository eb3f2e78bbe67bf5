"""Allocations and frees in the order in which they happen, as data and as text.

One event a line:

    a ID BYTES [STREAM]   allocate; the ID must not be alive
    f ID                  free
    r ID STREAM           record_stream: the block is also used on STREAM
    s                     all recorded events complete (only of interest where they are manual)
    e                     torch.cuda.empty_cache()
    p                     reset the peaks
    m [LABEL]             a mark: the statistics are of interest here
    # ...                 a comment

STREAM 0 is the default stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

from trainfit.allocator.replay_loop import ALLOCATE, COMPLETE, EMPTY, FREE, MARK, RECORD, RESET
from trainfit.errors import FileFormatError, OptionError

_LETTERS = {"a": ALLOCATE, "f": FREE, "r": RECORD, "s": COMPLETE, "e": EMPTY, "p": RESET, "m": MARK}
_WORDS = {"a": (3, 4), "f": (2, 2), "r": (3, 3), "s": (1, 1), "e": (1, 1), "p": (1, 1), "m": (1, 2)}
LARGEST = 1 << 50
"""Bytes of one request: beyond that it is a mistake, not a tensor."""


class AllocationSequence:
    """Events in parallel lists: what happens, to which slot, how many bytes, on which stream, in which line.

    A slot is the number of an ID, in the order in which they first occur; `names` has the IDs. Add events
    with the methods, which refuse what cannot happen: to allocate what is alive, or to free what is not.
    """

    def __init__(self) -> None:
        """Start without events."""
        self.kinds: list[int] = []
        self.slots: list[int] = []
        self.sizes: list[int] = []
        self.streams: list[int] = []
        self.lines: list[int] = []
        self.names: list[Hashable] = []
        self.labels: dict[int, str] = {}  # of marks, by the number of the event
        self._slot_of: dict[Hashable, int] = {}
        self._alive: set[int] = set()

    def __len__(self) -> int:
        """Return how many events there are."""
        return len(self.kinds)

    def __repr__(self) -> str:
        """Say how long it is."""
        return f"AllocationSequence({len(self.kinds)} events, {len(self.names)} names)"

    def allocate(self, name: Hashable, size: int, stream: int = 0, line: int = 0) -> None:
        """Add an allocation under a name that is not alive."""
        slot = self._slot(name)
        if slot in self._alive:
            raise OptionError(f"{name} is alive already: free it before it is allocated again.")
        if not 0 <= size <= LARGEST or stream < 0:
            raise OptionError(f"{name}: {size} bytes on stream {stream} make no sense.")
        self._alive.add(slot)
        self._add(ALLOCATE, slot, size, stream, line)

    def free(self, name: Hashable, line: int = 0) -> None:
        """Add that something which is alive is freed."""
        slot = self._slot_of.get(name, -1)
        if slot not in self._alive:
            raise OptionError(f"{name} is not alive.")
        self._alive.remove(slot)
        self._add(FREE, slot, 0, 0, line)

    def record_stream(self, name: Hashable, stream: int, line: int = 0) -> None:
        """Add that another stream uses it; nothing happens if it is not alive."""
        if stream < 0:
            raise OptionError(f"{name}: stream {stream} makes no sense.")
        self._add(RECORD, self._slot(name), 0, stream, line)

    def complete_events(self, line: int = 0) -> None:
        """Add that all recorded events complete."""
        self._add(COMPLETE, 0, 0, 0, line)

    def empty_cache(self, line: int = 0) -> None:
        """Add that the cache is emptied."""
        self._add(EMPTY, 0, 0, 0, line)

    def reset_peaks(self, line: int = 0) -> None:
        """Add that peaks count from here."""
        self._add(RESET, 0, 0, 0, line)

    def mark(self, label: str = "", line: int = 0) -> None:
        """Add a point whose statistics are of interest."""
        self.labels[len(self.kinds)] = label
        self._add(MARK, 0, 0, 0, line)

    def extend(
        self, kinds: Sequence[int], slots: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
    ) -> None:
        """Add events that were made together; nothing is checked, `names` follow."""
        self.lines.extend(range(len(self.kinds) + 1, len(self.kinds) + len(kinds) + 1))
        self.kinds.extend(kinds)
        self.slots.extend(slots)
        self.sizes.extend(sizes)
        self.streams.extend(streams)

    def _slot(self, name: Hashable) -> int:
        slot = self._slot_of.get(name)
        if slot is None:
            slot = self._slot_of[name] = len(self.names)
            self.names.append(name)
        return slot

    def _add(self, kind: int, slot: int, size: int, stream: int, line: int) -> None:
        self.kinds.append(kind)
        self.slots.append(slot)
        self.sizes.append(size)
        self.streams.append(stream)
        self.lines.append(line or len(self.kinds))


def parse_sequence(text: str, source: str = "the sequence") -> AllocationSequence:
    """Read the text of a sequence; a mistake is a `FileFormatError` that names the line."""
    found = AllocationSequence()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            _add_line(found, words, number)
        except (OptionError, ValueError) as mistake:
            raise FileFormatError(f"{source}, line {number}: {mistake}") from None
    return found


def read_sequence(path: Path | str) -> AllocationSequence:
    """Read a file with one event a line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as mistake:
        raise FileFormatError(f"{path} cannot be read as a sequence: {mistake}") from None
    return parse_sequence(text, str(path))


def sequence_text(sequence: AllocationSequence) -> str:
    """Return the sequence with one event a line; IDs have no blanks in it."""
    return "".join(f"{line}\n" for line in _lines(sequence))


def write_sequence(sequence: AllocationSequence, path: Path | str) -> None:
    """Write a file with one event a line."""
    Path(path).write_text(sequence_text(sequence), encoding="utf-8")


def _lines(sequence: AllocationSequence) -> Iterator[str]:
    names = [str(name) for name in sequence.names]
    unfit = [name for name in names if name.split() != [name]]
    if unfit:
        raise OptionError(f"{unfit[0]!r} cannot be an ID in a file: it is empty or has blanks.")
    if len(set(names)) < len(names):
        raise OptionError("two IDs are written the same way.")
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    for number, kind in enumerate(sequence.kinds):
        name = names[sequence.slots[number]] if kind in (ALLOCATE, FREE, RECORD) else ""
        stream = sequence.streams[number]
        if kind == ALLOCATE:
            yield f"a {name} {sequence.sizes[number]}" + (f" {stream}" if stream else "")
        elif kind == RECORD:
            yield f"r {name} {stream}"
        elif kind == MARK:
            yield f"m {sequence.labels[number]}".rstrip()
        else:
            yield f"{letters[kind]} {name}".rstrip()


def _add_line(sequence: AllocationSequence, words: list[str], line: int) -> None:
    kind = words[0]
    if kind not in _WORDS:
        raise ValueError(f"{kind!r} is no event; there are a, f, r, s, e, p and m.")
    fewest, most = _WORDS[kind]
    if not fewest <= len(words) <= most:
        raise ValueError(
            f"{' '.join(words)!r}: there should be {' or '.join(map(str, {fewest, most}))} words."
        )
    if kind == "a":
        stream = _number(words[3], "STREAM") if len(words) > 3 else 0
        sequence.allocate(words[1], _number(words[2], "BYTES"), stream, line)
    elif kind == "f":
        sequence.free(words[1], line)
    elif kind == "r":
        sequence.record_stream(words[1], _number(words[2], "STREAM"), line)
    elif kind == "s":
        sequence.complete_events(line)
    elif kind == "e":
        sequence.empty_cache(line)
    elif kind == "p":
        sequence.reset_peaks(line)
    else:
        sequence.mark(words[1] if len(words) > 1 else "", line)


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{what} is {text!r}, which is not a number.")
    return int(text)
