"""A capture writes no tensors to disk and removes nothing, and the loop that wanted to goes on as usual."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from captured_steps import captured
from disk_steps import PRECIOUS, checkpoint_in, notes, step_with
from torch import nn
from torch import save as save_by_name

import trainfit
from trainfit.capturing.disk.elsewhere import LARGEST_COPY
from trainfit.errors import CaptureError, UserCodeError
from trainfit.steps.step import Step

safetensors = pytest.importorskip("safetensors.torch")
save_file_by_name = safetensors.save_file

both_devices = pytest.mark.parametrize("device", ["cpu", "cuda"])
both_sizes = pytest.mark.parametrize("width", [4, 300], ids=["known values", "hollow"])


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that was there before, in the present folder."""
    return checkpoint_in(tmp_path, monkeypatch)


# Writers --------------------------------------------------------------------------------------------------


def _into_open_file(content: Any, path: str) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)


def _into_open_path(content: Any, path: str) -> None:
    with Path(path).open("wb") as file:
        torch.save(content, file)


def _through_memory(content: Any, path: str) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with open(path, "wb") as file:
        file.write(buffer.getvalue())


def _pickled(content: Any, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(content, file)


def _distributed(content: Any, path: str) -> None:
    import torch.distributed.checkpoint as distributed

    distributed.save(content, checkpoint_id=path)


def _distributed_later(content: Any, path: str) -> None:
    import torch.distributed.checkpoint as distributed

    distributed.async_save(content, checkpoint_id=path).result()


def _computed_array(content: Any, path: str) -> None:
    (content["bias"].cpu().numpy() * 2).astype("float16").tofile(path)


def _packaged(content: Any, path: str) -> None:
    from torch.package import PackageExporter

    with PackageExporter(path) as package:
        package.save_pickle("model", "model.pkl", content)


def _storage(content: Any, path: str) -> None:
    with open(path, "wb") as file:
        content["bias"].untyped_storage()._write_file(file, True, True, 4)


def _compressed(module: Any, save: Callable[[Any, Any], None]) -> Callable[[Any, str], None]:
    def write(content: Any, path: str) -> None:
        with module.open(path, "wb") as file:
            save(content, file)

    return write


def _zipped(content: Any, path: str) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.pt", buffer.getvalue())


def _opened_as(mode: str) -> Callable[[Any, str], None]:
    def write(content: Any, path: str) -> None:
        with open(path, mode, buffering=0) as file:
            torch.save(content, file)

    return write


def _with_a_number(content: Any, path: str) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, content["bias"].cpu().numpy().tobytes())
    os.close(number)


def _mapped(content: Any, path: str) -> None:
    array = numpy.memmap(path, dtype="float32", mode="w+", shape=(4,))
    array[:] = content["bias"].cpu().numpy()[:4]
    array.flush()
    assert numpy.memmap(path, dtype="float32").shape == (4,)


def _mapped_array(content: Any, path: str) -> None:
    numpy.lib.format.open_memmap(path, dtype="float32", mode="w+", shape=(4,))[:] = 1.0
    assert numpy.load(path).shape == (4,)


def _through_a_temporary_file(content: Any, path: str) -> None:
    Path(path + ".tmp").write_bytes(content["bias"].cpu().numpy().tobytes())
    os.replace(path + ".tmp", path)
    assert os.path.getsize(path) == content["bias"].nbytes
    assert not os.path.exists(path + ".tmp")


def _copied_over(content: Any, path: str) -> None:
    Path("copied.tmp").write_bytes(content["bias"].cpu().numpy().tobytes())
    shutil.copy2("copied.tmp", path)
    assert Path(path).stat().st_size == content["bias"].nbytes


