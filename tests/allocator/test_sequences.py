"""Sequences as data and as text, their replay, and the smallest capacity with which they run."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.allocator import (
    AllocationSequence,
    AllocatorOptions,
    OutOfMemory,
    parse_sequence,
    read_sequence,
    replay,
    search_capacity,
    sequence_text,
    smallest_capacity,
    write_sequence,
)
from trainfit.allocator.capacity_search import _CapacityProbes
from trainfit.allocator.stand_in_device import PAGE
from trainfit.errors import FileFormatError, OptionError

MIB, GIB = 1 << 20, 1 << 30

TEXT = """a x 1000
a y 3000000 2
r x 1
s
m first
f x
e
p
m
f y
"""


def test_text_and_data_are_the_same() -> None:
    sequence = parse_sequence(TEXT)
    assert sequence_text(sequence) == TEXT
    assert (len(sequence), sequence.names, sequence.labels) == (10, ["x", "y"], {4: "first", 8: ""})
    assert repr(sequence) == "AllocationSequence(10 events, 2 names)"


def test_comments_and_blanks_do_not_count_but_lines_do() -> None:
    sequence = parse_sequence("# a comment\n\n  a  x\t1 \n#\nf x\n")
    assert sequence.lines == [3, 5]


def test_files(tmp_path: Path) -> None:
    write_sequence(parse_sequence(TEXT), tmp_path / "sequence.txt")
    assert sequence_text(read_sequence(tmp_path / "sequence.txt")) == TEXT
    with pytest.raises(FileFormatError, match=r"missing\.txt cannot be read as a sequence"):
        read_sequence(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="binary cannot be read as a sequence"):
        read_sequence(tmp_path / "binary")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q x 1", "'q' is no event; there are a, f, r, s, e, p and m."),
        ("alloc x 1", "'alloc' is no event"),
        ("a x", "'a x': there should be 3 or 4 words."),
        ("a x 1 2 3", "there should be 3 or 4 words."),
        ("f", "'f': there should be 2 words."),
        ("a x many", "BYTES is 'many', which is not a number."),
        ("a x -1", "BYTES is '-1', which is not a number."),
        ("a x 1.5", "BYTES is '1.5', which is not a number."),
        ("a x 1 s", "STREAM is 's', which is not a number."),
        ("a x 99999999999999999999", "x: 99999999999999999999 bytes on stream 0 make no sense."),
        ("f x", "x is not alive."),
        ("a y 1", "y is alive already: free it before it is allocated again."),
    ],
)
def test_mistakes_name_the_line(line: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=re.escape(message)) as caught:
        parse_sequence(f"a y 1\n\n{line}\n", "some.txt")
    assert str(caught.value).startswith("some.txt, line 3: ")


def test_names_that_cannot_be_written_are_refused() -> None:
    for names, message in ((("a b",), "'a b' cannot be an ID in a file"), ((1, "1"), "written the same way")):
        sequence = AllocationSequence()
        for name in names:
            sequence.allocate(name, 1)
        with pytest.raises(OptionError, match=message):
            sequence_text(sequence)


def test_a_replay_says_what_became_of_a_sequence() -> None:
    sequence = parse_sequence("a x 3000000\nm here\nf x\na y 30000000\na z 1\n")
    result = replay(sequence, capacity_bytes=20 * MIB)
    assert (result.out_of_memory, result.failed_event, result.retries) == (True, 3, 1)
    assert (result.requested_peak_bytes, result.allocated_peak_bytes) == (3000000, 3000320)
    assert result.reserved_peak_bytes == 20 * MIB
    assert [(moment.kind, moment.event) for moment in result.moments] == [("mark", 1), ("oom", 3)]
    assert result.moments[0].statistics.allocated == 3000320
    on = replay(sequence, capacity_bytes=20 * MIB, keep_going=True, keep_placements=True)
    assert (on.failed_event, on.statistics.allocated, len(on.placements)) == (3, 512, 2)


def fragmented() -> AllocationSequence:
    """Sixteen blocks of 5 MiB of which every other one is freed, and then one of 30 MiB."""
    sequence = AllocationSequence()
    for number in range(16):
        sequence.allocate(number, 5 * MIB)
    for number in range(0, 16, 2):
        sequence.free(number)
    sequence.allocate("large", 30 * MIB)
    return sequence


def test_fragmentation_and_what_expandable_segments_save() -> None:
    """Four segments of 20 MiB, none of them whole; expandable, the 30 MiB are 5 at the end and 25 more."""
    assert smallest_capacity(fragmented()) == (80 + 30) * MIB
    expandable = AllocatorOptions(expandable_segments=True)
    assert smallest_capacity(fragmented(), expandable, total_bytes=GIB) == (80 + 40) * MIB


def test_a_sequence_that_does_not_run_at_all() -> None:
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 30\.00 MiB"):
        smallest_capacity(fragmented(), limit_bytes=90 * MIB)
    assert smallest_capacity(AllocationSequence()) == 0


def random_sequence(seed: int, events: int = 150) -> AllocationSequence:
    draw = random.Random(seed)
    sequence = AllocationSequence()
    sizes = [int(2 ** draw.uniform(9, 25)) for _ in range(8)]
    alive: list[int] = []
    for number in range(events):
        if alive and draw.random() < 0.45:
            sequence.free(alive.pop(draw.randrange(len(alive))))
        else:
            sequence.allocate(number, draw.choice(sizes))
            alive.append(number)
    return sequence


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_smallest_capacity_is_that_of_plain_bisection(seed: int, expandable: bool) -> None:
    """What is known without a replay changes nothing: every capacity is replayed here."""
    sequence = random_sequence(seed)
    options = AllocatorOptions(expandable_segments=expandable)

    def outcome(pages: int) -> tuple[bool, int]:
        result = replay(sequence, options, pages * PAGE, total_bytes=GIB)
        return result.out_of_memory, result.retries

    found = search_capacity(sequence, options, total_bytes=GIB)
    smallest, calm = found.min_capacity // PAGE, found.min_capacity_without_retries // PAGE
    assert outcome(smallest) == (False, found.min_capacity_retries)
    assert outcome(smallest - 1)[0]
    assert outcome(calm) == (False, 0)
    assert outcome(calm - 1) != (False, 0)
    assert smallest_capacity(sequence, options, total_bytes=GIB) == found.min_capacity
    low, high = 0, -(-found.reserved_peak // PAGE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if outcome(middle)[0] else (low, middle)
    assert high == smallest


def test_few_capacities_are_replayed() -> None:
    probes = _CapacityProbes(random_sequence(1, 2000), AllocatorOptions(), None, None, False)
    probes.run_unlimited(1 << 40)
    asked = list(range(1, probes.most + 1))
    outcomes = [probes.outcome(pages).runs for pages in asked]
    assert outcomes[-1] and not outcomes[0]
    assert probes.replays < len(asked) / 4


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB))
options = st.builds(
    AllocatorOptions,
    expandable_segments=st.booleans(),
    max_split_size_mb=st.sampled_from((None, 21, 32)),
    roundup_power2_divisions=st.sampled_from((0, 2, 8)),
    torch_version=st.sampled_from(("2.9", "2.12", "2.13")),
)


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.tuples(sizes, st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=60),
    given_options=options,
    capacity=st.integers(20, 400),
)
def test_what_holds_at_every_moment(
    moves: list[tuple[int, int, int]], given_options: AllocatorOptions, capacity: int
) -> None:
    """Live blocks never overlap, are as large as asked for, and the sums are those of what is alive."""
    sequence = AllocationSequence()
    alive: dict[int, int] = {}
    for number, (size, stream, choice) in enumerate(moves):
        if alive and choice < 45:
            name = list(alive)[choice % len(alive)]
            sequence.free(name)
            del alive[name]
        else:
            sequence.allocate(number, size, stream)
            alive[number] = size
        sequence.mark()
    sequence.mark("end")
    result = replay(
        sequence, given_options, capacity * MIB, total_bytes=GIB, keep_going=True, keep_placements=True
    )
    for moment in result.moments:
        s = moment.statistics
        assert s.requested <= s.allocated == s.active <= s.reserved == s.reserved_small + s.reserved_large
        assert s.reserved == s.device_used <= s.device_used_peak <= capacity * MIB
        assert s.allocated % 512 == 0 and s.reserved % (2 * MIB) == 0
        assert s.allocated + s.inactive_split <= s.reserved
        assert s.allocated_peak >= s.allocated and s.reserved_peak >= s.reserved
    failed = {moment.event for moment in result.moments if moment.kind == "oom"}
    places = iter(result.placements)
    at = {
        sequence.names[sequence.slots[number]]: next(places)
        for number, kind in enumerate(sequence.kinds)
        if kind == 0 and number not in failed
    }
    spans = sorted((at[name], at[name] + size) for name, size in alive.items() if name in at)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert result.statistics.requested == sum(end - begin for begin, end in spans)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), given_options=options)
def test_everything_can_be_given_back(seed: int, given_options: AllocatorOptions) -> None:
    sequence = random_sequence(seed, 80)
    alive = set()
    for kind, slot in zip(sequence.kinds, sequence.slots):
        alive ^= {slot} if kind in (0, 1) else set()
    for slot in alive:
        sequence.free(sequence.names[slot])
    sequence.empty_cache()
    end = replay(sequence, given_options, total_bytes=GIB).statistics
    assert (end.allocated, end.requested, end.reserved, end.segments, end.inactive_split) == (0, 0, 0, 0, 0)
    assert end.device_used == end.active_blocks == end.inactive_split_blocks == 0
