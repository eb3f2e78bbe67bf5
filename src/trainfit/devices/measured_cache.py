"""What was measured on this machine, on disk: an SQLite file that processes share.

It has the times of operators and their workspaces, each under a key of the operator, and figures about the
machine itself. All of it holds for one `Machine` only.

The file is a cache: it may be deleted at any time, and nothing depends on it but the time to measure again.
A file that is damaged, not ours, newer than this version or not writable is left alone; what is measured is
then only kept for this process, and `warning` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainfit.basics.decoding import Malformed, decode, encode, parse_json

SCHEMA = 4
APPLICATION = 0x7466_636F
"""Marks an SQLite file as this cache."""
BUSY_SECONDS = 20.0

_TABLES = """
CREATE TABLE operators (
    key TEXT NOT NULL, machine TEXT NOT NULL, name TEXT NOT NULL, seconds REAL NOT NULL CHECK (seconds >= 0),
    spread REAL NOT NULL, load REAL, PRIMARY KEY (key, machine)
) WITHOUT ROWID;
CREATE TABLE machines (
    machine TEXT NOT NULL, what TEXT NOT NULL, figures TEXT NOT NULL, load REAL, PRIMARY KEY (machine, what)
) WITHOUT ROWID;
CREATE TABLE workspaces (
    key TEXT NOT NULL, machine TEXT NOT NULL, found TEXT NOT NULL, PRIMARY KEY (key, machine)
) WITHOUT ROWID;
"""
_MOST_KEYS = 500
"""The most keys in one query: some builds of SQLite take no more than 999 values in a statement."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for one operator in one situation."""

    name: str
    seconds: float
    spread: float
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
    switches: str = ""
    """What else decides which kernels run, in short."""

    @property
    def text(self) -> str:
        """One line, as it stands in the file."""
        return f"{self.device} | torch {self.torch} | {self.threads} threads | {self.switches}"


def processor_name() -> str:
    """Return what the processor calls itself, with its architecture and the number of its cores."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or 'cpu'} ({platform.machine()}, {os.cpu_count()} cores)"


def default_path() -> Path:
    """Return where the cache is: `$TRAINFIT_CACHE`, a folder, else in the user's cache folder."""
    folder = os.environ.get("TRAINFIT_CACHE")
    folder = folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainfit")
    return Path(os.path.expanduser(folder)) / "costs.sqlite"


def key_of(*parts: object) -> str:
    """Return a short text that identifies these parts."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:40]


class MeasuredCache:
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

    def __enter__(self) -> MeasuredCache:
        return self

    def __exit__(self, *exception: object) -> None:
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
        rows = [(key, self._machine, *encode(entry)) for key, entry in entries.items()]
        self._try("be written", lambda: self._write("operators", rows))

    def workspaces(self, keys: Iterable[str]) -> dict[str, str]:
        """Return what is known of these operators' workspaces, as it was stored."""
        wanted = list(dict.fromkeys(keys))
        found = self._try("be read", lambda: self._select("found", "workspaces", wanted)) or {}
        return {key: row[0] for key, row in found.items() if isinstance(row[0], str)}

    def store_workspaces(self, workspaces: dict[str, str]) -> None:
        """Write workspaces to the file, all or none."""
        rows = [(key, self._machine, found) for key, found in workspaces.items()]
        self._try("be written", lambda: self._write("workspaces", rows))

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
        marks = [_pragma(connection, name) for name in ("application_id", "user_version")]
        if marks == [APPLICATION, SCHEMA]:
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
            for table in ("operators", "machines", "workspaces"):
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _TABLES.strip().rstrip(";").split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _read(self, keys: Sequence[str]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key, row in self._select("name, seconds, spread, load", "operators", keys).items():
            with contextlib.suppress(Malformed):  # Somebody has changed the file: it is measured again.
                entry = decode(Entry, row, rows=True)
                if min(entry.seconds, entry.spread) >= 0 and _is_share(entry.load):
                    entries[key] = entry
        return entries

    def _select(self, columns: str, table: str, keys: Sequence[str], by: str = "key") -> dict[str, list[Any]]:
        """Return the rows of this machine that are there, by key."""
        found: dict[str, list[Any]] = {}
        if self._connection is None:
            return found
        for begin in range(0, len(keys), _MOST_KEYS):
            some = keys[begin : begin + _MOST_KEYS]
            query = f"SELECT {by}, {columns} FROM {table} WHERE machine = ? AND {by} IN ({_places(some)})"
            for key, *row in self._connection.execute(query, (self._machine, *some)):
                found[key] = row
        return found

    def _read_figures(self, what: str) -> Figures | None:
        for values, load in self._select("figures, load", "machines", [what], by="what").values():
            with contextlib.suppress(Malformed):
                figures = decode(Figures, [parse_json(values), load], rows=True)
                return figures if _is_share(figures.load) else None
        return None

    def _write(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        if self._connection is None or not rows:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({_places(rows[0])})", rows)
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
                f"the cache of what was measured, {self.path}, cannot {what} ({error}): what is measured now "
                "is forgotten afterwards. Delete the file, or name another folder in TRAINFIT_CACHE."
            )
            return None


class _NotUsable(Exception):
    """The file is there but must be left alone; the message says why."""


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _places(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _is_share(load: float | None) -> bool:
    return load is None or 0 <= load <= 1