WRITERS: dict[str, Callable[[Any, str], Any]] = {
    "torch.save": torch.save,
    "torch.save of a path": lambda content, path: torch.save(content, Path(path)),
    "from torch import save": save_by_name,
    "into an open file": _into_open_file,
    "into an open path": _into_open_path,
    "through memory": _through_memory,
    "pickle": _pickled,
    "save_file": safetensors.save_file,
    "save_file by name": save_file_by_name,
    "numpy.save": lambda content, path: numpy.save(path, content["weight"].cpu().numpy()),
    "numpy.savez": lambda content, path: numpy.savez(path, weight=content["weight"].cpu().numpy()),
    "numpy.savetxt": lambda content, path: numpy.savetxt(path, content["bias"].cpu().numpy()),
    "tofile": lambda content, path: content["bias"].cpu().numpy().tofile(path),
    "tofile of a result": _computed_array,
    "tofile of a plain array": lambda content, path: numpy.asarray(content["bias"].cpu()).tofile(path),
    "bytes": lambda content, path: Path(path).write_bytes(content["bias"].cpu().numpy().tobytes()),
    "gzip": _compressed(gzip, torch.save),
    "gzip of a pickle": _compressed(gzip, pickle.dump),
    "bz2": _compressed(bz2, pickle.dump),
    "lzma": _compressed(lzma, torch.save),
    "zip": _zipped,
    "w+b": _opened_as("w+b"),
    "ab": _opened_as("ab"),
    "a number": _with_a_number,
    "memmap": _mapped,
    "open_memmap": _mapped_array,
    "temporary file": _through_a_temporary_file,
    "copy": _copied_over,
    "script": lambda content, path: torch.jit.script(nn.ReLU()).save(path),
    "traced": lambda content, path: torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)).save(path),
    "package": _packaged,
    "storage": _storage,
    "distributed checkpoint": _distributed,
    "distributed checkpoint, later": _distributed_later,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch.package
@both_devices
@both_sizes
def test_no_writer_touches_a_file(width: int, device: str, checkpoint: Path) -> None:
    names = [name.replace(" ", "_") for name in WRITERS]
    for name in names:
        Path(name).write_bytes(PRECIOUS)
    before = sorted(os.listdir())

    def save(model: nn.Module, optimizer: Any) -> None:
        for name, writer in zip(names, WRITERS.values()):
            writer(model.state_dict(), name)
            writer(model.state_dict(), f"new-{name}")

    trace = captured(step_with(save, width), device)
    assert sorted(os.listdir()) == before
    for name in names:
        assert Path(name).read_bytes() == PRECIOUS, name
        assert any(re.search(rf"/{re.escape(name)}(\)| was)", note) for note in notes(trace)), name
        assert any(f"/new-{name}" in note for note in notes(trace)), name
    assert all("test_disk.py:" in note for note in notes(trace))


def test_a_module_that_is_first_imported_by_the_step_writes_nothing_either(checkpoint: Path) -> None:
    source = Path("late.py")
    source.write_text("")
    code = (
        "import torch, trainfit\n"
        "def build():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    def run():\n"
        "        loss = model(torch.ones(2, 4)).sum()\n"
        "        loss.backward()\n"
        "        from safetensors.torch import save_file\n"
        "        save_file(model.state_dict(), 'old.pt')\n"
        "    return trainfit.Step(model, None, run)\n"
    )
    source.write_text(code)
    import subprocess
    import sys

    command = "import sys; from trainfit.cli.commands import main; sys.argv[0] = 'trainfit'; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "estimate", "late.py:build"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert checkpoint.read_bytes() == PRECIOUS
    assert "save_file (" in done.stdout and "was skipped" in done.stdout


def test_models_of_libraries_are_not_written(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> Step:
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
        )
        model = transformers.BertForMaskedLM(config)
        tokens = torch.randint(0, 50, (2, 8))

        def run() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.save_pretrained("saved")
            model.zero_grad()

        return Step(model, None, run)

    Path("saved").mkdir()
    weights = Path("saved/model.safetensors")
    weights.write_bytes(PRECIOUS)
    trace = captured(build)
    assert weights.read_bytes() == PRECIOUS
    assert any("model.safetensors" in note and "test_disk.py:" in note for note in notes(trace))


