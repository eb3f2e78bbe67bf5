"""The cache of what was measured: shared by processes, kept through interruptions, never in the way."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.devices.measured_cache import Entry, Figures, Machine, MeasuredCache, default_path, key_of

MACHINE = Machine("a processor", "2.13.0", 2)
ENTRY = Entry("aten.mm.default", 1.5e-3, 0.02, load=0.25)
FIGURES = Figures({"forward_op": 1e-6}, load=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "costs.sqlite"


def test_remembers_what_was_stored(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY})
        cache.store_figures("host", FIGURES)
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["a", "b"]) == {"a": ENTRY}
        assert cache.figures("host") == FIGURES
        assert cache.figures("rates") is None
        assert cache.warning == ""


@pytest.mark.parametrize(
    "other",
    [
        Machine("another processor", "2.13.0", 2),
        Machine("a processor", "2.14.0", 2),
        Machine("a processor", "2.13.0", 1),
        Machine("a processor", "2.13.0", 2, "other switches"),
    ],
)
def test_holds_for_one_machine_only(path: Path, other: Machine) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY})
        cache.store_figures("host", FIGURES)
    with MeasuredCache(other, path) as cache:
        assert cache.entries(["a"]) == {}
        assert cache.figures("host") is None


def test_remembers_more_workspaces_than_can_be_asked_for_at_once(path: Path) -> None:
    texts = {f"key {number}": f"[{number}, []]" for number in range(1234)}
    with MeasuredCache(MACHINE, path) as cache:
        cache.store_workspaces(texts)
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.workspaces([*texts, "another"]) == texts
        assert cache.workspaces([]) == {} and cache.warning == ""
    with MeasuredCache(Machine("another processor", "2.13.0", 2), path) as cache:
        assert cache.workspaces(texts) == {}


def test_a_new_figure_replaces_the_old_one(path: Path) -> None:
    newer = Entry("aten.mm.default", 2.5e-3, 0.01)
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY})
        cache.store({"a": newer})
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["a"]) == {"a": newer}


WRITER = """
import sys
from pathlib import Path
from trainfit.devices.measured_cache import MeasuredCache, Entry, Figures, Machine
with MeasuredCache(Machine("a processor", "2.13.0", 2), Path(sys.argv[1])) as cache:
    for number in range(int(sys.argv[3])):
        cache.store({f"{sys.argv[2]}{number}": Entry("aten.mm.default", 1e-3, 0.0)})
        print(number, flush=True)
    assert not cache.warning, cache.warning
"""


def test_two_processes_write_at_the_same_time(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "60"], stdout=subprocess.DEVNULL)
        for name in ("a", "b")
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    with MeasuredCache(MACHINE, path) as cache:
        keys = [f"{name}{number}" for name in "ab" for number in range(60)]
        assert len(cache.entries(keys)) == 120


def test_an_interrupted_process_leaves_what_it_had(path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), "a", "100000"], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    stored = [writer.stdout.readline().strip() for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=60)
    with MeasuredCache(MACHINE, path) as cache:
        assert len(cache.entries(f"a{number}" for number in stored)) == 20
        cache.store({"after": ENTRY})
        assert cache.warning == ""


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database " * 1000)


def _damaged(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({str(number): ENTRY for number in range(2000)})
    content = bytearray(path.read_bytes())
    content[4096 : len(content) // 2] = os.urandom(len(content) // 2 - 4096)
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (address TEXT)")
    connection.commit()
    connection.close()


def _newer(path: Path) -> None:
    MeasuredCache(MACHINE, path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("spoil", [_garbage, _damaged, _foreign, _newer, _folder])
def test_a_file_that_cannot_be_used_is_left_alone(path: Path, spoil) -> None:
    path.parent.mkdir()
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["1"]) == {}
        cache.store({"a": ENTRY})
        assert cache.entries(["a"]) == {"a": ENTRY}
        assert str(path) in cache.warning and "TRAINFIT_CACHE" in cache.warning
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with MeasuredCache(MACHINE, tmp_path / "file" / "costs.sqlite") as cache:
        cache.store({"a": ENTRY})
        assert cache.entries(["a"]) == {"a": ENTRY}
        assert "costs.sqlite" in cache.warning


def test_a_full_disk(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"before": ENTRY})
        assert cache._connection is not None
        cache._connection.execute("PRAGMA max_page_count = 8")
        cache.store({str(number): ENTRY for number in range(5000)})
        assert "full" in cache.warning
        assert len(cache.entries(map(str, range(5000)))) == 5000
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["before", "1"]) == {"before": ENTRY}


def test_a_file_that_another_process_holds_for_too_long(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trainfit.devices.measured_cache.BUSY_SECONDS", 0.1)
    MeasuredCache(MACHINE, path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY})
        assert "locked" in cache.warning
        assert cache.entries(["a"]) == {"a": ENTRY}
    other.close()


def test_figures_that_make_no_sense_are_not_taken(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY, "b": ENTRY, "c": ENTRY})
        cache.store_figures("host", FIGURES)
        cache.store_figures("rates", FIGURES)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE operators SET seconds = 9e999 WHERE key = 'a'")
    connection.execute("UPDATE operators SET spread = 'wide' WHERE key = 'b'")
    connection.execute("UPDATE operators SET load = 57 WHERE key = 'c'")
    connection.execute("UPDATE machines SET figures = '[1]' WHERE what = 'host'")
    connection.execute("UPDATE machines SET load = 'heavy' WHERE what = 'rates'")
    connection.commit()
    connection.close()
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["a", "b", "c"]) == {}
        assert cache.figures("host") is None
        assert cache.figures("rates") is None


def test_an_older_schema_is_made_anew(path: Path) -> None:
    with MeasuredCache(MACHINE, path) as cache:
        cache.store({"a": ENTRY})
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 0")
    connection.close()
    with MeasuredCache(MACHINE, path) as cache:
        assert cache.entries(["a"]) == {}
        cache.store({"a": ENTRY})
        assert cache.warning == ""


def test_where_the_file_is(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINFIT_CACHE", raising=False)
    assert default_path() == tmp_path / "trainfit" / "costs.sqlite"
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine" / "costs.sqlite"


def test_keys_tell_parts_apart() -> None:
    assert key_of("a", [1, 2]) == key_of("a", (1, 2))
    assert len({key_of("ab"), key_of("a", "b"), key_of("a", ["b"]), key_of("a", "b", 1)}) == 4
