"""The commands as a user types them: results, exit codes, and one clear message for every mistake."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import trainfit
from trainfit.cli import commands as cli
from trainfit.devices.device_table import CONTEXT_BYTES

GOOD_STEP = """
import torch
import trainfit

def build(batch: int = 4):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    print("the user's own line")
    return trainfit.Step.of(model, torch.randn(batch, 8), loss=lambda y: y.mean(), optimizer=optimizer)
"""

# What is wrong with each file, and what the one message must say.
BAD_STEPS = {
    "raises": (
        "def build():\n    raise RuntimeError('my own mistake')",
        "build() in {file} raised RuntimeError: my own mistake",
    ),
    "run_raises": (
        """
import torch, trainfit
def build():
    model = torch.nn.Linear(2, 2)
    def run():
        raise ValueError("no batch left")
    return trainfit.Step(model=model, optimizer=None, run=run)
""",
        "raised ValueError: no batch left",
    ),
    "import_raises": ("import a_module_that_is_not_there", "importing {file} raised ModuleNotFoundError"),
    "syntax": ("def build(:\n", "importing {file} raised SyntaxError"),
    "returns_none": ("def build():\n    pass", "build() in {file} returned None (is the return missing?)"),
    "returns_model": (
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2)",
        "build() in {file} returned a Linear, not a trainfit.Step",
    ),
    "not_a_function": ("build = 7", "'build' in {file} is of type int, not a function"),
    "needs_arguments": ("def build(path):\n    pass", "build() in {file} needs path"),
    "meta_device": (
        """
import torch, trainfit
def build():
    with torch.device("meta"):
        model = torch.nn.Linear(8, 1)
    return trainfit.Step.of(model, torch.randn(4, 8), loss=lambda y: y.mean())
""",
        "the model is on the meta device",
    ),
    "no_parameters": (
        """
import torch, trainfit
def build():
    return trainfit.Step.of(torch.nn.ReLU(), torch.randn(4, 8), loss=lambda y: y.mean())
""",
        "has no parameters",
    ),
    "frozen": (
        """
import torch, trainfit
def build():
    model = torch.nn.Linear(8, 1).requires_grad_(False)
    return trainfit.Step.of(model, torch.randn(4, 8), loss=lambda y: y.mean())
""",
        "no parameter of the model requires a gradient",
    ),
    "no_backward": (
        """
import torch, trainfit
def build():
    model = torch.nn.Linear(8, 1)
    batch = torch.randn(4, 8)
    return trainfit.Step(model=model, optimizer=None, run=lambda: model(batch).mean())
""",
        "runs no backward",
    ),
    "no_loss": (
        """
import torch, trainfit
def build():
    return trainfit.Step.of(torch.nn.Linear(8, 8), torch.randn(4, 8))
""",
        "no scalar loss in the model's output",
    ),
    "not_callable_run": (
        """
import torch, trainfit
def build():
    return trainfit.Step(model=torch.nn.Linear(8, 1), optimizer=None, run=7)
