"""What grew between two results: worked out by hand, on real models, on files that are garbage."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trainfit
from trainfit.cli.commands import app
from trainfit.costs.estimates import Estimate
from trainfit.errors import FileFormatError, GrewTooMuch, OptionError
from trainfit.report.diff_data import ModuleChange
from trainfit.timing.load import LoadMeter


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int, name: str = "up") -> None:
        super().__init__()
        self.inner = name
        self.add_module(name, torch.nn.Linear(width, inner))
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = torch.relu(self.get_submodule(self.inner)(x))
        out: torch.Tensor = self.down(inside)
        return out


class Net(torch.nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class OtherNet(Net):
    pass


def step(model: Callable[[], torch.nn.Module], batch: int = 64) -> Callable[[], trainfit.Step]:
    def build() -> trainfit.Step:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def run() -> torch.Tensor:
            loss: torch.Tensor = net(torch.randn(batch, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return trainfit.Step(model=net, optimizer=optimizer, run=run)

    return build


def estimated(model: Callable[[], torch.nn.Module], batch: int = 64) -> Estimate:
    return trainfit.estimate(step(model, batch), device="cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_measurement_of_this_machine() -> Iterator[None]:
    """Estimates that are compared have the same machine: not one measured again because it is less busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadMeter, "should_repeat", lambda self, load: False)
        yield


@pytest.fixture(scope="module")
def usual() -> Estimate:
    return estimated(lambda: Net(*(Block(32, 48) for _ in range(4))))


def changed(old: Estimate, new: Estimate) -> dict[str, ModuleChange]:
    return {one.module: one for one in trainfit.diff(old, new).data.modules}


def test_nothing_grew(usual: Estimate) -> None:
    found = trainfit.diff(usual, usual, max_peak="0%", max_time=0.0)
    data = found.data
    assert (data.peak_share, data.time_share, found.exceeded) == (0.0, 0.0, ())
    assert not data.modules and not data.operators and not data.categories and not data.others
    found.check()
    assert "unchanged" in str(found) and "Within what is allowed" in str(found)


def test_one_block_is_wider(usual: Estimate) -> None:
    """The third block has 16 more inner features: weights and biases of both layers, and activations."""
    wide = estimated(lambda: Net(*(Block(32, 64 if number == 2 else 48) for number in range(4))))
    data = trainfit.diff(usual, wide).data
    modules = {one.module: one for one in data.modules}
    assert modules["Net.blocks.2.up"].parameter_change_bytes == 4 * (16 * 32 + 16)
    assert modules["Net.blocks.2.down"].parameter_change_bytes == 4 * 16 * 32
    assert modules["Net.blocks.2"].parameter_change_bytes == 4 * (2 * 16 * 32 + 16)
    # relu's result is kept for backward, 16 more features of 64 samples; the block's own forward makes it.
    assert modules["Net.blocks.2"].activation_change_bytes == 4 * 64 * 16
    # The peak moved to it: what the last block has made by then is there as well, but it is not larger.
    assert data.old.peak_at != data.new.peak_at and "The peak moved" in str(trainfit.diff(usual, wide))
    for name, one in modules.items():
        if name.startswith(("Net.blocks.0", "Net.blocks.1", "Net.blocks.3")):
            assert (one.parameter_change_bytes, one.activation_change_bytes, one.change_seconds) == (
                0,
                0,
                0.0,
            )
    peak = data.figure("peak_bytes")
    assert (
        peak.change == wide.peak_bytes - usual.peak_bytes == sum(one.change or 0 for one in data.categories)
    )
    assert data.peak_share == pytest.approx(wide.peak_bytes / usual.peak_bytes - 1)
    # What is around it grew by the same, and is explained by it.
    assert modules["Net"].explained_inside and modules["Net.blocks"].explained_inside
    assert not modules["Net.blocks.2"].explained_inside


def test_all_blocks_are_wider_and_there_are_more(usual: Estimate) -> None:
    wider = changed(usual, estimated(lambda: Net(*(Block(32, 64) for _ in range(4)))))
    assert wider["Net.blocks.*"].parameter_change_bytes == 4 * 4 * (2 * 16 * 32 + 16)
    assert (wider["Net.blocks.*"].old_count, wider["Net.blocks.*"].new_count) == (4, 4)
    more = changed(usual, estimated(lambda: Net(*(Block(32, 48) for _ in range(6)))))
    assert (more["Net.blocks.*"].old_count, more["Net.blocks.*"].new_count) == (4, 6)
    assert more["Net.blocks.*"].parameter_change_bytes == 2 * 4 * (2 * 48 * 32 + 48 + 32)
    assert more["Net.blocks.*"].state == "changed"
    fewer = changed(usual, estimated(lambda: Net(Block(32, 48))))
    assert fewer["Net.blocks.*"].held_change_bytes < 0


