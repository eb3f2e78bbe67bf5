"""What a function of the user's own gets: options, `--set` values, the device, an empty command line."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.errors import OptionError, StepError, TargetError, TrainfitError, UserCodeError
from trainfit.models.recipe import StepOptions
from trainfit.targets import load
from trainfit.targets.given_values import Typed, converted, read_assignments
from trainfit.traces.settings import settings_json

STEP = """
    import torch, trainfit
    model = torch.nn.Linear(4, 1)
    return trainfit.Step.of(model, torch.ones(2, 4), loss=lambda output: output.sum())
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def build(batch: int = 32, device: str = "cpu") -> trainfit.Step:
    """The function of docs/targets.md."""
    model = nn.Linear(512, 512).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(batch, 512, device=device)
    loss = lambda output: output.square().mean()  # noqa: E731
    return trainfit.Step.of(model, inputs, loss=loss, optimizer=optimizer)


def test_a_function_gets_the_device_and_the_options() -> None:
    estimate = trainfit.estimate(build, device="h100", options=StepOptions(batch=64))
    weights = 4 * (512 * 512 + 512)
    assert estimate.by_category["parameter"] == weights
    assert estimate.by_category["optimizer_state"] == weights
    assert estimate.trace.settings.batch == 64
    assert estimate.target == "build"


def test_a_function_gets_what_its_name_would_get() -> None:
    Path("train.py").write_text("from tests.test_user_functions import build\n")
    options = StepOptions(batch=8)
    by_name = trainfit.estimate("train.py:build", device="h100", options=options)
    assert by_name.peak_bytes == trainfit.estimate(build, device="h100", options=options).peak_bytes > 0


def test_the_errors_are_the_same() -> None:
    with pytest.raises(OptionError, match=r"--seq cannot be passed on: build\(\) has no parameter named seq"):
        trainfit.estimate(build, options=StepOptions(seq=8))
    with pytest.raises(TargetError, match=r"needs config; pass --set config=VALUE, or give a default"):
        trainfit.estimate(lambda config: build())
    with pytest.raises(StepError, match=r"nothing\(\) returned None \(is the return missing\?\)"):

        def nothing() -> Any: ...

        trainfit.estimate(nothing)
    with pytest.raises(OptionError, match=r"--task applies to hf: targets only"):
        trainfit.estimate(build, task="causal-lm")
    with pytest.raises(TargetError, match=r"a function that builds a trainfit.Step; got int"):
        trainfit.estimate(7)  # type: ignore[arg-type]


def test_a_partial_function_is_a_function() -> None:
    estimate = trainfit.estimate(functools.partial(build, batch=2), device="h100")
    assert estimate.trace.settings.batch == 2


def test_a_step_that_is_nowhere_on_the_gpu_is_no_answer() -> None:
    def on_the_cpu() -> trainfit.Step:
        return build(batch=4, device="cpu")

    with pytest.raises(StepError, match=r"nothing of the step is on the GPU: .* a parameter named device"):
        trainfit.estimate(on_the_cpu, device="h100")
    assert trainfit.estimate(on_the_cpu, device="cpu").peak_bytes > 0


# --set


def test_values_take_the_type_of_their_parameter() -> None:
    Path("user.py").write_text(
        "def build(n: int, rate: float = 0.1, deep: bool = False, name: str = 'a', free=None, "
        "sizes: list = (), maybe: int | None = 3):\n"
        "    print(repr([n, rate, deep, name, free, sizes, maybe]))" + STEP
    )
    typed = ["n=4", "rate=1", "deep=yes", "name=7", "free=[1, 'x']", "sizes=[2, 3]", "maybe=none"]
    target = load("user.py:build", StepOptions(set=read_assignments(typed)))
    arguments = settings_json(target.settings)["arguments"]
    assert arguments == {
        "n": 4, "rate": 1.0, "deep": True, "name": "7", "free": [1, "x"], "sizes": [2, 3], "maybe": None,
    }  # fmt: skip
    assert type(arguments["rate"]) is float


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "4", 4),
        (float, "1e-3", 1e-3),
        (str, "'quoted'", "quoted"),
        (str, "true", "true"),
        (bool, "False", False),
        (tuple[int, ...], "(1, 2)", (1, 2)),
        (int | str, "x", "x"),
        (int | str, "5", 5),
        (None, "1.5", 1.5),
        (None, "plain text", "plain text"),
        (torch.dtype, "bfloat16", "bfloat16"),
    ],
)
def test_conversions(kind: Any, text: str, value: object) -> None:
    found = converted("x", Typed(text), kind)
    assert found == value and type(found) is type(value)