""",
        "Step.run must be a function without arguments, got int",
    ),
}

USERS_OWN_ERROR = ("raises", "run_raises", "import_raises", "syntax")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def mistake(*arguments: str) -> str:
    """Run a command that must fail by the user's mistake, and return the one message."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    after = {
        path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert after.items() <= before.items(), "nothing may be written"
    return result.stderr


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_is_one_message(case: str) -> None:
    source, message = BAD_STEPS[case]
    Path("step.py").write_text(source)
    stderr = mistake("estimate", "step.py:build", "--device", "cpu", "--json", "out.json")
    *above, last = stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert message.format(file="step.py") in last
    # A traceback only where the user's own code raised, and then only the user's frames.
    assert bool(above) == (case in USERS_OWN_ERROR)
    assert "src/trainfit" not in "\n".join(above)
    if case in ("raises", "run_raises"):
        assert above[0].startswith("Traceback")
        assert "step.py" in "\n".join(above)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "none.py:build"], "there is no file 'none.py'"),
        (["estimate", "none.py"], "names a file but no function in it"),
        (["estimate", "no.such.module:build"], "there is no module 'no'"),
        (["estimate", "good.py:biuld"], "good.py has no function 'biuld'. Did you mean build?"),
        (["estimate", "good.py:"], "needs the name of a function after the colon"),
        (["estimate", "gtp2"], "there is no built-in model 'gtp2'. Did you mean gpt2"),
        (["estimate", "hf:none.json"], "none.json"),
        (["estimate", ""], "the target is empty"),
        (["estimate", "gpt2-tiny", "--device", "h10000"], "there is no device 'h10000'"),
        (["estimate", "gpt2-tiny", "--device", "a100"], "'a100' could be any of a100-sxm-40gb"),
        (["estimate", "gpt2-tiny", "--device", "none.json"], "the device file 'none.json' cannot be read"),
        (["estimate", "gpt2-tiny", "--batch", "0"], "--batch must be a whole number from 1"),
        (["estimate", "gpt2-tiny", "--batch", "-3"], "--batch must be a whole number from 1"),
        (["estimate", "gpt2-tiny", "--batch", "99999999999"], "--batch must be a whole number from 1"),
        (["estimate", "gpt2-tiny", "--batch", "many"], "--batch must be a whole number, several with commas"),
        (["estimate", "gpt2-tiny", "--seq", "999999"], "longer than the 256 positions"),
        (["estimate", "gpt2-tiny", "--image-size", "224"], "--image-size does not apply to gpt2-tiny"),
        (["estimate", "vit-tiny", "--image-size", "63"], "is not a multiple of the patch size"),
        (["estimate", "gpt2-tiny", "--dtype", "int4"], "--dtype must be one of fp32, bf16"),
        (["estimate", "gpt2-tiny", "--optimizer", "lion"], "--optimizer must be one of adamw"),
        (["estimate", "gpt2-tiny", "--task", "causal-lm"], "--task applies to hf: targets only"),
        (["estimate", "good.py:build", "--seq", "7"], "--seq cannot be passed on"),
        (["estimate", "gpt2-tiny", "--json", "no/such/folder.json"], "--json no/such/folder.json"),
        (["estimate", "gpt2-tiny", "--json", "."], "--json needs the name of a file"),
        (["estimate", "gpt2-tiny", "--save-trace", "no/such/t.json"], "--save-trace no/such/t.json"),
        (["estimate"], "Missing argument"),
        (["estimate", "gpt2-tiny", "--budgte", "1GiB"], "No such option"),
        (["estimat", "gpt2-tiny"], "No such command"),
        (["verify", "none.py:build"], "there is no file 'none.py'"),
        (["verify", "gpt2-tiny", "--batch", "0"], "--batch must be a whole number from 1"),
        (["verify", "gpt2-tiny", "--plan", "none.json"], "cannot read none.json"),
        (["devices", "nonsense"], "there is no device 'nonsense'"),
        (["estimate", "gpt2-tiny", "--device", "cpu", "--costs", "guess"], "--costs must be one of roofline"),
        (["estimate", "good.py:build", "--device", "h100", "--costs", "measured"], "this machine"),
        (["plan", "gpt2-tiny", "--budget", "much"], "'much' is not a size"),
        (["plan", "gpt2-tiny", "--budget", "0GiB"], "is less than one byte"),
        (["plan", "gpt2-tiny", "--budget", "120%"], "is more than the whole device"),
        (["plan", "gpt2-tiny", "-o", "no/such/plan.json"], "--output no/such/plan.json"),
        (["frontier", "gpt2-tiny", "--points", "0"], "--points must be from 1"),
        (["estimate", "gpt2-tiny", "--rank", "3"], "--rank is about one of several processes"),
        (["estimate", "gpt2-tiny", "--world-size", "4", "--rank", "4"], "there is no rank 4 in a world of 4"),
        (["frontier", "gpt2-tiny", "--mesh", "zp=2"], "there is no dimension 'zp'"),
        (["estimate", "good.py:build", "--mesh", "dp=2"], "has no parameter named mesh"),
        (
            [
                "plan",
                "gpt2-tiny",
                "--device",
                "h100",
                "--solver",
                "modules",
                "--mesh",
                "dp=2",
                "--fsdp-unit",
                "blocks.*.attention",
            ],
            "is none in the captured step",
        ),
        # Names that no file can have, and users that are not there.
        (["estimate", "x" * 300], "there is no built-in model"),
        (["estimate", "x" * 300 + ".py:build"], "there is no file"),
        (["estimate", "hf:" + "x" * 300], "there is no file or folder"),
        (["estimate", "~no-such-user/step.py:build"], "there is no file"),
        (["estimate", "hf:~no-such-user/config.json"], "there is no file or folder"),
        (["estimate", "gpt2-tiny", "--device", "~no-such-user/x.json"], "cannot be read"),
        (["estimate", "gpt2-tiny", "--json", "x" * 300], "File name too long"),
        (["plan", "gpt2-tiny", "-o", "x" * 300], "File name too long"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message(arguments: list[str], message: str) -> None:
    Path("good.py").write_text(GOOD_STEP)
    stderr = mistake(*arguments)
    assert message in " ".join(stderr.split())
    assert "Traceback" not in stderr


def test_a_real_step_is_refused_by_the_python_api() -> None:
    import torch

    step = trainfit.Step.of(torch.nn.Linear(8, 1), torch.randn(4, 8), loss=lambda y: y.mean())
    with pytest.raises(trainfit.StepError, match="pass the function that builds it"):
        trainfit.estimate(step)  # type: ignore[arg-type]


def test_what_was_there_before_survives_a_failure() -> None:
    Path("good.py").write_text(GOOD_STEP)
    Path("out.json").write_text("precious")
    mistake("estimate", "good.py:build", "--device", "nonsense", "--json", "out.json")
    assert Path("out.json").read_text() == "precious"


def test_estimate_prints_and_writes() -> None:
    Path("good.py").write_text(GOOD_STEP)
    result = run(
        "estimate", "good.py:build", "--device", "cpu", "--json", "out.json", "--save-trace", "t.json"
    )
    assert result.exit_code == 0, result.output
    assert "good.py:build: peak " in result.stdout and "fits in cpu" in result.stdout
    written = json.loads(Path("out.json").read_text())
    assert written["target"] == "good.py:build" and written["device"] == "cpu"
    trace = trainfit.load_trace("t.json")
    assert trainfit.estimate(trace, device="cpu").peak_bytes == written["peak_bytes"] > 0
    assert sorted(path.name for path in Path().glob("*.json")) == ["out.json", "t.json"]


def test_one_rank_of_a_mesh_is_estimated() -> None:
    command = (
        "estimate",
        "llama-tiny",
        "--mesh",
        "pp=2,dp=2",
        "--rank",
        "worst",
        "--batch",
        "2",
        "--seq",
        "32",
    )
    result = run(*command, "--device", "h100", "--json", "out.json")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    written = json.loads(Path("out.json").read_text())
    assert f"Rank {written['rank']} of 4, 8 per node, mesh pp=2, dp=2. At the peak it has " in text
    assert "It needs the most of those that can differ (0, 1, 2, 3), whose peaks are from " in text
    assert "Communication takes " in text
    assert (written["world_size"], written["mesh"]) == (4, {"pp": 2, "dp": 2})
    peaks = {one["rank"]: one["peak_bytes"] for one in written["ranks"]}
    assert peaks[written["rank"]] == written["peak_bytes"] == max(peaks.values())


def test_an_option_is_passed_on_to_the_users_function() -> None:
    Path("good.py").write_text(GOOD_STEP)
    peaks = []
    for batch in ("64", "512"):
        run("estimate", "good.py:build", "--device", "cpu", "--batch", batch, "--json", f"{batch}.json")
        peaks.append(json.loads(Path(f"{batch}.json").read_text())["peak_bytes"])
    assert peaks[1] > 4 * peaks[0]


def test_verify_prints_and_writes() -> None:
    Path("good.py").write_text(GOOD_STEP)
    result = run("verify", "good.py:build", "--json", "out.json")
    assert result.exit_code == 0, result.output
    assert "good.py:build on c" in result.stdout
    written = json.loads(Path("out.json").read_text())
    assert written["predicted_peak_bytes"] == written["measured_peak_bytes"]
    assert written["predicted_persistent_bytes"] == written["measured_persistent_bytes"]


LAYERED_STEP = """
import torch
import trainfit

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 256)
        self.down = torch.nn.Linear(256, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.dropout(torch.relu(self.up(x)), 0.1))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def build():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainfit.Step.of(model, torch.randn(512, 32), optimizer=optimizer)
"""


def test_a_plan_is_made_written_and_verified() -> None:
    """GIVEN a budget that the step exceeds, THEN the plan meets it for real, with the same results."""
    Path("layers.py").write_text(LAYERED_STEP)
    run("estimate", "layers.py:build", "--device", "cpu", "--json", "before.json")
    before = json.loads(Path("before.json").read_text())["peak_bytes"]
    budget = before * 6 // 10
    command = ("plan", "layers.py:build", "--device", "cpu", "--budget", f"{budget}B")
    result = run(*command, "-o", "plan.json", "--json", "planned.json")
    assert result.exit_code == 0, result.output
    assert "this plan" in result.stdout and "every second block" in result.stdout
    planned = json.loads(Path("planned.json").read_text())
    assert planned["feasible"] is True and planned["minimum_peak_bytes"] is None
    assert planned["peak_bytes"] <= planned["budget_bytes"] == budget < planned["baseline"]["peak_bytes"]
    assert planned["step_seconds"] >= planned["bound_seconds"] > 0
    assert len(planned["regions"]) >= 2

    result = run(
        "verify", "layers.py:build", "--plan", "plan.json", "--costs", "roofline", "--json", "real.json"
    )
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "the loss is equal, the gradients are equal, parameters and buffers afterwards are equal" in said
    real = json.loads(Path("real.json").read_text())
    assert real["loss_equal"] is True and real["gradients_equal"] is True
    assert real["max_gradient_difference"] == 0.0 and real["state_equal"] is True
    assert real["differences"] == real["not_compared"] == []
    assert real["baseline_measured_peak_bytes"] == before
    assert real["measured_peak_bytes"] == pytest.approx(planned["peak_bytes"], rel=0.01)


def test_a_budget_that_nothing_fits_into() -> None:
    Path("layers.py").write_text(LAYERED_STEP)
    arguments = ("layers.py:build", "--device", "cpu", "--budget", "100KB")
    result = run("plan", *arguments, "-o", "plan.json", "--json", "planned.json")
    assert result.exit_code == 3, result.output
    assert "no plan fits into 97.66 KiB. The smallest peak that was found is" in result.stderr
    planned = json.loads(Path("planned.json").read_text())
    assert planned["feasible"] is False
    assert planned["minimum_peak_bytes"] == planned["peak_bytes"] > 100_000
    assert not Path("plan.json").exists()


def test_without_a_budget_a_plan_leaves_the_devices_margin() -> None:
    """A device that has just what the step asks for: with the margin it does not fit as it is."""
    Path("layers.py").write_text(LAYERED_STEP)
    asked_for = ("--allocator", "none", "--json", "estimate.json")  # cuBLAS alone takes more than this step
    assert run("estimate", "layers.py:build", "--device", "h100", *asked_for).exit_code == 0
    usable = json.loads(Path("estimate.json").read_text())["smallest_memory_bytes"]
    speed = {"bandwidth_bytes_per_second": 1e12, "flops": {"fp32": 1e13}, "sm_count": 100}
    device = {"name": "small", "memory_bytes": CONTEXT_BYTES + usable, **speed}
    Path("small.json").write_text(json.dumps(device))
    arguments = ("plan", "layers.py:build", "--device", "small.json", "--allocator", "none")
    arguments += ("--json", "planned.json")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    planned = json.loads(Path("planned.json").read_text())
    assert planned["margin_bytes"] == math.ceil(0.04 * usable)
    assert planned["budget_bytes"] == usable - planned["margin_bytes"] >= planned["smallest_memory_bytes"]
    assert planned["regions"]
    assert "budget: the device without the margin of" in " ".join(result.stdout.split())
    result = run(*arguments, "--budget", f"{usable}B")
    planned = json.loads(Path("planned.json").read_text())
    assert (planned["budget_bytes"], planned["margin_bytes"], planned["regions"]) == (usable, 0, [])
    assert "margin" not in result.stdout


def test_the_frontier_prints_and_writes() -> None:
    Path("layers.py").write_text(LAYERED_STEP)
    arguments = ("--device", "h100", "--allocator", "none", "--points", "4", "--json", "points.json")
    result = run("frontier", "layers.py:build", *arguments)
    assert result.exit_code == 0, result.output
    points = json.loads(Path("points.json").read_text())["points"]
    assert len(points) >= 3
    assert [point["peak_bytes"] for point in points] == sorted(point["peak_bytes"] for point in points)
    seconds = [point["step_seconds"] for point in points]
    assert seconds == sorted(seconds, reverse=True)


def test_verify_refuses_what_this_machine_cannot_hold() -> None:
    stderr = mistake("verify", "gpt2-xl", "--batch", "4096")
    assert "--force" in stderr


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from trainfit.cli.commands import main; main()", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload,no-any-return]


def test_json_on_standard_output_is_alone_there() -> None:
    noisy = GOOD_STEP.replace(
        'print("the user\'s own line")', 'import os; print("from Python"); os.system("echo from a child")'
    )
    Path("noisy.py").write_text(noisy)
    for name in ("estimate", "verify"):
        done = command(name, "noisy.py:build", "--json", "-")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["target"] == "noisy.py:build"
        assert "from Python" in done.stderr and "from a child" in done.stderr


def test_piped_output_is_plain_text() -> None:
    done = command("devices", "h100", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())
    assert done.stderr == ""


def test_an_interrupt_is_quiet() -> None:
    Path("slow.py").write_text(
        "import time\ndef build():\n    print('ready', flush=True)\n    time.sleep(60)"
    )
    line = [sys.executable, "-m", "trainfit", "estimate", "slow.py:build"]
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # In a shell's background job interrupts are ignored, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_help_teaches_and_needs_no_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
from trainfit.cli import commands as cli
from trainfit.devices.device_table import CONTEXT_BYTES
lines = "--help", "estimate --help", "plan --help", "frontier --help", "verify -h", "devices", "devices h100"
lines += ("calibrate --help",)
for line in (*lines, "--version"):
    result = CliRunner().invoke(cli.app, line.split())
    assert result.exit_code == 0, result.output
    print(result.output)
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    for taught in (
        "trainfit estimate gpt2 --batch 8 --seq 1024 --device a100-40gb",
        "trainfit estimate train.py:build",
        "trainfit verify gpt2-tiny",
        "trainfit plan llama-3-8b --device h100",
        "trainfit.apply(model, plan)",
        "--force",
        "--save-trace",
        "trainfit calibrate -o my-gpu.json",
        "No GPU has",
        "h100-sxm-80gb",
        f"trainfit {trainfit.__version__}",
    ):
        assert taught in done.stdout
