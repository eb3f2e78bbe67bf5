"""Measured costs on disk: an SQLite file that processes share, written op by op as they are measured.

The file is a cache: it may be deleted at any time, and nothing depends on it but the time to measure again.
A file that is damaged, not ours, newer than this version or not writable is left alone; what is measured is
then only kept for this process, and `warning` says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

SCHEMA = 2
APPLICATION = 0x7466_636F
"""Marks an SQLite file as this cache."""
BUSY_SECONDS = 20.0

_TABLES = """
CREATE TABLE operators (
    key TEXT NOT NULL, machine TEXT NOT NULL, name TEXT NOT NULL, seconds REAL NOT NULL CHECK (seconds >= 0),
    spread REAL NOT NULL, workspace_bytes INTEGER NOT NULL, source TEXT NOT NULL, load REAL,
    PRIMARY KEY (key, machine)
) WITHOUT ROWID;
CREATE TABLE machines (
    machine TEXT NOT NULL, what TEXT NOT NULL, figures TEXT NOT NULL, load REAL, PRIMARY KEY (machine, what)
) WITHOUT ROWID;
"""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for one operator in one situation."""

    name: str
    seconds: float
    spread: float
    workspace_bytes: int
    source: str = "measured"
    load: float | None = None
    """The share of the processors that other work took meanwhile; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured about the machine itself, by name."""

    values: dict[str, float]
    load: float | None = None
    """The share of the processors that other work took meanwhile; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement holds for, besides the operator: it is not valid anywhere else."""

    device: str
    torch: str
    threads: int

    @property
    def text(self) -> str:
        """One line, as it stands in the file."""
        return f"{self.device} | torch {self.torch} | {self.threads} threads"


def default_path() -> Path:
    """Return where the cache is: `$TRAINFIT_CACHE`, a folder, else in the user's cache folder."""
    chosen = os.environ.get("TRAINFIT_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen)) / "costs.sqlite"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "trainfit" / "costs.sqlite"


def key_of(*parts: object) -> str:
    """Return a short text that identifies these parts."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:40]


class CostCache:
    """What was measured on one machine: in memory, and in the file as far as that is possible."""

    def __init__(self, machine: Machine, path: Path | None = None) -> None:
        """Open or make the file. Never raises: see `warning`."""
        self.path = path or default_path()
        self.warning = ""
        self._machine = machine.text
        self._entries: dict[str, Entry] = {}
        self._figures: dict[str, Figures] = {}
        self._lock = threading.Lock()
        self._connection = self._try("be used", self._open)

    def __enter__(self) -> CostCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was measured stays readable from this object."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def entries(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Return what is known of these keys."""
        wanted = list(dict.fromkeys(keys))
        unknown = [key for key in wanted if key not in self._entries]
        self._entries |= self._try("be read", lambda: self._read(unknown)) or {}
        return {key: self._entries[key] for key in wanted if key in self._entries}

    def store(self, entries: dict[str, Entry]) -> None:
        """Remember entries, and write them all or none to the file."""
        self._entries |= entries
        rows = [
            (key, self._machine, e.name, e.seconds, e.spread, e.workspace_bytes, e.source, e.load)
            for key, e in entries.items()
        ]
        self._try("be written", lambda: self._write("operators", rows))

    def figures(self, what: str) -> Figures | None:
        """Return figures about the machine itself that were stored under this name."""
        if what not in self._figures:
            found = self._try("be read", lambda: self._read_figures(what))
            if found is None:
                return None
            self._figures[what] = found
        return self._figures[what]

    def store_figures(self, what: str, figures: Figures) -> None:
        """Remember figures about the machine."""
        self._figures[what] = figures
        rows = [(self._machine, what, json.dumps(figures.values, allow_nan=False), figures.load)]
        self._try("be written", lambda: self._write("machines", rows))

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if (
            _pragma(connection, "application_id") == APPLICATION
            and _pragma(connection, "user_version") == SCHEMA
        ):
            # Reading is enough here, and possible where writing is not.
            if _pragma(connection, "quick_check(1)") != "ok":
                raise _NotUsable("it is damaged")
            return
        connection.execute("BEGIN IMMEDIATE")
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and _pragma(connection, "application_id") != APPLICATION:
            raise _NotUsable("it is a database of another program")
        version = _pragma(connection, "user_version")
        if tables and version > SCHEMA:
            raise _NotUsable("a newer trainfit has written it")
        if version < SCHEMA:
            for table in ("operators", "machines"):
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _TABLES.strip().rstrip(";").split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _read(self, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        if self._connection is None:
            return found
        columns = "name, seconds, spread, workspace_bytes, source, load"
        query = f"SELECT {columns} FROM operators WHERE key = ? AND machine = ?"
        for key in keys:
            row = self._connection.execute(query, (key, self._machine)).fetchone()
            if row is not None:
                entry = Entry(*row)
                if _is_sound(entry):
                    found[key] = entry
        return found

    def _read_figures(self, what: str) -> Figures | None:
        if self._connection is None:
            return None
        row = self._connection.execute(
            "SELECT figures, load FROM machines WHERE machine = ? AND what = ?", (self._machine, what)
        ).fetchone()
        if row is None:
            return None
        values, load = json.loads(row[0]), row[1]
        sound = isinstance(values, dict) and all(isinstance(value, int | float) for value in values.values())
        if not sound or not _is_share(load):
            return None
        return Figures({name: float(value) for name, value in values.items()}, load)

    def _write(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        if self._connection is None or not rows:
            return
        places = ", ".join("?" * len(rows[0]))
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", rows)
            self._connection.execute("COMMIT")
        except BaseException:
            # Some errors have ended the transaction already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _try(self, what: str, action: Callable[[], Result]) -> Result | None:
        """Do something with the file; if it fails, say so once and go on without the file."""
        try:
            with self._lock:
                return action()
        except (sqlite3.Error, OSError, _NotUsable, ValueError, TypeError) as error:
            self.warning = self.warning or (
                f"the cache of measured costs, {self.path}, cannot {what} ({error}): what is measured now is "
                "forgotten afterwards. Delete the file, or name another folder in TRAINFIT_CACHE."
            )
            return None


class _NotUsable(Exception):
    """The file is there but must be left alone; the message says why."""


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _is_sound(entry: Entry) -> bool:
    numbers = (entry.seconds, entry.spread, entry.workspace_bytes)
    return _is_share(entry.load) and all(
        isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers
    )


def _is_share(load: object) -> bool:
    return load is None or (isinstance(load, int | float) and 0 <= load <= 1)
