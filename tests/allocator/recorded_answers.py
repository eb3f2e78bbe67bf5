"""Sequences with the answers of torch's real allocator, recorded in `recorded_answers.json`.

    TRAINFIT_ALLOCATOR_ORACLE=.../2.9.1/alloc_oracle:... python tests/allocator/recorded_answers.py

records them again. Most of the cases are such that versions differ. An answer is kept once for all versions
that give it: status, rows of numbers (marks, failures, the end), the first message, steps between addresses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FILE = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
from allocator_cases import (  # noqa: E402
    OPTIONS,
    AllocatorAnswer,
    AllocatorCase,
    exists_in,
    oracle_answer,
    oracles,
    random_case,
)

sys.path.remove(str(FOLDER))

VERSIONS = ("2.9.1", "2.11.0", "2.12.0", "2.13.0")
DIFFERENT, SAME, TRIED = 3, 1, 400
"""Cases of each option in which versions differ, or not, and how many are looked at to find them."""


@dataclass(frozen=True)
class Recorded:
    """A case of an option, and the answers of torch versions to it."""

    option: str
    case: AllocatorCase
    answers: dict[str, Any]  # by versions, joined by blanks


def compact(answer: AllocatorAnswer) -> dict[str, Any]:
    """Return an answer without what the case says, as short as it goes."""
    rows = [[value for value in row.values() if isinstance(value, int)] for row in answer.rows]
    messages = [row["message"] for row in answer.rows if "message" in row]
    addresses = [int(line.split()[1]) >> 9 for line in answer.placements]  # multiples of 512
    steps = [address - before for before, address in zip([0, *addresses], addresses)]
    return {"status": answer.status, "rows": rows, "messages": messages[:1], "addresses": steps}


def recorded() -> Iterator[tuple[Recorded, str, dict[str, Any]]]:
    """Yield what was recorded, with each version and its answer."""
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        found = Recorded(entry["option"], AllocatorCase(**entry["case"]), entry["answers"])
        for versions, answer in found.answers.items():
            for version in versions.split():
                yield found, version, answer


def record() -> None:
    """Ask the oracles, and write the file."""
    found = {version: path for version, path in oracles().items() if version in VERSIONS}
    assert tuple(sorted(found, key=VERSIONS.index)) == VERSIONS, f"there are {sorted(found)}"
    kept = []
    for option in OPTIONS:
        wanted = {True: DIFFERENT, False: SAME}
        for seed in range(TRIED):
            case = random_case(option, 1_000_000 + seed, events=70)
            answers: dict[str, list[str]] = {}
            for version in VERSIONS:
                if exists_in(option, version):
                    answer = compact(oracle_answer(found[version], case))
                    answers.setdefault(json.dumps(answer), []).append(version)
            if wanted[len(answers) > 1] > 0:
                wanted[len(answers) > 1] -= 1
                by_versions = {" ".join(versions): json.loads(text) for text, versions in answers.items()}
                kept.append(asdict(Recorded(option, case, by_versions)))
            if not any(wanted.values()):
                break
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in kept)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(kept)} cases, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    record()
