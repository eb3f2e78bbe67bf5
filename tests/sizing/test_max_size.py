"""`max-batch`, `max-seq`, and lists of batches and devices, as they are asked for and answered."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import trainfit
from trainfit.api.choose import plan_step
from trainfit.api.request import Request
from trainfit.cli import commands as cli
from trainfit.sizing.size_results import MaxSize

STEP = """
import torch
import trainfit

def build(batch: int = 4, width: int = 16, seq: int = 4):
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch, seq, 8)
    return trainfit.Step.of(model, data, loss=lambda y: y.mean(), optimizer=optimizer)

def fixed(width: int = 16):
    return build(4, width)

def unused(batch: int = 4):
    return build(4)

def eighths(batch: int = 8):
    if batch % 8:
        raise ValueError("the batch is divided by eight")
    return build(batch)

def few(batch: int = 4):
    if batch > 50:
        raise ValueError("there are 50 samples")
    return build(batch)

def chunks(batch: int = 4):
    model = torch.nn.Linear(8, 8192)
    data = torch.randn(batch, 8)
    def run():
        loss = sum(model(part).square().mean() for part in data.split(8))
        loss.backward()
        model.zero_grad()
        return loss
    return trainfit.Step(model=model, optimizer=None, run=run)
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    return "step.py:build"


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, words)


def holds(found: MaxSize, budget: str, **options: Any) -> bool:
    """Whether the size fits and the next does not, asked one by one."""

    def needs(size: int) -> int:
        asked = trainfit.StepOptions(**{found.name: size, **options})  # type: ignore[arg-type]
        return trainfit.estimate(found.target, device="t4", options=asked).smallest_memory_bytes

    unit = int(budget.removesuffix("MiB")) << 20
    return needs(found.size) <= unit < needs(found.size + found.multiple_of)


def test_the_largest_batch_of_a_built_in_model() -> None:
    found = trainfit.max_batch("gpt2-tiny", device="t4", budget="300MiB")
    assert holds(found, "300MiB")
    assert found.limit == "memory" and found.next is not None and not found.next.fits
    assert found.captures == (2, 4, found.size, found.size + 1)
    assert [row.size for row in found.rows] == sorted({row.size for row in found.rows})
    assert found.rows[-1] == found.answer and found.answer.captured and found.answer.size == found.size
    at_answer = trainfit.estimate("gpt2-tiny", device="t4", options=trainfit.StepOptions(batch=found.size))
    assert at_answer.time is not None and at_answer.time.tokens_per_second == found.answer.tokens_per_second
    assert found.best is not None and found.best.rate == max(row.rate or 0 for row in found.rows)
    assert "\n" not in repr(found) and "gpt2-tiny on t4: batch" in repr(found)


def test_the_longest_sequence_is_that_of_the_model_or_of_the_memory() -> None:
    whole = trainfit.max_seq("gpt2-tiny", device="t4")
    assert (whole.size, whole.limit) == (256, "model")
    assert "256 positions" in whole.limit_text
    tight = trainfit.max_seq("llama-tiny", device="t4", batch=2, budget="100MiB", multiple_of=8)
    assert tight.size % 8 == 0 and tight.limit == "memory"
    assert holds(tight, "100MiB", batch=2)


def test_a_plan_makes_a_larger_batch_fit(tmp_path: Path) -> None:
    plain = trainfit.max_batch("gpt2-tiny", device="t4", budget="200MiB")
    planned = trainfit.max_batch("gpt2-tiny", device="t4", budget="200MiB", with_plan=True)
    assert planned.size > plain.size
    assert planned.answer.plan_adds is not None and planned.answer.plan_adds > 0
    options = trainfit.StepOptions(batch=planned.size)
    plan = trainfit.plan("gpt2-tiny", device="t4", budget="200MiB", options=options)
    assert plan.memory_bytes <= 200 << 20
    with pytest.raises(trainfit.BudgetTooSmall):
        options = trainfit.StepOptions(batch=planned.size + 1)
        trainfit.plan("gpt2-tiny", device="t4", budget="200MiB", options=options)
    trainfit.save_result(planned, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["with_plan"] is True


def test_functions_of_ones_own(step: str) -> None:
    found = trainfit.max_batch(step, device="t4", budget="40MiB")
    assert holds(found, "40MiB")
    longest = trainfit.max_seq(step, device="t4", batch=64, budget="40MiB")
    assert holds(longest, "40MiB", batch=64)

    def build(batch: int) -> trainfit.Step:
        model = torch.nn.Linear(4, 4)
        return trainfit.Step.of(model, torch.randn(batch, 4), loss=lambda y: y.mean())

    everything = trainfit.max_batch(build, device="h100")
    assert (everything.size, everything.limit, everything.next) == (1_000_000, "range", None)
    assert everything.answer.samples_per_second is not None


def test_a_step_that_takes_another_course_with_every_size(step: str) -> None:
    found = trainfit.max_batch("step.py:chunks", device="t4", budget="40MiB")
    assert holds(found, "40MiB")


def test_sizes_that_a_step_refuses(step: str) -> None:
    few = trainfit.max_batch("step.py:few", device="t4")
    assert (few.size, few.limit) == (50, "refused") and "there are 50 samples" in few.limit_text
    assert few.next is None
    eighths = trainfit.max_batch("step.py:eighths", device="t4", budget="40MiB", multiple_of=8)
    assert eighths.size % 8 == 0 and holds(eighths, "40MiB")
    result = run("max-batch", "step.py:eighths", "--device", "t4")
    assert result.exit_code == 2 and "the batch is divided by eight" in result.output
    assert "--multiple-of" in result.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("max-batch step.py:fixed", 2, "fixed() in step.py has no parameter named batch"),
        ("max-batch step.py:unused", 2, "the function takes batch, but does not use it"),
        ("estimate step.py:unused --batch 2,4", 2, "the function takes batch, but does not use it"),
        ("max-batch step.py:build --batch 4", 2, "--batch is what is looked for: leave it out"),
        ("max-seq step.py:build --seq 4", 2, "--seq is what is looked for: leave it out"),
        ("max-batch step.py:build --multiple-of 0", 2, "--multiple-of must be a whole number from 1 to"),
        ("max-batch step.py:build --budget 4", 2, "is not a size"),
        ("max-seq resnet-tiny", 2, "--seq does not apply to resnet-tiny"),
        (
            "max-batch step.py:build --budget 1KiB",
            3,
            "with batch 1, the smallest there is, does not fit into",
        ),
        ("max-batch step.py:build --budget 1KiB --with-plan", 3, "no plan fits into 1.00 KiB"),
        ("estimate step.py:build --batch 1,,2", 2, "has a comma with nothing beside it"),
        ("estimate step.py:build --batch 1,two", 2, "got 'two'"),
        (
            "estimate step.py:build --batch 1,0",
            2,
            "--batch must be a whole number from 1 to 1,000,000, got 0",
        ),
        ("estimate step.py:build --batch 1,2 --report a.html", 2, "--report is about one step"),
        ("estimate step.py:build --batch 1,2 --save-trace a.json", 2, "--save-trace is about one step"),
        ("plan step.py:build --batch 1,2 -o a.json", 2, "--output is about one step"),
        ("plan step.py:build --batch max --solver modules", 2, "leave --solver out"),
    ],
)
def test_mistakes_are_one_message(step: str, words: str, code: int, said: str) -> None:
    result = run(*words.split(), "--device", "t4")
    assert result.exit_code == code, result.output
    assert said in result.output.replace("\n", " ") and "Traceback" not in result.output


