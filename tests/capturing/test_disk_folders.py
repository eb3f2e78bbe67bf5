"""Folders and listings agree with what the step believes, and what was there before stays as it was."""

from __future__ import annotations

import glob
import os
import shelve
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_steps import captured
from disk_steps import PRECIOUS, checkpoint_in, notes, step_with
from torch import nn

from trainfit.errors import UserCodeError


@pytest.fixture(autouse=True)
def _checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_in(tmp_path, monkeypatch)


def _content(folder: str = ".") -> dict[str, bytes | None]:
    """Return all that is in a folder, and what is in the files."""
    paths = sorted(Path(folder).rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


# Nothing older is touched -----------------------------------------------------------------------------------


def _truncated(model: nn.Module, optimizer: Any) -> None:
    os.truncate("old.pt", 3)
    assert Path("old.pt").read_bytes() == PRECIOUS[:3]


def _removed_folder(model: nn.Module, optimizer: Any) -> None:
    for path in ("empty", "outer/inner"):
        if os.path.exists(path):
            Path(path).rmdir()
    assert not os.path.exists("empty")


def _removed_folders(model: nn.Module, optimizer: Any) -> None:
    if os.path.isdir("outer"):
        os.removedirs("outer/inner")
    assert not os.path.exists("outer")


def _removed_tree_with_something_new(model: nn.Module, optimizer: Any) -> None:
    if os.path.isdir("empty"):
        Path("empty/new.txt").write_text("new")
        shutil.rmtree("empty")


def _written_again(model: nn.Module, optimizer: Any) -> None:
    for path in ("old.pt", "empty"):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        Path(path).write_text("new")
        assert Path(path).read_text() == "new"


def _linked(model: nn.Module, optimizer: Any) -> None:
    if not os.path.exists("linked.pt"):
        os.link("old.pt", "linked.pt")
        os.remove("old.pt")
    assert Path("linked.pt").read_bytes() == PRECIOUS


def _through_a_shelf(model: nn.Module, optimizer: Any) -> None:
    with shelve.open("shelf") as shelf:
        shelf["loss"] = len(shelf)
    with shelve.open("shelf") as shelf:
        assert set(shelf) == {"epoch", "loss"}


HARM = [_truncated, _removed_folder, _removed_folders, _written_again, _linked, _through_a_shelf]


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_what_was_there_before_stays_as_it_was(harm: Callable[..., None]) -> None:
    Path("empty").mkdir()
    Path("outer/inner").mkdir(parents=True)
    import dbm.dumb

    with dbm.dumb.open("shelf") as database, shelve.Shelf(database) as shelf:
        shelf["epoch"] = 1
    before = _content()
    trace = captured(step_with(harm))
    assert _content() == before
    assert all("test_disk_folders.py:" in note for note in notes(trace))
    assert notes(trace)


def test_an_empty_folder_that_was_there_before_stays_also_with_something_new_in_it() -> None:
    Path("empty").mkdir()
    captured(step_with(_removed_tree_with_something_new))
    assert Path("empty").is_dir()


def test_an_empty_folder_that_the_step_made_it_may_remove() -> None:
    def make_and_remove(model: nn.Module, optimizer: Any) -> None:
        os.makedirs("outer/inner")
        os.rename("outer", "other")
        os.removedirs("other/inner")

    assert notes(captured(step_with(make_and_remove))) == []
    assert os.listdir() == ["old.pt"]


# Listings ---------------------------------------------------------------------------------------------------

LISTINGS: dict[str, Callable[[], list[str]]] = {
    "glob": lambda: glob.glob("run/step-*.pt"),
    "glob, recursive": lambda: glob.glob("**/step-*.pt", recursive=True),
    "Path.glob": lambda: [str(path) for path in Path("run").glob("step-*.pt")],
    "Path.rglob": lambda: [str(path) for path in Path().rglob("step-*.pt")],
    "Path.iterdir": lambda: [str(path) for path in Path("run").iterdir() if path.is_file()],
    "os.listdir": lambda: [f"run/{name}" for name in os.listdir("run")],
    "os.listdir of bytes": lambda: [f"run/{os.fsdecode(name)}" for name in os.listdir(b"run")],
    "os.walk": lambda: [f"{folder}/{name}" for folder, _, names in os.walk("run") for name in names],
}


def _keep_the_last(listing: Callable[[], list[str]]) -> Callable[..., None]:
    numbers = iter(range(4, 1000))

    def save(model: nn.Module, optimizer: Any) -> None:
        number = next(numbers)
        torch.save(model.state_dict(), f"run/step-{number:03}.pt")
        for path in sorted(listing())[:-3]:
            os.remove(path)
        kept = [f"run/step-{number - i:03}.pt" for i in (2, 1, 0)]
        assert sorted(listing()) == kept
        assert max(listing(), key=os.path.getmtime) == kept[-1]
        model.load_state_dict(torch.load(kept[-1]))

    return save


@pytest.mark.parametrize("name", LISTINGS)
def test_a_loop_keeps_its_last_three_checkpoints(name: str) -> None:
    Path("run").mkdir()
    for number in (1, 2, 3):
        Path(f"run/step-{number:03}.pt").write_bytes(PRECIOUS)
    before = _content()
    captured(step_with(_keep_the_last(LISTINGS[name])))
    assert _content() == before


def test_entries_of_a_folder_answer_for_what_was_saved() -> None:
    Path("run/older").mkdir(parents=True)
    os.symlink("nowhere", "run/broken")

    def look(model: nn.Module, optimizer: Any) -> None:
        torch.save(model.state_dict(), "run/new.pt")
        with os.scandir("run") as entries:
            found = {entry.name: entry for entry in entries}
        assert set(found) == {"older", "broken", "new.pt"}
        new = found["new.pt"]
        assert (new.path, os.fspath(new)) == ("run/new.pt", "run/new.pt")
        assert new.is_file() and not new.is_dir() and not new.is_symlink()
        assert new.stat().st_size >= 300 * 300 * 4
        assert new.inode() == os.stat("run/new.pt").st_ino
        assert found["older"].is_dir()
        assert found["broken"].is_symlink() and not found["broken"].is_file()
        assert os.access("run/new.pt", os.R_OK)
        with pytest.raises(NotADirectoryError):
            os.listdir("run/new.pt")

    captured(step_with(look))


# Folders ----------------------------------------------------------------------------------------------------


def _replaced_folder(model: nn.Module, optimizer: Any) -> None:
    Path("run.tmp").mkdir(exist_ok=True)
    torch.save(model.state_dict(), "run.tmp/new.pt")
    Path("run.tmp/meta.json").write_text("{}")
    shutil.rmtree("run")
    Path("run.tmp").rename("run")
    assert sorted(os.listdir("run")) == ["meta.json", "new.pt"]
    assert not os.path.exists("run.tmp")
    assert Path("run/meta.json").read_text() == "{}"
    model.load_state_dict(torch.load("run/new.pt"))


def _emptied_folder(model: nn.Module, optimizer: Any) -> None:
    if os.path.isdir("run"):
        for path in Path("run").iterdir():
            path.unlink()
        Path("run").rmdir()
    assert not os.path.exists("run")


def _moved_folder(model: nn.Module, optimizer: Any) -> None:
    os.makedirs("new/deep")
    torch.save(model.state_dict(), "new/deep/new.pt")
    assert shutil.move("new", "moved") == "moved"
    model.load_state_dict(torch.load("moved/deep/new.pt"))
    assert os.listdir("moved/deep") == ["new.pt"]
    shutil.rmtree("moved")


def _moved_into_a_folder(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "new.pt")
    if os.path.exists("run/new.pt"):
        os.remove("run/new.pt")
    assert shutil.move("new.pt", "run") == "run/new.pt"
    model.load_state_dict(torch.load("run/new.pt"))
    assert shutil.copy("run/new.pt", "run/copy.pt") == "run/copy.pt"
    model.load_state_dict(torch.load("run/copy.pt"))


def _copied_folder(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "run/new.pt")
    if os.path.exists("backup"):
        shutil.rmtree("backup")
    shutil.copytree("run", "backup")
    model.load_state_dict(torch.load("backup/new.pt"))
    assert Path("backup/model.pt").read_bytes() == PRECIOUS


def _made_again(model: nn.Module, optimizer: Any) -> None:
    shutil.rmtree("run", ignore_errors=True)
    os.makedirs("run/weights")
    assert os.listdir("run") == ["weights"]
    Path("run/log.txt").write_text("new")
    torch.save(model.state_dict(), "run/weights/new.pt")
    assert sorted(os.listdir("run")) == ["log.txt", "weights"]
    with pytest.raises(FileNotFoundError):
        Path("run/model.pt").read_bytes()


def _hard_link(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "run/new.pt")
    if os.path.exists("run/link.pt"):
        os.remove("run/link.pt")
    os.link("run/new.pt", "run/link.pt")
    model.load_state_dict(torch.load("run/link.pt"))


def _linked_folder(model: nn.Module, optimizer: Any) -> None:
    if not os.path.lexists("latest"):
        os.symlink("run", "latest")
    torch.save(model.state_dict(), "run/new.pt")
    model.load_state_dict(torch.load("latest/new.pt"))


LOOPS = [
    _replaced_folder,
    _emptied_folder,
    _moved_folder,
    _moved_into_a_folder,
    _copied_folder,
    _made_again,
    _hard_link,
    _linked_folder,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_over_folders_go_on_as_usual(loop: Callable[..., None]) -> None:
    Path("run").mkdir()
    Path("run/model.pt").write_bytes(PRECIOUS)
    Path("run/meta.json").write_text("{'epoch': 1}")
    before = _content()
    captured(step_with(loop))
    after = _content()
    assert {path: after.get(path) for path in before} == before
    assert not [path for path in after if path.endswith("new.pt")]
    assert set(after) - set(before) <= {"backup", "backup/meta.json", "latest"}


def test_saving_into_a_folder_that_does_not_exist_fails_as_in_a_real_run() -> None:
    with pytest.raises(UserCodeError, match="RuntimeError: Parent directory nowhere does not exist"):
        captured(step_with(lambda model, optimizer: torch.save(model.state_dict(), "nowhere/new.pt")))