def test_other_names_are_seen_as_such(usual: Estimate) -> None:
    renamed = changed(usual, estimated(lambda: Net(*(Block(32, 48, "widen") for _ in range(4)))))
    assert set(renamed) == {"Net.blocks.*.widen"}
    one = renamed["Net.blocks.*.widen"]
    assert (one.state, one.was, one.held_change_bytes) == ("renamed", "Net.blocks.*.up", 0)
    # A root of another class is the same root: its name is said once.
    other = trainfit.diff(usual, estimated(lambda: OtherNet(*(Block(32, 48) for _ in range(4)))))
    assert [one.module for one in other.data.modules] == ["OtherNet"]
    assert "was Net" in str(other)


def test_added_and_removed_modules_have_figures_on_one_side(usual: Estimate) -> None:
    class Headed(Net):
        def __init__(self) -> None:
            super().__init__(*(Block(32, 48) for _ in range(4)))
            self.head = torch.nn.Linear(32, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(super().forward(x))
            return out

    headed = estimated(Headed)
    grown = trainfit.diff(usual, headed)
    head = next(one for one in grown.data.modules if one.module == "Headed.head")
    assert (head.state, head.old_count, head.new_count) == ("added", 0, 1)
    assert (head.old_held_bytes, head.parameter_change_bytes) == (0, 4 * (32 * 1000 + 1000))
    assert "head new" in str(grown)
    shrunk = trainfit.diff(headed, usual)
    gone = next(one for one in shrunk.data.modules if one.module == "Headed.head")
    assert (gone.state, gone.held_change_bytes) == ("removed", -head.held_change_bytes)
    assert shrunk.data.figure("peak_bytes").change == -(grown.data.figure("peak_bytes").change or 0)


def test_operators_are_compared_by_calls_and_seconds(usual: Estimate) -> None:
    more = estimated(lambda: Net(*(Block(32, 48) for _ in range(6))))
    found = {one.operator: one for one in trainfit.diff(usual, more).data.operators}
    relu = found["aten.relu.default"]
    assert (relu.old_calls, relu.new_calls) == (4, 6)
    assert usual.time is not None and relu.old_seconds is not None
    assert relu.change_seconds == pytest.approx(relu.old_seconds / 2)
    total = sum(one.change_seconds or 0.0 for one in found.values())
    assert more.time is not None
    assert total == pytest.approx(more.time.busy_seconds - usual.time.busy_seconds)


def files(folder: Path, old: Estimate, new: Estimate) -> list[str]:
    for name, result in (("old", old), ("new", new)):
        trainfit.save_trace(result.trace, folder / f"{name}-trace.json")
        from trainfit.report.json_result import result_json, write_json
        from trainfit.report.reading import estimate_data

        write_json(result_json(estimate_data(result)), str(folder / f"{name}.json"))
    return [str(folder / "old.json"), str(folder / "new.json")]


def test_files_say_what_results_say(usual: Estimate, tmp_path: Path) -> None:
    wide = estimated(lambda: Net(*(Block(32, 64) for _ in range(4))))
    old, new = files(tmp_path, usual, wide)
    from_files, from_results = trainfit.diff(old, new).data, trainfit.diff(usual, wide).data
    assert from_files.figures == from_results.figures
    assert from_files.modules == from_results.modules and from_files.operators == from_results.operators
    traces = trainfit.diff(tmp_path / "old-trace.json", tmp_path / "new-trace.json").data
    assert traces.kind == "trace" and traces.time_share is None
    assert traces.figure("peak_bytes") == from_results.figure("peak_bytes")
    assert traces.categories == from_results.categories
    assert {one.module: one.held_change_bytes for one in traces.modules} == {
        one.module: one.held_change_bytes for one in from_results.modules
    }
    assert all(one.change_seconds is None for one in traces.modules)
    timed = trainfit.diff(usual.trace, wide.trace, device="cpu").data
    assert timed.figure("step_seconds").change == from_results.figure("step_seconds").change


def test_what_was_asked_for_differently_is_said(usual: Estimate) -> None:
    larger = trainfit.estimate("gpt2-tiny", options=trainfit.StepOptions(batch=2, seq=32), device="a100-40gb")
    smaller = trainfit.estimate("gpt2-tiny", options=trainfit.StepOptions(batch=1, seq=32), device="h100")
    found = trainfit.diff(larger, smaller)
    assert {one.name: (one.old, one.new) for one in found.data.others} == {
        "device": ("a100-sxm-40gb", "h100-sxm-80gb"),
        "batch": ("2", "1"),
    }
    assert "device: a100-sxm-40gb before, h100-sxm-80gb now" in str(found)
    with pytest.raises(OptionError, match="like with like: the device of old is a100-sxm-40gb"):
        trainfit.diff(larger, smaller, max_peak="5%")


def test_plans_are_compared_by_regions() -> None:
    from trainfit.api.choose import plan_step
    from trainfit.api.request import Request

    options = trainfit.StepOptions(batch=8, seq=128)
    request = Request("gpt2-tiny", "a100-40gb", options, allocator="none")
    trace = request.trace()
    tight, loose = (
        plan_step(Request(trace, "a100-40gb", allocator="none"), budget=size << 20) for size in (70, 80)
    )
    data = trainfit.diff(loose, tight).data
    assert data.kind == "plan" and not data.modules
    assert {one.name for one in data.others} == {"budget"}
    assert sum(one.new_regions - one.old_regions for one in data.regions) == len(tight.plan.regions) - len(
        loose.plan.regions
    )
    assert data.figure("step_seconds").change == tight.plan.step_seconds - loose.plan.step_seconds


def test_growth_is_allowed_up_to_a_share(usual: Estimate) -> None:
    wide = estimated(lambda: Net(*(Block(32, 64) for _ in range(4))))
    share = wide.peak_bytes / usual.peak_bytes - 1
    assert not trainfit.diff(usual, wide, max_peak=share).exceeded
    assert not trainfit.diff(wide, usual, max_peak=0, max_time="0%").exceeded  # it shrank
    found = trainfit.diff(usual, wide, max_peak=share / 2)
    with pytest.raises(GrewTooMuch, match="the peak grew by") as raised:
        found.check()
    assert raised.value.exit_code == 4
    for wrong in ("2", "-2%", "nan%", "2 %%", "9" * 50 + "%", -0.1, float("nan"), float("inf"), True, [2]):
        with pytest.raises(OptionError, match="--max-peak"):
            trainfit.diff(usual, usual, max_peak=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--max-time needs the step's time"):
        trainfit.diff(usual.trace, usual.trace, max_time="5%")
    with pytest.raises(OptionError, match="--device is for traces"):
        trainfit.diff(usual, usual, device="h100")
    with pytest.raises(OptionError, match="compare two of a kind"):
        trainfit.diff(usual, usual.trace)


def test_the_command(usual: Estimate, tmp_path: Path) -> None:
    wide = estimated(lambda: Net(*(Block(32, 64) for _ in range(4))))
    both = files(tmp_path, usual, wide)
    run = CliRunner().invoke
    plain = run(app, ["diff", *both])
    assert plain.exit_code == 0 and "blocks.*.up (4 ×)" in plain.stdout
    allowed = run(app, ["diff", *both, "--max-peak", "900%", "--max-time", "900%"])
    assert allowed.exit_code == 0 and "Within what is allowed" in allowed.stdout
    out, tables = tmp_path / "diff.json", tmp_path / "tables"
    gate = run(app, ["diff", *both, "--max-peak", "1%", "--json", str(out), "--csv", str(tables)])
    assert gate.exit_code == 4 and gate.stderr.startswith("error: the peak grew by")
    written = json.loads(out.read_text())
    assert written["exceeded"] and written["max_peak_share"] == 0.01 and written["schema"] == 1
    with (tables / "modules.csv").open(newline="") as text:
        rows = {row["module"]: row for row in csv.DictReader(text)}
    assert int(rows["Net.blocks.*.up"]["parameter_change_bytes"]) == 4 * 4 * (16 * 32 + 16)
    to_stdout = run(app, ["diff", *both, "--json", "-"])
    assert json.loads(to_stdout.stdout)["figures"][0]["name"] == "peak_bytes"
    assert "traceback" not in (gate.output + plain.output).lower()


def spoiled(good: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**good, **values}


def test_garbage_is_one_message(usual: Estimate, tmp_path: Path) -> None:
    old, _ = files(tmp_path, usual, usual)
    good = json.loads(Path(old).read_text())
    deep = [{**good["modules"][0], "depth": depth} for depth in range(5000)]
    wrong: dict[str, Any] = {
        "text": b"hello",
        "empty": b"",
        "cut": Path(old).read_bytes()[:5000],
        "list": [1, 2],
        "object": {},
        "plan file": {"format": "trainfit-plan", "schema": 1},
        "schema": spoiled(good, schema=99),
        "peak": spoiled(good, peak_bytes="large"),
        "negative": spoiled(good, peak_bytes=-1),
        "nan": Path(old).read_bytes().replace(b'"schema": 1', b'"schema": NaN', 1),
        "modules": spoiled(good, modules=[{"name": "x"}]),
        "depth": spoiled(good, modules=[{**good["modules"][0], "depth": 3}]),
        "deep": spoiled(good, modules=deep),
        "seconds": spoiled(good, step_seconds=[]),
        "categories": spoiled(good, by_category={"activation": 1.5}),
        "gzip": gzip.compress(b"{")[:10],
    }
    for name, content in wrong.items():
        file = tmp_path / f"{name}.bad"
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(FileFormatError) as raised:
            trainfit.diff(old, file)
        assert f"{name}.bad" in str(raised.value), name
        result = CliRunner().invoke(app, ["diff", str(file), old])
        assert result.exit_code == 2 and result.stderr.startswith("error: "), name
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps(spoiled(good, settings=[1], warnings=7, extra={"a": 1})))
    assert trainfit.diff(old, strange).peak_share == 0.0
    hostile = spoiled(good, target="\x1b[31m[bold]x[/bold]")
    strange.write_text(json.dumps(hostile))
    assert "\x1b" not in str(trainfit.diff(old, strange))
    with pytest.raises(OptionError, match="got int"):
        trainfit.diff(old, 5)  # type: ignore[arg-type]


def test_results_by_hand(tmp_path: Path) -> None:
    """Two small results, written as text."""

    def module(name: str, depth: int, parameters: int, at_peak: int, seconds: float) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "parameter_bytes": parameters,
            "buffer_bytes": 0,
            "activation_bytes": at_peak,
        }
        figures |= {"at_peak_bytes": at_peak, "forward_seconds": seconds, "backward_seconds": 2 * seconds}
        return {"name": name, "class_name": "M", "depth": depth, **figures}

    def result(name: str, attention: tuple[int, int, float], peak: int, seconds: float) -> str:
        modules = [
            module("M", 0, 100 + attention[0], 50 + attention[1], 1 + attention[2]),
            module("M.h.0", 1, 50, 25, 0.5),
            module("M.h.1", 1, 50, 25, 0.5),
            module("M.attn", 1, *attention),
        ]
        document = {
            "schema": 1,
            "target": "m",
            "device": "d",
            "torch": "2",
            "ops": 5,
            "peak_bytes": peak,
            "by_category": {"activation": peak - 100, "parameter": 100},
            "step_seconds": seconds,
            "modules": modules,
            "operators": [{"name": "aten.mm", "calls": 3, "seconds": seconds}],
        }
        (tmp_path / name).write_text(json.dumps(document))
        return str(tmp_path / name)

    old, new = result("a", (10, 40, 1.0), 1000, 4.0), result("b", (30, 90, 1.5), 1070, 5.0)
    data = trainfit.diff(old, new, max_peak="7%", max_time="20%").data
    (attention, root) = sorted(data.modules, key=lambda one: one.module == "M")
    assert (attention.module, attention.held_change_bytes, attention.change_seconds) == ("M.attn", 70, 1.5)
    assert (root.held_change_bytes, root.explained_inside) == (70, True)
    assert [(one.name, one.change) for one in data.categories] == [("activation", 70)]
    assert data.exceeded == ("the step grew by 25.00%, from 4.00 s to 5.00 s; allowed is 20.00%",)
    (operator,) = data.operators
    assert (operator.old_calls, operator.new_calls, operator.change_seconds) == (3, 3, 1.0)