def test_new_text_and_appended_text_are_written_as_usual(checkpoint: Path) -> None:
    def log(model: nn.Module, optimizer: Any) -> None:
        Path("log.txt").write_text("text")
        with open("log.csv", "a") as file:
            file.write("1\n")

    Path("log.csv").write_text("loss\n")
    trace = captured(step_with(log))
    assert notes(trace) == []
    assert Path("log.txt").read_text() == "text"
    assert re.fullmatch(r"loss\n(1\n){2,}", Path("log.csv").read_text())


@pytest.mark.parametrize("width", [4, 300], ids=["known values", "hollow"])
def test_files_that_were_there_before_keep_their_content_whatever_the_step_does(
    width: int, checkpoint: Path
) -> None:
    names = ["metrics.json", "log.csv", "log.bin", "ids.bin", "now.txt", "previous.txt", "older.txt"]
    for name in names:
        Path(name).write_text(f"{name} of last week")
    Path("linked.txt").symlink_to("now.txt")

    def write_all(model: nn.Module, optimizer: Any) -> None:
        Path("metrics.json").write_text(json.dumps(model.weight.tolist()[:1]))
        assert len(json.loads(Path("metrics.json").read_text())[0]) == width
        with open("log.csv", "r+") as file:
            assert file.read().endswith(("last week", "!"))
            file.write("!")
        with open("log.bin", "ab") as file:
            file.write(b"!")
        ids = numpy.memmap("ids.bin", dtype="uint8")
        ids[:] = 1
        ids.flush()
        Path("linked.txt").write_text("through a link")
        assert Path("now.txt").read_text() == "through a link"

    trace = captured(step_with(write_all, width))
    for name in names:
        assert Path(name).read_text() == f"{name} of last week"
    for what in ("metrics.json", "log.csv", "log.bin", "linked.txt", "memmap.flush"):
        assert any(what in note and "test_disk.py:" in note for note in notes(trace)), what


def test_files_that_were_there_before_keep_their_names(checkpoint: Path) -> None:
    Path("previous.pt").write_text("of the week before")
    Path("run").mkdir()
    Path("run/log.txt").write_text("first")

    moved: list[int] = []

    def rotate(model: nn.Module, optimizer: Any) -> None:
        if os.path.exists("old.pt"):
            os.replace("old.pt", "previous.pt")
            moved.append(os.path.getsize("previous.pt"))
            assert not os.path.exists("old.pt")
        torch.save(model.state_dict(), "old.pt")
        if os.path.exists("run"):
            os.rename("run", "run.1")
        assert Path("run.1/log.txt").read_text() == "first"

    trace = captured(step_with(rotate))
    assert moved[0] == len(PRECIOUS) < moved[1]
    assert checkpoint.read_bytes() == PRECIOUS
    assert Path("previous.pt").read_text() == "of the week before"
    assert Path("run/log.txt").read_text() == "first"
    assert not Path("run.1").exists()
    assert sum("renaming" in note for note in notes(trace)) == 2


def test_what_building_the_step_makes_stays_but_not_tensors(checkpoint: Path) -> None:
    def build() -> Step:
        Path("downloaded.bin").write_bytes(b"data")
        with open("first.pt", "wb") as file:
            torch.save({"epoch": 1}, file)
        Path("second.pt").write_bytes(pickle.dumps(torch.zeros(300, 300)))
        return step_with(lambda model, optimizer: None)()

    captured(build)
    assert sorted(os.listdir()) == ["downloaded.bin", "old.pt"]


