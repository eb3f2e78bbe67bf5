"""The Trainer of transformers with `PlanCallback()`: a plan for its own step; training is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainfit import AutoPlan, PlanCallback  # noqa: E402
from trainfit.applying import runs_plan  # noqa: E402
from trainfit.applying.region import RegionCall  # noqa: E402
from trainfit.errors import BudgetTooSmall, OptionError, PlanError  # noqa: E402

WORDS, LENGTH = 32, 24


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random words, the same in every run."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


class OnlyOnce(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream that goes on where it was, however often it is asked for an iterator."""

    def __init__(self) -> None:
        self.stream = iter(range(1000))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in self.stream:
            yield Sentences()[number]


def make_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
            use_cache=False,
        )
    )


def make_trainer(
    folder: Path, callbacks: list[Any], *, kind: Any = None, data: Any = None, **options: Any
) -> Any:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": [],
            "dataloader_pin_memory": False,
            **options,
        }
    )
    return (kind or transformers.Trainer)(
        model=make_model(), args=arguments, train_dataset=data or Sentences(), callbacks=callbacks
    )


def history(trained: Any) -> list[Any]:
    names = ("loss", "grad_norm", "learning_rate")
    return [[row[name] for name in names] for row in trained.state.log_history if "loss" in row]


def same_weights(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.fixture
def region_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many regions ran; a plan that is not applied would pass every comparison."""
    ran: list[int] = []
    original = RegionCall.run
    monkeypatch.setattr(RegionCall, "run", lambda *args: ran.append(1) or original(*args))
    return ran


class Weighted(transformers.Trainer):  # type: ignore[misc,name-defined]
    """A loss of its own, which logs and counts."""

    asked = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        self.log({"asked": float(self.asked)})
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "bf16": {"bf16": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "workers": {"dataloader_num_workers": 1},
    "adafactor": {"optim": "adafactor"},
    "own loss": {"kind": Weighted},
    "stream": {"data": OnlyOnce},
}


def options(case: str) -> dict[str, Any]:
    given = dict(CASES[case])
    return {**given, "data": given["data"]()} if "data" in given else given


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, AutoPlan]]:
    """Train with a callback that finds memory enough; once for each case."""

    @cache
    def train(case: str) -> tuple[Any, AutoPlan]:
        callback = PlanCallback()
        trained = make_trainer(tmp_path_factory.mktemp("roomy"), [callback], **options(case))
        trained.train()
        assert callback.result is not None and callback.result.fits
        return trained, callback.result

    return train


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_the_same(
    tmp_path: Path, region_calls: list[int], roomy: Callable[[str], tuple[Any, AutoPlan]], case: str
) -> None:
    without = make_trainer(tmp_path, [], **options(case))
    without.train()
    fits, found = roomy(case)
    assert not region_calls
    tight = PlanCallback(budget=int(found.needed_bytes * 0.88))
    planned = make_trainer(tmp_path, [tight], **options(case))
    planned.train()
    assert tight.result is not None and tight.result.plan is not None
    assert tight.result.plan.peak_bytes <= tight.result.budget_bytes < found.needed_bytes
    assert region_calls
    for trained in (fits, planned):
        assert history(trained) == history(without)
        assert same_weights(trained, without)
        assert trained.state.log_history[0].keys() == without.state.log_history[0].keys()
    assert not runs_plan(planned.model)


def test_what_is_captured_is_what_runs(roomy: Callable[[str], tuple[Any, AutoPlan]]) -> None:
    """Accumulation holds gradients through the second forward; bf16 has casts; smoothing its own loss."""
    found = {case: roomy(case)[1] for case in ("plain", "accumulation", "bf16", "smoothing")}
    assert found["accumulation"].needed_bytes > found["plain"].needed_bytes
    assert len(found["accumulation"].trace.ops) > 1.5 * len(found["plain"].trace.ops)
    assert found["accumulation"].trace.settings.batch == 16
    assert found["bf16"].trace.settings.dtype != found["plain"].trace.settings.dtype
    sums = "aten.sum.dim_IntList"  # of log probabilities, which smoothing adds
    smoothed, plain = (
        [trace.signatures[op.signature].name for op in trace.ops].count(sums)
        for trace in (found["smoothing"].trace, found["plain"].trace)
    )
    assert smoothed > plain
    assert found["plain"].trace.settings.seq == LENGTH


def test_a_line_in_the_log_says_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainfit"):
        make_trainer(tmp_path, [PlanCallback()], max_steps=1).train()
    said = [record.message for record in caplog.records if record.name == "trainfit"]
    assert len(said) == 1
    assert said[0].startswith("trainfit: fits without a plan: nothing done. The step needs")


def test_without_logging_it_is_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainfit"), "hasHandlers", lambda: False)
    make_trainer(tmp_path, [PlanCallback()], max_steps=1).train()
    assert capsys.readouterr().err.count("trainfit: fits without a plan") == 1


def test_each_training_is_planned_anew(tmp_path: Path) -> None:
    callback = PlanCallback()
    trained = make_trainer(tmp_path, [callback], max_steps=1)
    trained.train()
    first = callback.result
    trained.train()
    assert callback.result is not None and callback.result is not first
    assert "get_batch_samples" not in vars(trained) and "log" not in vars(trained)


def test_a_budget_that_no_plan_meets_stops_before_training(tmp_path: Path) -> None:
    trained = make_trainer(tmp_path, [PlanCallback(budget="50KiB")])
    before = [parameter.clone() for parameter in trained.model.parameters()]
    with pytest.raises(BudgetTooSmall, match=r"no plan fits into 50\.00 KiB"):
        trained.train()
    assert trained.state.global_step == 0 and not runs_plan(trained.model)
    assert all(map(torch.equal, before, trained.model.parameters()))


def test_what_cannot_work_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="give PlanCallback a plan, or a budget"):
        PlanCallback("plan.json", budget="1GiB")
    with pytest.raises(OptionError, match="give budget= or reserve="):
        PlanCallback(budget="1GiB", reserve="1GiB")
    trained = make_trainer(tmp_path, [PlanCallback(device="h100-sxm")])
    with pytest.raises(OptionError, match="h100-sxm-80gb is a cuda device"):
        trained.train()
    trained = make_trainer(tmp_path, [])
    with pytest.raises(PlanError, match="Trainer that calls it, and here none does"):
        PlanCallback().on_train_begin(trained.args, trained.state, trained.control, model=trained.model)
    trained = make_trainer(tmp_path, [PlanCallback()])
    monkeypatch.setattr(trained.accelerator.state, "distributed_type", "DEEPSPEED")
    with pytest.raises(PlanError, match="trains with DEEPSPEED here, which PlanCallback"):
        PlanCallback()._wait(trained)
