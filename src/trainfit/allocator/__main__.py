"""`python -m trainfit.allocator SEQ.txt --capacity 40GiB`: replay a sequence, print statistics as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from trainfit.allocator import event_sequence
from trainfit.allocator.caching_allocator import OutOfMemory
from trainfit.allocator.capacity_search import search_capacity
from trainfit.allocator.conf_strings import parse_conf
from trainfit.allocator.event_sequence import AllocationSequence, parse_sequence, read_sequence
from trainfit.allocator.replay_loop import ALLOCATE
from trainfit.allocator.sequence_replay import UNLIMITED, AllocatorReplay, replay
from trainfit.errors import OptionError, TrainfitError

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 3 after out of memory, 2 for a wrong input."""
    try:
        return _run(_parser().parse_args(arguments))
    except TrainfitError as mistake:
        print(f"trainfit.allocator: {mistake}", file=sys.stderr)
        return mistake.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.allocator",
        description="Replay allocations and frees through torch's CUDA caching allocator, simulated.",
        epilog=event_sequence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sequence", metavar="SEQ.txt", help="a file with one event a line; - for the standard input")
    add("--capacity", metavar="BYTES", help="what the device has, such as 40GiB")
    add("--conf", default="", help="options as in PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True")
    add("--torch", default="2.13", metavar="VERSION", help="whose allocator: 2.9 to 2.13 (default: 2.13)")
    add("--total", metavar="BYTES", help="what the device says it has (default: the capacity)")
    add("--fraction", type=float, help="as torch.cuda.set_per_process_memory_fraction()")
    add("--placements", type=Path, metavar="FILE", help="write line and address of every allocation")
    add("--keep-going", action="store_true", help="go on after out of memory")
    add("--search", action="store_true", help="find the smallest capacity that runs")
    ready = "whether events of record_stream are complete at once, or only at s lines and when waited for"
    add("--events", choices=("ready", "manual"), default="ready", help=ready)
    return parser


def _run(given: argparse.Namespace) -> int:
    options = parse_conf(given.conf, given.torch)
    if given.capacity is None and not given.search:
        raise OptionError("--capacity is missing: how much memory does the device have?")
    capacity = UNLIMITED if given.capacity is None else _bytes(given.capacity)
    total = None if given.total is None else _bytes(given.total)
    text = sys.stdin.read() if given.sequence == "-" else None
    sequence = read_sequence(given.sequence) if text is None else parse_sequence(text)
    if given.search:
        try:
            found = search_capacity(
                sequence,
                options,
                capacity,
                total_bytes=total,
                fraction=given.fraction,
                manual_events=given.events == "manual",
            )
        except OutOfMemory as reason:
            raise OptionError(f"it does not even run in {capacity} bytes. {reason}") from None
        print(json.dumps({"event": "search", **asdict(found)}))
        return 0
    begin = time.perf_counter()
    result = replay(
        sequence,
        options,
        capacity,
        total_bytes=total,
        fraction=given.fraction,
        manual_events=given.events == "manual",
        keep_going=given.keep_going,
        keep_placements=given.placements is not None,
    )
    seconds = time.perf_counter() - begin
    for row in json_rows(sequence, result, seconds):
        print(json.dumps(row))
    if given.placements is not None:
        lines = placement_lines(sequence, result)
        given.placements.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 3 if result.out_of_memory else 0


def json_rows(
    sequence: AllocationSequence, result: AllocatorReplay, seconds: float
) -> Iterator[dict[str, object]]:
    """Yield what is printed: a row for each mark and each failure, and one at the end."""
    for moment in result.moments:
        row: dict[str, object] = {"event": moment.kind, "line": sequence.lines[moment.event]}
        if moment.kind == "oom":
            row["id"] = sequence.names[sequence.slots[moment.event]]
            row["bytes"] = sequence.sizes[moment.event]
            row["stream"] = sequence.streams[moment.event]
        elif sequence.labels[moment.event]:
            row["label"] = sequence.labels[moment.event]
        row |= asdict(moment.statistics)
        yield row | ({"message": moment.message} if moment.message else {})
    end = {"event": "end", "events": len(sequence), "oom": "yes" if result.out_of_memory else "no"}
    yield {**end, **asdict(result.statistics), "seconds": float(f"{seconds:.6g}")}


def placement_lines(sequence: AllocationSequence, result: AllocatorReplay) -> list[str]:
    """Return line and address of every allocation that was served."""
    failed = {moment.event for moment in result.moments if moment.kind == "oom"}
    served = (
        line
        for number, (kind, line) in enumerate(zip(sequence.kinds, sequence.lines))
        if kind == ALLOCATE and number not in failed
    )
    return [f"{line} {address}" for line, address in zip(served, result.placements)]


def _bytes(text: str) -> int:
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    try:
        value = int(number) if unit == "" else float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = -1
    if not 0 <= value <= UNLIMITED:
        raise OptionError(f"{text!r} is not a size; sizes are such as 40GiB, 512MiB or 1000000.")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