def test_values_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--set n=four: n is of type int"):
        converted("n", Typed("four"), int)
    with pytest.raises(OptionError, match=r"--set n=2.5: n is of type int"):
        converted("n", Typed("2.5"), int)
    assert converted("n", "four", int) == "four"  # from Python it is taken as it is


@pytest.mark.parametrize("text", ["layers", "=4", "a b=3", "1x=2", ""])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(OptionError, match=r"--set takes name=value, as in --set layers=4, got"):
        read_assignments([text])
    with pytest.raises(OptionError, match=r"--set a is there twice"):
        read_assignments(["a=1", "a=2"])


def test_unknown_names_come_with_the_list() -> None:
    Path("user.py").write_text("def build(depth=2, width=3, device='cpu'):" + STEP)
    with pytest.raises(OptionError) as error:
        load("user.py:build", StepOptions(set={"layers": 4}))
    assert str(error.value) == ("--set layers: build() in user.py has no 'layers'. There are: depth, width.")
    with pytest.raises(OptionError, match="named by --device"):
        load("user.py:build", StepOptions(set={"device": "cuda"}))


def test_an_option_twice_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--batch and --set batch are the same; give one of them"):
        load(build, StepOptions(batch=2, set={"batch": 4}))


def test_settings_of_a_built_in_model() -> None:
    target = load("gpt2-tiny", StepOptions(set=read_assignments(["layers=2", "context=64"])))
    assert (target.settings.seq, settings_json(target.settings)["model"]["layers"]) == (64, 2)
    model: Any = target.build().model
    assert len(model.blocks) == 2
    with pytest.raises(OptionError, match=r"--set layers=0: the least is 1"):
        load("gpt2-tiny", StepOptions(set={"layers": 0}))
    with pytest.raises(
        OptionError, match=r"gpt2-tiny has no 'depth'. There are: vocab_size, context, layers"
    ):
        load("gpt2-tiny", StepOptions(set={"depth": 2}))
    with pytest.raises(OptionError, match=r"--set layers=two: layers is of type int"):
        load("gpt2-tiny", StepOptions(set=read_assignments(["layers=two"])))


def test_fields_of_a_config() -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 32,
    }
    Path("config.json").write_text(json.dumps(config))
    typed = read_assignments(["n_layer=1", "hidden_size=16", "resid_pdrop=0"])
    target = load("hf:config.json", StepOptions(batch=1, set=typed))
    step = target.build()
    changed: Any = step.model.config
    assert (changed.n_layer, changed.n_embd, changed.resid_pdrop) == (1, 16, 0.0)
    assert settings_json(target.settings)["model"]["hidden_size"] == 16
    with pytest.raises(OptionError, match=r"the config of gpt2 has no 'layers'. There are:"):
        load("hf:config.json", StepOptions(set={"layers": 1}))
    with pytest.raises(OptionError, match=r"has no config 'text_config' inside it"):
        load("hf:config.json", StepOptions(set={"text_config.layers": 1}))


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("gpt2-tiny", "layers=1000000000000", "--set layers=1000000000000: the most is 10,000."),
        ("gpt2-tiny", "hidden=1000000000000", "--set hidden=1000000000000: the most is 10,000,000."),
        ("gpt2-tiny", "dropout=1.5", "--set dropout=1.5: the most is 1."),
        ("gpt2-tiny", "heads=7", "--set: hidden (128) must be a multiple of heads (7)."),
        ("llama-3-8b", "kv_heads=5", "--set: heads (32) must be a multiple of kv_heads (5)."),
        ("llama-3-8b", "hidden=96", "--set: hidden / heads must be even, for rotary positions; it is 3."),
        ("mixtral-8x7b", "experts=1", "--set: experts_per_token (2) must be at most experts (1)."),
        ("mixtral-8x7b", "experts=1000000000", "--set experts=1000000000: the most is 10,000."),
    ],
)
def test_settings_that_no_built_in_model_has(name: str, given: str, said: str) -> None:
    with pytest.raises(OptionError) as error:
        load(name, StepOptions(set=read_assignments([given])))
    assert str(error.value) == said