def test_python_says_so_too(step: str) -> None:
    trace = trainfit.capture(step, device="t4")
    with pytest.raises(trainfit.OptionError, match="a trace is of one batch"):
        trainfit.max_batch(trace, device="t4")  # type: ignore[arg-type]
    with pytest.raises(trainfit.OptionError, match="seq is given twice"):
        trainfit.max_batch(step, device="t4", seq=8, options=trainfit.StepOptions(seq=8))
    with pytest.raises(trainfit.OptionError, match="options is a trainfit"):
        trainfit.max_batch(step, device="t4", options={"seq": 8})  # type: ignore[arg-type]


def test_what_the_command_shows_and_writes(step: str, tmp_path: Path) -> None:
    words = ("max-batch", step, "--device", "t4", "--budget", "40MiB")
    result = run(*words, "--json", "r.json", "--csv", "tables", "--report", "r.html")
    assert result.exit_code == 0, result.output
    written = json.loads(Path("r.json").read_text())
    assert written["schema"] == 1 and written["size_name"] == "batch" and written["limit"] == "memory"
    assert written["smallest_memory_bytes"] <= 40 << 20 < written["next"]["smallest_memory_bytes"]
    assert f"the largest batch that fits is {written['size']:,}" in result.output
    assert "has the best throughput" in result.output and "captured" in result.output
    with Path("tables/sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["size"]) for row in rows] == [one["size"] for one in written["sizes"]]
    assert f"The largest batch is {written['size']:,}" in Path("r.html").read_text()
    assert run(*words, "-q").output.count("\n") == 1


def test_lists_are_a_table_and_an_array(step: str) -> None:
    words = ("estimate", step, "--batch", "2,4,max", "--device", "t4,h100", "--seq", "65536")
    result = run(*words, "--json", "r.json", "--csv", "tables")
    assert result.exit_code == 0, result.output
    written = json.loads(Path("r.json").read_text())
    devices = [(one["device"], one["settings"]["batch"]) for one in written]
    assert devices[:2] == [("t4", 2), ("t4", 4)] and devices[3:5] == [
        ("h100-sxm-80gb", 2),
        ("h100-sxm-80gb", 4),
    ]
    assert devices[5][1] > devices[2][1] > 4
    largest = trainfit.max_batch(step, device="t4", seq=65536)
    assert devices[2][1] == largest.size
    with Path("tables/steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["device"], int(row["batch"])) for row in rows] == devices
    single = run("estimate", step, "--batch", "max", "--device", "t4", "--seq", "65536", "--json", "-")
    assert json.loads(single.stdout)["settings"]["batch"] == largest.size


def test_plans_of_a_list(step: str) -> None:
    result = run("plan", "gpt2-tiny", "--batch", "4,16", "--device", "t4", "--budget", "150MiB")
    assert result.exit_code == 0 and "plan adds" in result.output, result.output
    nothing = run("plan", step, "--batch", "4,max", "--device", "t4", "--budget", "1KiB")
    assert nothing.exit_code == 3 and "no plan fits into 1.00 KiB" in nothing.output


def test_a_budget_above_the_device_is_said_to_be() -> None:
    said = "the budget of 100.00 GiB is more than t4 has for tensors"
    found = trainfit.max_seq("gpt2-tiny", device="t4", budget="100GiB")
    assert [text for text in found.warnings if said in text]
    step = Request("gpt2-tiny", "t4")
    assert [text for text in plan_step(step, "100GiB").warnings if said in text]
    assert not [text for text in plan_step(step, "1GiB").warnings if "is more than" in text]