def test_a_large_file_is_not_copied_to_be_changed(checkpoint: Path) -> None:
    with open("large.bin", "wb") as file:
        file.truncate(LARGEST_COPY + 1)

    def change(model: nn.Module, optimizer: Any) -> None:
        assert numpy.memmap("large.bin", dtype="uint8")[-1] == 0
        with open("large.bin", "r+b") as file:
            file.write(b"!")

    with pytest.raises(CaptureError, match=r"large\.bin \(1\.00 GiB\) to change it.*open it for reading"):
        captured(step_with(change))


def test_an_open_file_that_was_not_written_can_be_loaded(checkpoint: Path) -> None:
    def save_and_load(model: nn.Module, optimizer: Any) -> None:
        with open("new.pt", "wb") as file:
            torch.save(model.state_dict(), file)
        with open("new.pt", "rb") as file:
            model.load_state_dict(torch.load(file))
        Path("memory.pt").write_bytes(pickle.dumps(model.weight))
        assert pickle.loads(Path("memory.pt").read_bytes()).shape == model.weight.shape

    captured(step_with(save_and_load))


def test_another_thread_saves_for_real_meanwhile(checkpoint: Path) -> None:
    import threading

    begin, done = threading.Event(), threading.Event()

    def other() -> None:
        begin.wait()
        torch.save({"epoch": 7}, "other.pt")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def save(model: nn.Module, optimizer: Any) -> None:
        begin.set()
        assert done.wait(20)

    captured(step_with(save))
    thread.join()
    assert torch.load("other.pt") == {"epoch": 7}


# What loops do with what they have saved --------------------------------------------------------------------


def _replace(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "old.pt.tmp")
    os.replace("old.pt.tmp", "old.pt")
    model.load_state_dict(torch.load("old.pt"))


def _link_latest(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "new.pt")
    if os.path.lexists("latest.pt"):
        os.unlink("latest.pt")
    os.symlink("new.pt", "latest.pt")
    assert Path("latest.pt").exists()
    model.load_state_dict(torch.load("latest.pt"))


def _copy_best(model: nn.Module, optimizer: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "new.pt")
    shutil.copyfile("new.pt", "best.pt")
    loaded = torch.load("best.pt", weights_only=True)
    assert loaded["epoch"] == 3
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def _rotate(model: nn.Module, optimizer: Any) -> None:
    torch.save(model.state_dict(), "new.pt")
    assert os.path.getsize("new.pt") >= sum(p.numel() * 4 for p in model.parameters())
    if os.path.exists("old.pt"):
        os.remove("old.pt")
    assert not os.path.exists("old.pt")


def _fresh_folder(model: nn.Module, optimizer: Any) -> None:
    if os.path.isdir("run"):
        shutil.rmtree("run")
    os.makedirs("run/weights", exist_ok=True)
    torch.save(model.state_dict(), "run/weights/new.pt")


def _through_pickle(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))


LOOPS = [_replace, _link_latest, _copy_best, _rotate, _fresh_folder, _through_pickle]


@both_devices
@both_sizes
def test_loops_that_save_go_on_as_usual(width: int, device: str, checkpoint: Path) -> None:
    Path("run").mkdir()
    Path("run/old.pt").write_bytes(PRECIOUS)
    os.symlink("old.pt", "latest.pt")

    def all_loops(model: nn.Module, optimizer: Any) -> None:
        for loop in LOOPS:
            loop(model, optimizer)

    captured(step_with(all_loops, width), device)
    assert checkpoint.read_bytes() == PRECIOUS
    assert Path("run/old.pt").read_bytes() == PRECIOUS
    assert os.readlink("latest.pt") == "old.pt"
    assert not Path("new.pt").exists()
    assert not Path("best.pt").exists()


@pytest.mark.parametrize("loop", [_replace, _copy_best, _through_pickle], ids=lambda loop: loop.__name__)
def test_what_is_loaded_back_counts_as_in_a_real_run(loop: Any, checkpoint: Path) -> None:
    verification = trainfit.verify(step_with(loop), costs="roofline")
    assert verification.predicted_peak_bytes == verification.measured.peak_bytes


