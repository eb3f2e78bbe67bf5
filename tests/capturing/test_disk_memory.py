"""What a step saves to memory, and in files of safetensors, it can load again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from captured_steps import captured
from disk_steps import PRECIOUS, checkpoint_in, notes, step_with
from torch import nn

import trainfit
from trainfit.errors import CaptureError, UserCodeError
from trainfit.steps.step import Step

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")
both_sizes = pytest.mark.parametrize("width", [4, 300], ids=["known values", "hollow"])


@pytest.fixture(autouse=True)
def _checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_in(tmp_path, monkeypatch)


@both_sizes
def test_arrays_saved_to_memory_can_be_loaded(width: int) -> None:
    def save_and_load(model: nn.Module, optimizer: Any) -> None:
        buffer = io.BytesIO()
        numpy.save(buffer, numpy.arange(3))
        numpy.save(buffer, model.weight.detach().numpy())
        buffer.seek(0)
        assert numpy.load(buffer).tolist() == [0, 1, 2]
        assert numpy.load(buffer).shape == (width, width)
        archive = io.BytesIO()
        numpy.savez(archive, ids=numpy.arange(3))
        archive.seek(0)
        assert numpy.load(archive)["ids"].tolist() == [0, 1, 2]
        text = io.StringIO()
        numpy.savetxt(text, numpy.arange(3))
        assert len(text.getvalue().splitlines()) == 3

    assert notes(captured(step_with(save_and_load, width))) == []


@both_sizes
def test_a_file_of_safetensors_that_was_not_written_can_be_opened(width: int) -> None:
    def save_and_load(model: nn.Module, optimizer: Any) -> None:
        safetensors_torch.save_file(model.state_dict(), "old.pt", {"format": "pt"})
        with safetensors.safe_open("old.pt", "pt") as file:
            assert file.keys() == ["bias", "weight"]
            assert file.metadata() == {"format": "pt"}
            model.load_state_dict({name: file.get_tensor(name) for name in ("bias", "weight")})
            part = file.get_slice("weight")
            assert (part.get_dtype(), part.get_shape()) == ("F32", [width, width])
            assert part[:2].shape == (2, width)
            with pytest.raises(safetensors.SafetensorError, match="does not contain tensor other"):
                file.get_tensor("other")
        model.load_state_dict(safetensors_torch.load_file("old.pt"))
        safetensors_torch.save_model(model, "new.pt")
        safetensors_torch.load_model(model, "new.pt")

    captured(step_with(save_and_load, width))
    assert Path("old.pt").read_bytes() == PRECIOUS
    assert not Path("new.pt").exists()


def test_what_is_loaded_from_safetensors_counts_as_in_a_real_run() -> None:
    def save_and_load(model: nn.Module, optimizer: Any) -> None:
        safetensors_torch.save_file(model.state_dict(), "new.pt")
        model.load_state_dict(safetensors_torch.load_file("new.pt"))

    verification = trainfit.verify(step_with(save_and_load), costs="roofline")
    assert verification.predicted_peak_bytes == verification.measured.peak_bytes


def test_another_file_is_not_taken_for_one_of_safetensors() -> None:
    def save_and_open(model: nn.Module, optimizer: Any) -> None:
        torch.save(model.state_dict(), "new.pt")
        safetensors.safe_open("new.pt", "pt")

    with pytest.raises(
        CaptureError,
        match=r"test_disk_memory\.py:\d+ reads .*new\.pt, which torch\.save at .*test_disk_memory\.py:\d+",
    ):
        captured(step_with(save_and_open))

    def remove_and_open(model: nn.Module, optimizer: Any) -> None:
        Path("old.pt").unlink()
        safetensors.safe_open("old.pt", "pt")

    with pytest.raises(UserCodeError, match="FileNotFoundError"):
        captured(step_with(remove_and_open))


def test_a_model_of_a_library_is_loaded_again() -> None:
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
            loaded = transformers.BertForMaskedLM.from_pretrained("saved")
            assert len(loaded.state_dict()) == len(model.state_dict())
            loaded(input_ids=tokens)
            model.zero_grad()

        return Step(model, None, run)

    Path("saved").mkdir()
    Path("saved/model.safetensors").write_bytes(PRECIOUS)
    captured(build)
    assert Path("saved/model.safetensors").read_bytes() == PRECIOUS
