"""Random sequences of allocations, and how to run them through torch's real allocator and through ours.

The oracle is a program that runs the real `libc10_cuda.so` on a device made of a counter. The environment
variable TRAINFIT_ALLOCATOR_ORACLE names it: one file or several, joined by `:`, each in a folder that has the
name of its torch version, such as `2.13.0/alloc_oracle`. It reads and prints what `python -m
trainfit.allocator` does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.allocator import AllocatorReplay, parse_conf, parse_sequence, replay
from trainfit.allocator.__main__ import json_rows, placement_lines

VARIABLE = "TRAINFIT_ALLOCATOR_ORACLE"
MIB = 1 << 20

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tight": {"tight": True},
    "expandable": {"conf": "expandable_segments:True"},
    "tight expandable": {"conf": "expandable_segments:True", "tight": True},
    "max_split": {"conf": "max_split_size_mb:{split}"},
    "max_split rounding": {"conf": "max_split_size_mb:{split},max_non_split_rounding_mb:{rounding}"},
    "roundup": {"conf": "roundup_power2_divisions:{divisions}"},
    "fraction": {"fraction": True},
    "gc and fraction": {"conf": "garbage_collection_threshold:{threshold}", "fraction": True},
    "streams": {"streams": 4, "events": "ready"},
    "streams, manual events": {"streams": 4, "events": "manual"},
    "many streams": {"streams": 20},
    "streams, expandable": {"streams": 3, "conf": "expandable_segments:True"},
    "segment size": {"conf": "large_segment_size_mb:{segment}", "since": 11},
    "all": {
        "conf": "max_split_size_mb:{split},roundup_power2_divisions:{divisions},"
        "garbage_collection_threshold:{threshold}",
        "fraction": True,
        "streams": 3,
    },
    "all, expandable": {
        "conf": "expandable_segments:True,max_split_size_mb:{split},roundup_power2_divisions:{divisions},"
        "garbage_collection_threshold:{threshold}",
        "fraction": True,
        "streams": 3,
    },
}
"""What is set, and what the sequences are like; `since` is the 2.x from which the option exists."""

DIVISIONS = ("1", "2", "4", "8", "16", "[1:2,4:4,16:8,>:1]", "[256:1,512:2,>:4]", "[2:1,8:2,32:16]", "[>:8]")


@dataclass(frozen=True)
class AllocatorCase:
    """A sequence as text, and everything that decides what becomes of it but the torch version."""

    text: str
    conf: str
    capacity: int
    total: int | None
    fraction: float | None
    manual_events: bool
    keep_going: bool

    def arguments(self) -> list[str]:
        """Return the command line, without the sequence."""
        found = ["--capacity", str(self.capacity), "--events", "manual" if self.manual_events else "ready"]
        found += ["--conf", self.conf] if self.conf else []
        found += ["--total", str(self.total)] if self.total is not None else []
        found += ["--fraction", repr(self.fraction)] if self.fraction is not None else []
        return found + (["--keep-going"] if self.keep_going else [])


@dataclass(frozen=True)
class AllocatorAnswer:
    """Exit status, what is printed (without seconds), and the lines of the placements' file."""

    status: int
    rows: list[dict[str, Any]]
    placements: list[str]


def oracles() -> dict[str, Path]:
    """Return the oracles that are there, by torch version; empty if there is none."""
    found = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return {path.resolve().parent.name: path for path in found if os.access(path, os.X_OK)}


def exists_in(option: str, version: str) -> bool:
    return int(version.split(".")[1]) >= OPTIONS[option].get("since", 9)


def random_case(option: str, seed: int, events: int = 0) -> AllocatorCase:
    """Return a case of an option; the same for the same seed. `events`: about how many, or some number."""
    draw = random.Random(f"{option} {seed}")
    kind = OPTIONS[option]
    conf = kind.get("conf", "").format(
        split=draw.choice((21, 25, 33, 39, 40, 64)),
        rounding=draw.choice((21, 30, 50)),
        divisions=draw.choice(DIVISIONS),
        threshold=draw.choice((0.1, 0.3, 0.5, 0.8)),
        segment=draw.choice((11, 19, 21, 32, 64)),
    )
    count = events or draw.choice((30, 100, 300, 600))
    text = "".join(f"{line}\n" for line in _events(draw, count, kind.get("streams", 1)))
    # Near the peak, much is released to serve a request; far below it, nothing helps.
    tight = int(most_alive(text) * draw.uniform(1, 1.4)) + draw.randint(0, 8 * MIB)
    capacity = draw.choice((1 << 40, tight, draw.randint(20 * MIB, 300 * MIB)))
    if kind.get("tight"):
        capacity = tight
    fraction = draw.choice((0.1, 0.5, 0.8, 0.9, 1 / 3, 1.0)) if kind.get("fraction") else None
    if fraction is not None:
        capacity = draw.choice((int(tight / max(fraction, 0.1)), draw.randint(100, 1200) * MIB))
    return AllocatorCase(
        text=text,
        conf=conf,
        capacity=capacity,
        total=capacity + draw.randint(0, 500) * MIB if draw.random() < 0.3 else None,
        fraction=fraction,
        manual_events=kind.get("events", draw.choice(("ready", "manual"))) == "manual",
        keep_going=draw.random() < 0.7,
    )


