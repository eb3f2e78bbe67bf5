"""Ways on disk: JSON with a schema number and a content hash, as plans are (`plan_store.py`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import FileKind, canonical, write_whole
from trainfit.errors import FileFormatError
from trainfit.plans.plan_store import check_plan, pretty
from trainfit.plans.ways import Way

FILE = FileKind("way", schema=1, remedy="make it again with trainfit fit")


def save_way(way: Way, path: str | Path) -> None:
    """Write the way with its plan, whole or not at all."""
    content = dataclasses.asdict(way)
    write_whole(Path(path), (pretty({**FILE.head(canonical(content)), "way": content}) + "\n").encode())


def load_way(path: str | Path) -> Way:
    """Read a way that `save_way` wrote; anything else is one clear error."""
    content, _ = FILE.read_any(Path(path))
    try:
        way = decode(Way, content)
        kinds = [change.kind for change in way.changes]
        if len(set(kinds)) < len(kinds):
            raise Malformed("there are two changes of one kind", "changes")
        if way.plan is not None:
            check_plan(way.plan)
    except Malformed as error:
        raise FileFormatError(f"{path} is not a valid way: {error}.") from None
    return way
