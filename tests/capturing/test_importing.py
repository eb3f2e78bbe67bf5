"""Files that ask for a GPU at their top level, as scripts do, are imported for the device of the capture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import trainfit
from trainfit.capturing.importing import imported_for
from trainfit.devices.device_table import find_device
from trainfit.errors import UserCodeError

H100 = "h100-sxm-80gb"
STEP = """
def build():
    model = nn.Linear(256, 256).to(device)
    batch = torch.ones(8, 256, device=device)
    return trainfit.Step(model=model, optimizer=None, run=lambda: model(batch).sum().backward())
"""
CHOOSES = """
import os, torch, trainfit
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
"""
INSISTS = """
import os, torch, trainfit
from torch import nn
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", torch.cuda.current_device())
"""


def written(folder: Path, top: str) -> str:
    file = folder / "script.py"
    file.write_text(top + STEP, encoding="utf-8")
    return f"{file}:build"


def test_a_script_chooses_its_device_anew_for_every_kind(tmp_path: Path) -> None:
    target = written(tmp_path, CHOOSES)
    for device, kind in (("cpu", "cpu"), (H100, "cuda"), ("cpu", "cpu"), (H100, "cuda")):
        trace = trainfit.capture(target, device=device)
        assert trace.device == kind
        # The weight and the bias, their gradients, and the batch.
        on_device = sum(storage.bytes for storage in trace.storages if storage.persistent)
        assert on_device == 4 * (2 * (256 * 256 + 256) + 8 * 256)
    assert trainfit.verify(target).measured.peak_bytes > 0


def test_a_script_takes_the_gpu_of_its_rank(tmp_path: Path) -> None:
    target = written(tmp_path, INSISTS)
    trace = trainfit.capture(target, device=H100, cluster=trainfit.Cluster(16, 11))
    assert trace.ops
    with pytest.raises(UserCodeError, match=r"importing .*script\.py raised"):
        trainfit.capture(target, device="cpu", cluster=trainfit.Cluster(16, 11))


def test_libraries_get_the_truth_and_nothing_stays(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "some_library.py"
    library.parent.mkdir()
    library.write_text("import torch\nFOUND = torch.cuda.is_available()\n", encoding="utf-8")
    own = {"torch": torch}
    before = torch.cuda.is_available, torch.cuda.set_device
    sys.path.insert(0, str(library.parent))
    try:
        with imported_for(find_device(H100), None):
            import some_library  # type: ignore[import-not-found]

            exec(compile("found = torch.cuda.is_available()", str(tmp_path / "script.py"), "exec"), own)
    finally:
        sys.path.remove(str(library.parent))
        sys.modules.pop("some_library", None)
    assert own["found"] is True
    assert some_library.FOUND is before[0]()
    assert (torch.cuda.is_available, torch.cuda.set_device) == before
