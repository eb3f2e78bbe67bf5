"""Functions that a module has imported by name do no more harm in a capture than others."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import sys
from io import open as open_by_name
from os import remove, replace
from pathlib import Path
from pickle import dump
from shutil import rmtree
from types import ModuleType
from typing import Any

import pytest
from captured_steps import captured
from disk_steps import PRECIOUS, checkpoint_in, notes, step_with
from torch import nn

from trainfit.capturing import replacing
from trainfit.capturing.replacing import replaced, replaced_by_name


@pytest.fixture(autouse=True)
def _checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_in(tmp_path, monkeypatch)


def test_functions_imported_by_name_harm_nothing() -> None:
    Path("run").mkdir()
    for name in ("run/model.pt", "last.pt", "opened.pt", "pickled.pt"):
        Path(name).write_bytes(PRECIOUS)

    def harm(model: nn.Module, optimizer: Any) -> None:
        if os.path.exists("run"):
            rmtree("run")
        Path("new.txt").write_text("new")
        replace("new.txt", "last.pt")
        if os.path.exists("old.pt"):
            remove("old.pt")
        with open_by_name("opened.pt", "wb") as file:  # noqa: UP020
            file.write(b"bytes")
        with open("pickled.pt", "wb") as file:
            dump(model.weight, file)

    trace = captured(step_with(harm))
    for name in ("run/model.pt", "last.pt", "opened.pt", "pickled.pt", "old.pt"):
        assert Path(name).read_bytes() == PRECIOUS, name
        assert any(name.partition("/")[0] in note for note in notes(trace)), name


def test_every_name_is_the_original_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a module that the step is the first to import, and one that binds a name while the step runs
    Path("late_importer.py").write_text("from os import remove\nfrom shutil import rmtree as remove_all\n")
    Path("changing.py").write_text(
        "delete = None\ndef change():\n    global delete\n    import os\n    delete = os.remove\n"
    )
    monkeypatch.syspath_prepend(os.getcwd())
    changing = importlib.import_module("changing")
    seen = []

    def look(model: nn.Module, optimizer: Any) -> None:
        late = importlib.import_module("late_importer")
        changing.change()
        seen.append((remove, late.remove, changing.delete))

    before = remove
    captured(step_with(look))
    # THEN all of them are guarded in the capture, and none is afterwards
    late = importlib.import_module("late_importer")
    assert before not in seen[0]
    assert remove is late.remove is changing.delete is os.remove is before
    assert late.remove_all is shutil.rmtree is rmtree
    assert dump is pickle.dump
    assert open_by_name is io.open is open


def test_library_modules_are_looked_through_once() -> None:
    """There are thousands of them, and each capture looks twice."""
    with replaced(os, "remove", lambda original: lambda path: original(path)), replaced_by_name(os):
        pass
    loaded = [name for name, module in sys.modules.items() if isinstance(module, ModuleType)]
    assert len(loaded) > 1000
    again = [name for name in loaded if name not in replacing._without and not name.startswith("trainfit.")]
    assert len(again) < 0.15 * len(loaded), sorted(again)
