"""`compare`: the figures are those of `estimate` and `plan`, costs are those worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import trainfit
from trainfit.basics.count_text import parse_count, short_count
from trainfit.capturing.asked_device import questions_asked
from trainfit.cli import commands as cli
from trainfit.devices.architectures import same_attention
from trainfit.devices.device_table import find_device, known_devices
from trainfit.errors import BudgetTooSmall, OptionError, StepError
from trainfit.renting.compared_rows import copies_of
from trainfit.renting.price_text import assigned_prices, named_prices, read_prices
from trainfit.renting.run_length import RunLength, StepRate, read_length
from trainfit.renting.shared_captures import SharedCaptures
from trainfit.renting.which_device import USUAL_DEVICES, read_devices
from trainfit.traces.ranks import Cluster


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture
def small_device(tmp_path: Path) -> str:
    """An A100 with so little memory that gpt2-tiny needs a plan."""
    file = tmp_path / "small.json"
    entry = {"memory_bytes": 2**20 * (450 + 225), "architecture": "sm_80", "sm_count": 108}
    entry |= {"bandwidth_bytes_per_second": 1.5e12, "flops": {"fp32": 19.5e12}, "name": "small"}
    file.write_text(json.dumps(entry))
    return str(file)


@pytest.mark.parametrize(
    ("text", "count"),
    [("10B", 10**10), ("1.2M", 1_200_000), ("300k", 300_000), ("1,000", 1000), ("2T", 2 * 10**12), (7, 7)],
)
def test_counts_as_people_write_them(text: str | int, count: int) -> None:
    assert parse_count(text, "--tokens") == count
    assert parse_count(short_count(count), "--tokens") == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "ten", "1e9", "9" * 50, "1Q", "٣", 1.5, math.nan, True]
)
def test_what_is_no_count(text: str | float) -> None:
    with pytest.raises(OptionError, match="--tokens"):
        parse_count(text, "--tokens")


def test_a_run_worked_out_by_hand() -> None:
    # 2 copies of a step of 4 samples and 4096 tokens, in half a second, on 8 devices.
    rate = StepRate(seconds=0.5, samples=4, tokens=4096, devices=8, copies=2)
    assert rate.per_second(rate.tokens) == 16384
    assert RunLength(tokens=10_000).steps(rate) == 2  # 8192 a step
    assert RunLength(samples=1000, epochs=3).steps(rate) == 375
    # 375 steps are 187.5 s: 0.052083 hours of 8 devices at 2.40 an hour.
    assert rate.cost_of(187.5, 2.4) == pytest.approx(1.0)
    # A million tokens take 61.035 s: 8 * 2.4 * 61.035 / 3600.
    assert rate.cost_per(1_000_000, rate.tokens, 2.4) == pytest.approx(0.325520833)
    assert rate.cost_per(1_000_000, None, 2.4) is None


def test_a_run_whose_step_does_not_say_what_it_trains_on() -> None:
    with pytest.raises(StepError, match=r"does not say how many tokens .* write --epochs and --samples"):
        RunLength(tokens=5).steps(StepRate(1.0, samples=2, tokens=None))
    with pytest.raises(StepError, match=r"trainfit.Step\(..., samples=N\)"):
        RunLength(samples=5).steps(StepRate(1.0, samples=None, tokens=None))


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (("1B", 3.0, None), "two ways"),
        (("1B", None, "1k"), "two ways"),
        ((None, 3.0, None), "--epochs needs --samples"),
        ((None, 0.0, "1k"), "--epochs must be above 0"),
        ((None, math.nan, "1k"), "--epochs must be above 0"),
    ],
)
def test_a_length_that_makes_no_sense(length: tuple[str, float, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_length(*length)


def test_copies_of_a_model_in_a_cluster() -> None:
    assert copies_of(None) == 1
    assert copies_of(Cluster(world_size=8)) == 8
    assert copies_of(Cluster(world_size=8, mesh=(("dp", 4), ("tp", 2)))) == 4
    assert copies_of(Cluster(world_size=16, mesh=(("pp", 2), ("replicate", 2), ("fsdp", 2), ("tp", 2)))) == 4


def test_prices_by_any_name_of_a_device(tmp_path: Path) -> None:
    assert assigned_prices(["h100=2.99/h", "NVIDIA A10=1"]) == {"h100-sxm-80gb": 2.99, "a10": 1.0}
    assert assigned_prices(["h100=2.99/h, NVIDIA A10=1"]) == {"h100-sxm-80gb": 2.99, "a10": 1.0}
    (tmp_path / "prices.toml").write_text('h100 = 2.5\nl4 = "0.8/h"\n')
    (tmp_path / "prices.json").write_text('{"h100": 2.5, "l4": 0.8}')
    for name in ("prices.toml", "prices.json"):
        assert read_prices(str(tmp_path / name)) == {"h100-sxm-80gb": 2.5, "l4": 0.8}


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"h100": -1}, "h100: a price per hour is a number from zero on, got -1"),
        ({"h100": "cheap"}, "h100: 'cheap' is not a price per hour"),
        ({"h100": math.nan}, "from zero on"),
        ({"h100": None}, "from zero on"),
        ({"h1000": 1}, "no device 'h1000'"),
        ({"h100": 1, "h100-sxm-80gb": 2}, "'h100' and 'h100-sxm-80gb' are both h100-sxm-80gb"),
    ],
)
def test_what_is_no_price(prices: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        named_prices(prices, "prices")


@pytest.mark.parametrize("text", ["h100", "=3", "h100=", "h100=3/d", "h100=3,5"])
def test_what_is_no_price_on_the_command_line(text: str) -> None:
    with pytest.raises(OptionError, match="--price"):
        assigned_prices([text])


def test_which_devices_are_meant() -> None:
    assert [one.name for one in read_devices(None, {})] == list(USUAL_DEVICES)
    assert [one.name for one in read_devices(None, {"l4": 1.0})] == ["l4"]
    assert read_devices("all", {}) == known_devices()
    assert [one.name for one in read_devices("h100, l4", {})] == ["h100-sxm-80gb", "l4"]
    for given, said in (
        ("h100,h100-sxm", "is there twice"),
        ("h100,,l4", "with commas"),
        ([], "there is none"),
    ):
        with pytest.raises(OptionError, match=said):
            read_devices(given, {})


def test_figures_are_those_of_estimate_and_plan(small_device: str) -> None:
    options = trainfit.StepOptions(batch=8, seq=256)
    found = trainfit.compare(
        "gpt2-tiny",
        ["h100", small_device],
        options=options,
        prices={"h100": 3.0, small_device: 0.1},
        tokens="1M",
    )
    assert found.data.captures == 1
    alone = trainfit.estimate("gpt2-tiny", device="h100", options=options)
    planned = trainfit.plan("gpt2-tiny", device=small_device, options=options)
    h100, small = found.devices
    assert (h100.fits, h100.plan, small.fits, small.plan) == (True, "not needed", False, "needed")
    assert (h100.peak_bytes, h100.step_seconds) == (alone.peak_bytes, alone.time.step_seconds)
    assert h100.smallest_memory_bytes == alone.smallest_memory_bytes
    assert small.plan_memory_bytes == planned.memory_bytes <= find_device(small_device).default_budget_bytes
    assert small.step_seconds == pytest.approx(planned.step_seconds)
    assert small.plan_added_seconds == pytest.approx(planned.added_seconds)
    assert small.lower_seconds < small.step_seconds < small.upper_seconds
    # 1,000,000 tokens by steps of 8 * 256 are 489 steps.
    assert found.data.run.steps == 489
    for row, price in ((h100, 3.0), (small, 0.1)):
        assert row.run_seconds == pytest.approx(489 * row.step_seconds)
        assert row.cost == pytest.approx(489 * row.step_seconds / 3600 * price)
        assert row.cost_per_million_tokens == pytest.approx(row.step_seconds / 2048 * 1e6 / 3600 * price)
        assert row.tokens_per_second == pytest.approx(2048 / row.step_seconds)
    cheaper = min(found.devices, key=lambda row: row.cost)
    assert found.cheapest is cheaper
    assert found.fastest is min(found.devices, key=lambda row: row.step_seconds)
    assert "with plan" in str(found)
    assert repr(found).startswith("<DeviceComparison of gpt2-tiny: runs on 2 of 2 devices, cheapest ")


def test_a_step_that_fits_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    entry = {"name": "tiny", "memory_bytes": 2**20 * 480, "architecture": "sm_80", "sm_count": 108}
    entry |= {"bandwidth_bytes_per_second": 1.5e12, "flops": {"fp32": 19.5e12}}
    file.write_text(json.dumps(entry))
    found = trainfit.compare("gpt2-tiny", str(file), prices={str(file): 1.0})
    (row,) = found.devices
    assert (row.runs, row.plan, row.step_seconds, row.cost) == (False, "none fits", None, None)
    assert found.cheapest is None and found.fastest is None
    with pytest.raises(BudgetTooSmall, match="gpt2-tiny fits on none of these devices"):
        found.check()
    done = run("compare", "gpt2-tiny", "--devices", str(file))
    assert done.exit_code == 3 and "fits on none of 1 device" in done.output


def test_a_device_of_unknown_speed(tmp_path: Path) -> None:
    file = tmp_path / "slow.json"
    file.write_text('{"name": "slow", "memory_bytes": "24GiB", "architecture": "sm_80"}')
    found = trainfit.compare("gpt2-tiny", str(file), prices={str(file): 1.0}, tokens=1000)
    (row,) = found.devices
    assert (row.fits, row.step_seconds, row.cost, found.fastest) == (True, None, None, None)
    assert not row.launch_bound


def test_a_step_that_waits_for_the_host_is_said_to() -> None:
    tiny = trainfit.compare("gpt2-tiny", "h100,l4", options=trainfit.StepOptions(batch=1))
    assert tiny.data.warnings[0].startswith("launch-bound on all devices: the host decides")
    alone = trainfit.estimate("gpt2-tiny", device="l4", options=trainfit.StepOptions(batch=1))
    assert alone.time.launch_bound and all(row.launch_bound for row in tiny.devices)


@pytest.mark.parametrize(
    ("target", "dtype", "mesh"),
    [
        ("gpt2-tiny", "bf16-autocast", ()),
        ("llama-tiny", "bf16", (("dp", 2), ("tp", 2))),
        ("resnet-tiny", "fp32", ()),
    ],
)
def test_a_shared_capture_is_what_each_device_would_have_had(
    target: str, dtype: Any, mesh: tuple[tuple[str, int], ...]
) -> None:
    names = ("h100", "a100-40gb", "rtx-4090", "l40s", "t4", "mi300x", "mi100")
    asked = {
        "options": trainfit.StepOptions(dtype=dtype),
        "cluster": Cluster(world_size=4, mesh=mesh) if mesh else None,
    }
    captures = SharedCaptures(target, asked)
    for name in names:
        shared = trainfit.estimate(captures.request(find_device(name)).trace(), device=name)
        alone = trainfit.estimate(target, device=name, **asked)
        assert shared.peak_bytes == alone.peak_bytes, name
        assert shared.smallest_memory_bytes == alone.smallest_memory_bytes, name
        assert shared.verdict == alone.verdict and shared.device == alone.device, name
        assert shared.time.step_seconds == pytest.approx(alone.time.step_seconds), name
    assert 1 <= captures.count < len(names)


def asks(what: str) -> trainfit.Step:
    width = 8
    if what == "memory":
        width = torch.cuda.get_device_properties(0).total_memory >> 30
    elif what == "capability":
        width = 10 * torch.cuda.get_device_capability()[0]
    model = torch.nn.Linear(width, width)
    return trainfit.Step.of(model, torch.randn(4, width), loss=lambda y: y.mean())


def asks_for_memory() -> trainfit.Step:
    return asks("memory")


def asks_for_the_capability() -> trainfit.Step:
    return asks("capability")


def test_a_step_that_asks_what_it_runs_on_is_captured_for_each() -> None:
    captures = SharedCaptures(asks_for_memory)
    sizes = [captures.request(find_device(name)).trace() for name in ("h100", "a100-40gb", "l4")]
    assert captures.count == 3
    assert [trace.settings.parameters for trace in sizes] == [79 * 80, 39 * 40, 22 * 23]
    captures = SharedCaptures(asks_for_the_capability)
    traces = [captures.request(find_device(name)).trace() for name in ("h100", "a100-40gb", "h200", "a30")]
    assert captures.count == 2
    assert [trace.settings.parameters for trace in traces] == [90 * 91, 80 * 81, 90 * 91, 80 * 81]
    with questions_asked() as asked:
        trainfit.capture("gpt2-tiny", device="h100")
    assert not asked


def test_which_architectures_have_the_same_attention() -> None:
    assert same_attention("sm_90", "sm_80") and same_attention("sm_86", "sm_89")
    assert same_attention("sm_120", "sm_89")
    assert not same_attention("sm_90", "sm_89") and not same_attention("sm_75", "sm_80")
    assert not same_attention("gfx942", "gfx908") and not same_attention("gfx942", "sm_90")


def test_a_cluster_is_paid_for_as_a_whole() -> None:
    cluster = Cluster(world_size=4, mesh=(("dp", 2), ("tp", 2)))
    found = trainfit.compare("llama-tiny", "h100", cluster=cluster, prices={"h100": 2.0}, tokens="1M")
    (row,) = found.devices
    alone = trainfit.estimate("llama-tiny", device="h100", cluster=cluster)
    tokens = 2 * alone.trace.tokens  # of two copies
    assert found.data.copies == 2
    assert found.data.run.steps == math.ceil(1_000_000 / tokens)
    assert row.cost == pytest.approx(found.data.run.steps * row.step_seconds / 3600 * 4 * 2.0)


def test_the_command_writes_json_and_tables(tmp_path: Path) -> None:
    out, tables = tmp_path / "result.json", tmp_path / "tables"
    words = ["compare", "vit-tiny", "--devices", "h100,l4", "--price", "l4=0.8/h", "--epochs", "2"]
    done = run(*words, "--samples", "1.2M", "--json", str(out), "--csv", str(tables))
    assert done.exit_code == 0, done.output
    assert "cheapest on l4 of those with a price" in " ".join(done.output.split())
    result = json.loads(out.read_text())
    assert {"schema", "target", "torch", "seconds", "ops", "warnings"} <= result.keys()
    assert result["seconds"].keys() >= {"capture", "total"}
    first, second = result["devices"]
    assert (first["name"], first["price_per_hour"], first["cost"]) == ("h100-sxm-80gb", None, None)
    assert result["cheapest"] == second["name"] == "l4"
    assert result["fastest"] == min(result["devices"], key=lambda row: row["step_seconds"])["name"]
    # Two epochs of 1.2 million samples by batches of 8.
    assert result["run"]["steps"] == 300_000
    assert second["cost_per_epoch"] == pytest.approx(second["cost"] / 2)
    assert second["cost_per_epoch"] == pytest.approx(150_000 * second["step_seconds"] / 3600 * 0.8)
    assert second["tokens_per_second"] is None
    assert (tables / "devices.csv").read_text().startswith("name,usable_bytes,verdict,fits,")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "h1000"], "there is no device 'h1000'"),
        (["--devices", ""], "with commas between them"),
        (
            ["--devices", "l4", "--price", "h100=3"],
            "h100-sxm-80gb has a price, but is not among the devices: l4",
        ),
        (["--price", "3"], "'3' is not a price"),
        (["--price", "h100=1", "--price", "h100=2"], "two prices for 'h100'"),
        (["--price", "prices.toml"], "A file of prices is given by --prices."),
        (["--prices", "none.toml"], "cannot be read: No such file"),
        (["--tokens", "many"], "--tokens 'many' is not a count"),
        (["--devices", "l4", "--tokens", "1B"], "the step does not say how many tokens it trains on"),
        (["--rank", "1"], "--rank is about one of several processes"),
    ],
)
def test_mistakes_are_one_message(words: list[str], said: str) -> None:
    done = run("compare", "vit-tiny", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", "h100 = ", "is not TOML"),
        ("a.json", "[1]", "expected one object"),
        ("a.json", "{", "is not JSON"),
        ("a.toml", "[h100]\nx = 1", "h100: a price per hour is a number from zero on"),
    ],
)
def test_files_that_are_no_prices(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    done = run("compare", "vit-tiny", "--prices", str(tmp_path / name))
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
