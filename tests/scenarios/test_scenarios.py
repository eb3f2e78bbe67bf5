"""What people write: every script in `scripts/` is captured for the CPU and for a GPU, and run for real.

Each script is ordinary PyTorch as a user would send it to trainfit, with a `build()` that returns a
`trainfit.Step`. By default the predicted peak has to be the measured one, to the byte, on the CPU, and the
capture for a GPU has to count the parameters and optimizer state that the real step has. `EXPECTED` names the
scripts of which something else is true: memory that depends on data, or a refusal with its message.

To add one, put a file with a docstring and a `build()` into `scripts/` (20 to 60 lines, tiny sizes, so that
it takes about a second) and run `scripts/test tests/scenarios -k its_name`. If the answer is wrong, mend
trainfit, not the script.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import trainfit
from trainfit.capturing.random_stream import seeded
from trainfit.errors import TrainfitError
from trainfit.models.recipe import StepOptions
from trainfit.targets import load
from trainfit.traces.trace import Trace

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(path for path in FOLDER.glob("**/*.py") if "def build(" in path.read_text())
GPU = "h100"


@dataclass(frozen=True)
class Expected:
    """What is true of a script, where it is not the usual."""

    within: float = 0.0
    """How far the predicted peak may be from the measured one, as a share of it; `why` says the reason."""
    why: str = ""
    refused: str = ""
    """Part of the message with which it is refused on both devices."""
    refused_on_cpu: str = ""
    refused_on_gpu: str = ""
    warning: str = ""
    """Part of a warning that the result for a GPU has to carry."""
    other_models: bool = False
    """Whether the step has parameters that are not those of `Step.model`: a teacher, an average."""
    state_on_host: bool = False
    """Whether the optimizer works on the host, where its state is not the GPU's."""


SCALARS = "autograd keeps the number of `tensor * 0.5` as a tensor of 8 bytes, which capture does not see"
EXPECTED = {
    "compiled_blocks": Expected(warning="captured as eager PyTorch runs it"),
    "compiled_model": Expected(warning="captured as eager PyTorch runs it"),
    "dataloader_workers": Expected(within=0.25, why="how many finished batches wait is chance"),
    "ddpm": Expected(other_models=True),
    "distillation": Expected(other_models=True),
    "dqn": Expected(other_models=True),
    "ema_averaged_model": Expected(other_models=True),
    "ensemble": Expected(other_models=True),
    "exhausted_loader": Expected(refused="its data ended"),
    "flex_attention": Expected(
        refused_on_cpu="FlexAttention does not support backward on CPU",
        refused_on_gpu="whose kernel torch.compile makes for the GPU",
    ),
    "forgotten_backward": Expected(refused="the step runs no backward"),
    "hf_gradient_checkpointing": Expected(within=1e-4, why=SCALARS),
    "in_place_mistake": Expected(refused="that was modified in place by aten.add_"),
    "jagged_nested": Expected(refused_on_cpu="makes a nested tensor of the strided layout"),
    "leaking_step": Expected(warning="memory grows by 512 B with every run of the step"),
    "lora_by_hand": Expected(within=1e-4, why=SCALARS),
    "maml": Expected(within=0.005, why=SCALARS),
    "mixture_of_experts": Expected(within=1e-4, why=SCALARS),
    "optimizer_on_cpu": Expected(other_models=True, state_on_host=True),
    "peft_lora": Expected(within=1e-4, why=SCALARS),
    "relative_import": Expected(refused="name it as a module, with_siblings.relative_import:build"),
    "rlhf_rollout": Expected(other_models=True),
    "sparse_embedding": Expected(within=0.01, why="words drawn twice are added up", warning="to be distinct"),
    "two_gpus": Expected(refused_on_gpu="uses a second GPU"),
    "wgan_gp": Expected(other_models=True),
    "wrong_shape": Expected(refused=r"got \[8, 32\] X \[64, 4\]"),
}


def expected(script: Path) -> Expected:
    return EXPECTED.get(script.stem, Expected())


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One script, in an empty current folder, in which it may write; libraries may warn of their future."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what other tests left behind would be looked through in every capture
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield request.param
    gc.unfreeze()
    torch.set_num_threads(threads)


def target(script: Path) -> str:
    return f"{script}:build"


def verify(script: Path) -> trainfit.Verification:
    """Verify the eager step, which is what is predicted, with little time for the clock."""
    return trainfit.verify(target(script), costs="roofline", eager=True, runs=3)


def test_every_expectation_is_of_a_script() -> None:
    assert len(SCRIPTS) >= 60
    assert set(EXPECTED) <= {path.stem for path in SCRIPTS}


def test_on_the_cpu_the_predicted_peak_is_the_measured_one(script: Path) -> None:
    wanted = expected(script)
    if wanted.refused or wanted.refused_on_cpu:
        with pytest.raises(TrainfitError, match=wanted.refused or wanted.refused_on_cpu):
            verify(script)
        return
    # WHEN the step is predicted, and run for real
    result = verify(script)
    # THEN not a byte differs, or as little as is expected
    assert result.predicted_peak_bytes > 0
    if wanted.within:
        assert result.predicted_peak_bytes == pytest.approx(result.measured.peak_bytes, rel=wanted.within)
        assert wanted.why
    else:
        assert result.predicted_peak_bytes == result.measured.peak_bytes
        assert result.predicted_persistent_bytes == result.measured.persistent_bytes


def test_for_a_gpu_parameters_and_optimizer_state_are_those_of_the_real_step(script: Path) -> None:
    wanted = expected(script)
    if wanted.refused or wanted.refused_on_gpu:
        with pytest.raises(TrainfitError, match=wanted.refused or wanted.refused_on_gpu):
            trainfit.estimate(target(script), device=GPU)
        return
    # WHEN the step is captured for a GPU that is not here
    result = trainfit.estimate(target(script), device=GPU)
    # THEN it holds what the real step holds, counted by hand
    parameters, state = held_by_the_real_step(script)
    state = [] if wanted.state_on_host else state
    found = sizes_of(result.trace, "parameter")
    for size in parameters:
        assert size in found
        found.remove(size)
    assert wanted.other_models or not found
    found = sizes_of(result.trace, "optimizer_state")
    for size in state:
        assert size in found
        found.remove(size)
    assert result.peak_bytes > sum(parameters) + sum(state)
    assert result.fits
    assert result.time is not None and result.time.step_seconds > 0
    assert not wanted.warning or any(wanted.warning in warning for warning in result.warnings)


def held_by_the_real_step(script: Path) -> tuple[list[int], list[int]]:
    """Build and run the step; return the bytes of each parameter, and of each tensor of optimizer state.

    As a GPU hands them out, in blocks of 512 bytes. Counters of steps are single numbers on the host.
    """
    with seeded():
        step = load(target(script), StepOptions()).build()
        for _ in range(2):
            step.run()
    parameters = list(step.model.parameters())
    theirs = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept = [tensor for optimizer in step.optimizers for tensor in tensors_in(list(optimizer.state.values()))]
    state = [t for t in kept if t.numel() > 1 and t.untyped_storage()._cdata not in theirs]
    return blocks(parameters), blocks(state)


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []
    )


def blocks(tensors: list[torch.Tensor]) -> list[int]:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return [-(-size // 512) * 512 for size in storages.values()]


def sizes_of(trace: Trace, category: str) -> list[int]:
    """Return what the storages of a category take that are still there when the step ends."""
    return [
        size
        for storage, size in zip(trace.storages, trace.occupied_bytes)
        if storage.end is None and storage.category == category
    ]
