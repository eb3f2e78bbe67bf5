"""The Trainer of transformers runs a plan: same losses, same weights, and the model afterwards as before."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_for, save_products

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainfit import PlanCallback, apply, save_plan  # noqa: E402
from trainfit.applying import runs_plan  # noqa: E402
from trainfit.applying.region import RegionCall  # noqa: E402
from trainfit.capturing import capture  # noqa: E402
from trainfit.errors import FileFormatError, PlanError  # noqa: E402
from trainfit.plans.plan import Plan  # noqa: E402
from trainfit.steps.step import Step  # noqa: E402

LAYERS = 2


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random words, the same in every run; the last batch is smaller."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


def make_model(layers: int = LAYERS) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@cache
def plan(autocast: bool = False) -> Plan:
    def build() -> Step:
        model = make_model()
        words = torch.randint(0, 32, (4, 6))
        optimizer = torch.optim.AdamW(model.parameters())

        def run() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss: torch.Tensor = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Step(model, optimizer, run)

    modules = [f"LlamaForCausalLM.model.layers.{number}" for number in range(LAYERS)]
    return plan_for(capture(build), modules, save_products)


def trainer(folder: Path, callbacks: list[Any], model: Any = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": [],
            "dataloader_pin_memory": False,
            **options,
        }
    )
    model = make_model() if model is None else model
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=callbacks,
    )


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def same_weights(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.fixture
def region_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many regions ran; a plan that is not applied would pass every comparison."""
    ran: list[int] = []
    original = RegionCall.run
    monkeypatch.setattr(RegionCall, "run", lambda *args: ran.append(1) or original(*args))
    return ran


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"eval_strategy": "epoch"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_losses_and_weights_are_the_same(tmp_path: Path, region_calls: list[int], options: Any) -> None:
    made = []
    for callbacks in ([], [PlanCallback(plan(autocast="bf16" in options))]):
        trained = trainer(tmp_path, callbacks, **options)
        trained.train()
        made.append(trained)
    assert losses(made[0]) == losses(made[1])
    assert same_weights(*made)
    # Two epochs of three batches, of which the last is smaller.
    assert len(region_calls) == 2 * 3 * LAYERS


def test_a_plan_is_on_only_while_training(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
            seen.append(runs_plan(model))

    trained = trainer(tmp_path, [PlanCallback(plan()), Watch()])
    for _ in range(2):
        trained.train()
        assert not runs_plan(trained.model)
    assert seen == [True] * 12
    assert all("forward" not in vars(module) for module in trained.model.modules())


def test_training_is_resumed_with_a_plan_from_a_file(tmp_path: Path, region_calls: list[int]) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan(), file)
    whole = trainer(tmp_path / "whole", [])
    whole.train()
    first = trainer(tmp_path / "parts", [PlanCallback(file)], save_strategy="steps", save_steps=2)
    first.train()
    second = trainer(tmp_path / "parts", [PlanCallback(str(file))])
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert len(region_calls) == (6 + 4) * LAYERS
    assert losses(second) == losses(whole)
    assert same_weights(second, whole)


class Fails(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Interrupts the first training in its second step."""

    def __init__(self) -> None:
        self.failed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 2 and not self.failed:
            self.failed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("bf16", [False, True])
def test_training_again_after_it_was_interrupted(tmp_path: Path, region_calls: list[int], bf16: bool) -> None:
    made = []
    for callbacks in ([], [PlanCallback(plan(autocast=bf16))]):
        trained = trainer(tmp_path, [Fails(), *callbacks], bf16=bf16)
        with pytest.raises(KeyboardInterrupt):
            trained.train()
        trained.train()
        assert not runs_plan(trained.model)
        made.append(trained)
    assert same_weights(*made)
    # What accelerate has wrapped in the meantime runs no plan either.
    count = len(region_calls)
    assert count == (2 + 6) * LAYERS
    made[1].model(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert len(region_calls) == count


def test_each_model_of_model_init_gets_the_plan(tmp_path: Path, region_calls: list[int]) -> None:
    arguments = trainer(tmp_path, []).args
    trained = transformers.Trainer(
        model_init=lambda: make_model(),
        args=arguments,
        train_dataset=Sentences(),
        callbacks=[PlanCallback(plan())],
    )
    trained.train()
    trained.train()
    assert len(region_calls) == 2 * 6 * LAYERS


def test_a_plan_that_was_removed_meanwhile(tmp_path: Path) -> None:
    from trainfit import remove

    class Removes(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
            if runs_plan(model):
                remove(model)

    trained = trainer(tmp_path, [PlanCallback(plan()), Removes()])
    trained.train()
    assert not runs_plan(trained.model)


# What is refused ------------------------------------------------------------------------------------------


def test_checkpointing_of_transformers_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="activation_checkpointing=True cannot be combined"):
        trainer(tmp_path, [PlanCallback(plan())], activation_checkpointing=True)
    late = trainer(tmp_path, [], activation_checkpointing=True)
    late.add_callback(PlanCallback(plan()))
    with pytest.raises(PlanError, match="activation_checkpointing=True cannot be combined"):
        late.train()
    model = make_model()
    model.activation_checkpointing_enable()
    with pytest.raises(PlanError, match=r"Call model\.activation_checkpointing_disable\(\)"):
        trainer(tmp_path, [PlanCallback(plan())], model).train()


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has a region LlamaForCausalLM\.model\.layers\.1, which this"):
        trainer(tmp_path, [PlanCallback(plan())], make_model(layers=1)).train()


def test_a_model_that_runs_a_plan_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="runs a plan already"):
        trainer(tmp_path, [PlanCallback(plan())], apply(make_model(), plan())).train()


def test_several_devices_in_one_process_are_refused(tmp_path: Path) -> None:
    refused = trainer(tmp_path, [PlanCallback(plan())])
    refused.args._n_gpu = 2
    with pytest.raises(PlanError, match="with 2 GPUs in one process the Trainer uses DataParallel"):
        refused.callback_handler.on_train_begin(refused.args, refused.state, refused.control)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot read"):
        PlanCallback(tmp_path / "none.json")
    with pytest.raises(PlanError, match="a plan or the name of its file, not a int"):
        PlanCallback(3)  # type: ignore[arg-type]


def test_without_transformers_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import trainfit
try:
    trainfit.PlanCallback("plan.json")
except trainfit.MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("PlanCallback needs transformers, which is not installed:\n  pip install")