def _events(draw: random.Random, count: int, streams: int) -> Iterator[str]:
    """Yield the lines of a sequence: sizes that repeat and sizes that do not, frees in and out of order."""
    usual = [_size(draw) for _ in range(draw.randint(2, 20))]
    repeats, in_order, room = draw.random(), draw.random(), draw.randint(5, 90)
    alive: list[str] = []
    made = 0
    for _ in range(count):
        chance = draw.random()
        if chance < 0.02:
            yield draw.choice(("e", "p", "m", "m here", "s", "s"))
        elif alive and streams > 1 and chance < 0.15:
            yield f"r {draw.choice(alive)} {draw.randrange(streams + 1)}"
        elif not alive or len(alive) < room * draw.random() * 2:
            size = draw.choice(usual) if draw.random() < repeats else int(2 ** draw.uniform(0, 26))
            if draw.random() < 0.2:
                size = max(0, size + draw.choice((-512, -1, 1, 100, 512)))
            stream = draw.randrange(streams)
            yield f"a t{made} {size}" + (f" {stream}" if stream else "")
            alive.append(f"t{made}")
            made += 1
        else:
            yield f"f {alive.pop() if draw.random() < in_order else alive.pop(draw.randrange(len(alive)))}"
    yield "m end"


def most_alive(text: str) -> int:
    """Return the most bytes that are asked for at once."""
    return replay(parse_sequence(text)).requested_peak_bytes


def _size(draw: random.Random) -> int:
    """Return a size of a tensor: small, up to 1 MiB, up to 10 MiB, larger, or one at the edge of a rule."""
    edges = (512, 1024, MIB, MIB + 512, 2 * MIB, 10 * MIB, 20 * MIB, 40 * MIB)
    ranges = ((1, 4096), (1, MIB), (MIB, 10 * MIB), (10 * MIB, 60 * MIB))
    which = draw.randrange(len(ranges) + 1)
    return draw.choice(edges) if which == len(ranges) else draw.randint(*ranges[which])


def oracle_answer(oracle: Path, case: AllocatorCase) -> AllocatorAnswer:
    """Run a case through the real allocator."""
    with tempfile.TemporaryDirectory() as folder:
        file, placements = Path(folder, "sequence.txt"), Path(folder, "placements.txt")
        file.write_text(case.text, encoding="utf-8")
        command = [str(oracle), str(file), *case.arguments(), "--placements", str(placements)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert result.returncode in (0, 3), f"{command}: {result.stderr[-1000:]}"
        lines = placements.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return AllocatorAnswer(result.returncode, [without_seconds(row) for row in rows], lines)


def our_answer(version: str, case: AllocatorCase) -> AllocatorAnswer:
    """Run a case through the simulation of a torch version."""
    sequence = parse_sequence(case.text)
    result = our_replay(version, case)
    rows = [without_seconds(row) for row in json_rows(sequence, result, 0.0)]
    # Through JSON, as the oracle's rows: an ID that looks like a number is text in both.
    return AllocatorAnswer(
        3 if result.out_of_memory else 0, json.loads(json.dumps(rows)), placement_lines(sequence, result)
    )


def our_replay(version: str, case: AllocatorCase) -> AllocatorReplay:
    return replay(
        parse_sequence(case.text),
        parse_conf(case.conf, version),
        case.capacity,
        total_bytes=case.total,
        fraction=case.fraction,
        manual_events=case.manual_events,
        keep_going=case.keep_going,
        keep_placements=True,
    )


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def first_difference(ours: AllocatorAnswer, theirs: AllocatorAnswer) -> str:
    """Say where two answers differ; nothing if they are equal."""
    for own, other in zip(ours.placements, theirs.placements):
        if own != other:
            return f"placement: line and address {own}, the oracle has {other}"
    for own_row, other_row in zip(ours.rows, theirs.rows):
        if own_row != other_row:
            keys = [key for key in {**own_row, **other_row} if own_row.get(key) != other_row.get(key)]
            where = f"{other_row.get('event')} at line {other_row.get('line', 'end')}"
            return f"{where}: " + ", ".join(f"{k} {own_row.get(k)} != {other_row.get(k)}" for k in keys)
    return "" if ours == theirs else f"status {ours.status}, the oracle has {theirs.status}"