def test_sizes_that_cannot_be_counted_are_one_message() -> None:
    def build() -> trainfit.Step:
        model = torch.nn.Linear(1 << 29, 1 << 29, bias=False)
        model.more = torch.nn.ParameterList([model.weight.detach().clone() for _ in range(8)])
        return trainfit.Step.of(model, torch.ones(2, 1 << 29), loss=torch.sum)

    with pytest.raises(StepError, match=r"bytes in all, the largest 1\.15e\+18: more than can be counted"):
        trainfit.estimate(build, device="h100")


def test_things_of_the_wrong_kind_are_one_message() -> None:
    plan = trainfit.plan(build, device="h100", budget="4MiB", allocator=None)
    model = build().model
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: trainfit.estimate(build, options={"batch": 3}), "options is a trainfit.StepOptions"),  # type: ignore[arg-type]
        (lambda: trainfit.estimate(build, device=5), "a device is named by a text, .* got 5"),  # type: ignore[arg-type]
        (lambda: trainfit.estimate(model), "a function that builds a trainfit.Step; got Linear"),
        (lambda: trainfit.apply(model, "plan.json"), "load_plan reads it from a file; got 'plan.json'"),  # type: ignore[arg-type]
        (lambda: trainfit.apply(build(), plan), "applied to a torch.nn.Module, got Step"),  # type: ignore[arg-type]
    ]
    for call, said in wrong:
        with pytest.raises(TrainfitError, match=said):
            call()


# The command line that a script sees

PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
"""


@pytest.mark.parametrize("place", ["user.py", "module_with_parser"])
def test_a_parser_gets_its_defaults(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PARSER + "args = parser.parse_args()\ndef build():\n    parser.parse_args()" + STEP
    for name in ("user.py", "module_with_parser.py"):
        Path(name).write_text(text)
    words = ["trainfit", "estimate", place, "--device", "h100"]
    monkeypatch.setattr(sys, "argv", words)
    load(f"{place}:build", StepOptions()).build()
    assert sys.argv is words


def test_a_parser_in_run_gets_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        PARSER
        + """
import torch, trainfit
def build():
    model = torch.nn.Linear(4, 4)
    return trainfit.Step(model, None, lambda: parser.parse_args().width)
"""
    )
    Path("user.py").write_text(text)
    words = ["trainfit", "estimate", "user.py:build", "--device", "h100"]
    monkeypatch.setattr(sys, "argv", words)
    assert load("user.py:build", StepOptions()).build().run() == 4
    assert sys.argv is words


def test_a_parser_that_needs_something_says_what() -> None:
    text = (
        PARSER + "parser.add_argument('--data', required=True)\ndef build():\n    parser.parse_args()" + STEP
    )
    Path("user.py").write_text(text)
    with pytest.raises(UserCodeError) as error:
        load("user.py:build", StepOptions()).build()
    message = str(error.value)
    assert message.startswith(
        "build() in user.py reads a command line, and there is none: the following arguments are required: "
        "--data."
    )
    assert "--set name=value" in message


@pytest.mark.parametrize(
    "inside", ["from .parts import x\ndef build():", "def build():\n    from .parts import x"]
)
def test_a_relative_import_says_how_to_name_the_module(inside: str, tmp_path: Path) -> None:
    package = tmp_path / "project" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "parts.py").write_text("x = 1")
    (package / "steps.py").write_text(inside + STEP)
    with pytest.raises(TargetError) as error:
        load("project/training/steps.py:build", StepOptions()).build()
    assert str(error.value) == (
        "project/training/steps.py has a relative import (from . import ...), which works only inside of a "
        f"package: in the folder {tmp_path} name it as a module, project.training.steps:build."
    )
    load("project.training.steps:build", StepOptions()).build()


def test_python_minus_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainfit", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"trainfit {trainfit.__version__}\n")