def test_a_copy_through_memory_counts_as_in_a_real_run() -> None:
    def copied_through_memory(model: nn.Module, optimizer: Any) -> None:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        copy.deepcopy(model).load_state_dict(torch.load(buffer))

    verification = trainfit.verify(step_with(copied_through_memory), costs="roofline")
    assert verification.predicted_peak_bytes == verification.measured.peak_bytes


def test_what_is_loaded_back_is_where_it_was_or_where_it_is_asked_for() -> None:
    def load(place: Any) -> Callable[[nn.Module, Any], None]:
        def save_and_load(model: nn.Module, optimizer: Any) -> None:
            buffer = io.BytesIO()
            torch.save(model.weight, buffer)
            buffer.seek(0)
            kept.append(torch.load(buffer, map_location=place))
            kept[:-1] = []

        kept: list[torch.Tensor] = []
        return save_and_load

    bytes_at_start = {
        place: captured(step_with(load(place)), "cuda").persistent_bytes for place in (None, "cuda", "cpu")
    }
    rounded = -(-300 * 300 * 4 // 512) * 512
    assert bytes_at_start[None] == bytes_at_start["cuda"] == bytes_at_start["cpu"] + rounded


def test_a_file_that_only_others_can_read_is_missed_with_a_reason(checkpoint: Path) -> None:
    def save_and_read(model: nn.Module, optimizer: Any) -> None:
        torch.save(model.state_dict(), "new.pt")
        with open("new.pt", "rb") as file:
            file.read()

    with pytest.raises(
        CaptureError, match=r"test_disk\.py:\d+ reads .*new\.pt, which torch\.save at .*test_disk\.py:\d+"
    ) as error:
        captured(step_with(save_and_read))
    assert "a capture writes no tensors to disk" in str(error.value)


def _jit_load() -> None:
    torch.jit.load("new.pt")


def _import_package() -> None:
    from torch.package import PackageImporter

    PackageImporter("new.pt")


def _read_text() -> None:
    Path("new.pt").read_text()


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("read", [_jit_load, _import_package, _read_text], ids=lambda read: read.__name__)
def test_a_file_that_is_read_without_python_is_missed_with_a_reason(
    read: Callable[[], None], checkpoint: Path
) -> None:
    def save_and_read(model: nn.Module, optimizer: Any) -> None:
        torch.save(model.state_dict(), "new.pt")
        read()

    with pytest.raises(
        CaptureError, match=r"test_disk\.py:\d+ reads .*new\.pt, which torch\.save at .*test_disk\.py:\d+"
    ):
        captured(step_with(save_and_read))


def test_a_file_that_was_never_there_is_the_users_mistake(checkpoint: Path) -> None:
    with pytest.raises(UserCodeError, match="FileNotFoundError"):
        captured(step_with(lambda model, optimizer: torch.load("never.pt")))


def test_what_the_step_made_itself_it_may_remove(checkpoint: Path) -> None:
    def make_and_remove(model: nn.Module, optimizer: Any) -> None:
        Path("scratch.txt").write_text("x")
        os.remove("scratch.txt")
        os.makedirs("scratch/deep")
        Path("scratch/deep/file.txt").write_text("x")
        shutil.rmtree("scratch")

    assert notes(captured(step_with(make_and_remove))) == []
    assert os.listdir() == ["old.pt"]


def test_arrays_of_tensors_behave_as_arrays() -> None:
    def use(model: nn.Module, optimizer: Any) -> None:
        array = model.weight.detach().cpu().numpy()
        assert isinstance(array, numpy.ndarray)
        assert type(array.mean()) is numpy.float32
        assert torch.from_numpy(array).shape == model.weight.shape
        assert type(pickle.loads(pickle.dumps(array))) is numpy.ndarray
        assert (array + 1)[0, 0] == 1.0

    captured(step_with(use))
