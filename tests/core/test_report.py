"""What the terminal and the JSON say, from hand-made results; hostile names included."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainfit.allocator.device_memory import DeviceMemory
from trainfit.costs.estimates import Estimate, Peak
from trainfit.costs.summary import OperatorTime, StepTime
from trainfit.devices.device_table import CONTEXT_BYTES, Device
from trainfit.errors import FileFormatError, OptionError
from trainfit.memory.module_stats import ModuleStats
from trainfit.report.json_result import check_destination, result_json, write_json
from trainfit.report.module_rows import largest_rows
from trainfit.report.reading import estimate_data, memory_curve, verification_data
from trainfit.report.tables import show
from trainfit.report.text_devices import device_view, devices_view
from trainfit.report.text_estimates import estimate_view
from trainfit.report.text_verification import verification_view
from trainfit.traces.assumptions import Assumption
from trainfit.traces.settings import Difference
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES, Op, Signature, Trace
from trainfit.verifying.measuring import Measurement
from trainfit.verifying.verification import Verification

MIB = 2**20


def module(name: str, held: int, parameters: int = 0, class_name: str = "Linear") -> ModuleStats:
    """Make the statistics of one module, in MiB; `held` is what it made that is alive at the peak."""
    return ModuleStats(
        name=name,
        class_name=class_name,
        depth=name.count("."),
        calls=1,
        parameter_bytes=parameters * MIB,
        buffer_bytes=0,
        gradient_bytes=0,
        activation_bytes=held * MIB,
        peak_bytes=0,
        at_peak_bytes=held * MIB,
    )


def rows(*modules: ModuleStats, limit: int = 10) -> list[str]:
    """Write the chosen rows as `indented label count bytes`."""
    return [
        f"{'  ' * row.indent}{row.label} {row.count} {row.held_bytes // MIB}"
        for row in largest_rows(modules, limit)
    ]


def test_repeated_layers_are_one_row_and_their_children_too() -> None:
    blocks = []
    for number in range(12):
        blocks += [
            module(f"GPT.h.{number}", 10, 6, "Block"),
            module(f"GPT.h.{number}.attention", 4, 2),
            module(f"GPT.h.{number}.mlp", 6, 4),
        ]
    shown = rows(
        module("GPT", 125, 77),
        module("GPT.embedding", 5, 5),
        module("GPT.h", 120, 72, "ModuleList"),
        *blocks,
    )
    assert shown == [
        "h.0-11 12 192",
        "  mlp 12 120",
        "  attention 12 72",
        "embedding 1 10",
    ]


def test_layers_that_differ_stay_apart() -> None:
    shown = rows(
        module("Net", 60),
        module("Net.0", 10, class_name="Conv2d"),
        module("Net.1", 20, class_name="ReLU"),
        module("Net.2", 30, class_name="ReLU"),
    )
    assert shown == ["1-2 2 50", "0 1 10"]


def test_alike_layers_between_others_are_one_row() -> None:
    layers = [module(f"Net.{n}", 10, class_name=("Linear", "ReLU", "Norm")[n % 3]) for n in range(8)]
    assert rows(module("Net", 80), *layers) == ["0,3..6 3 30", "1,4..7 3 30", "2,5 2 20"]


def test_a_wrapper_of_one_child_is_left_out() -> None:
    shown = rows(
        module("Net", 100),
        module("Net.wrapper", 100),
        module("Net.wrapper.inner", 100),
        module("Net.wrapper.inner.a", 60),
        module("Net.wrapper.inner.b", 40),
    )
    assert shown == ["wrapper.inner 1 100", "  a 1 60", "  b 1 40"]


def test_what_a_module_makes_itself_is_shown() -> None:
    assert rows(module("Net", 100), module("Net.body", 30)) == ["itself 1 70", "body 1 30"]


def test_what_a_module_makes_almost_alone_is_the_module() -> None:
    shown = rows(module("Net", 100), module("Net.body", 100), module("Net.body.norm", 1))
    assert shown == ["body 1 100", "  norm 1 1"]


def test_only_the_largest_are_kept() -> None:
    children = [module(f"Net.c{number}", number, class_name=f"C{number}") for number in range(20)]
    shown = rows(module("Net", 190), *children, limit=3)
    assert shown == ["c19 1 19", "c18 1 18", "c17 1 17"]


def test_a_model_without_children_and_several_roots() -> None:
    assert rows(module("Linear", 5)) == ["Linear 1 5"]
    assert rows(module("A", 5), module("A.x", 1), module("B", 7)) == [
        "B 1 7",
        "A 1 5",
        "  itself 1 4",
        "  x 1 1",
    ]
    assert rows() == []


def make_trace(target: str = "gpt2", warnings: tuple[str, ...] = ()) -> Trace:
    signature = Signature("aten.mm.default", (), (), "[[],{}]", False, False, False)
    op = Op(0, "backward", -1, 0, False, -1, (), (), ())
    return Trace(
        target=target,
        device="cuda",
        torch="2.13.0",
        signatures=(signature,),
        ops=(op,) * 1234,
        storages=(),
        modules=(),
        calls=(),
        forward_post_order=(),
        backward_pre_order=(),
        backward_post_order=(),
        observed_peak_bytes=0,
        assumptions=tuple(Assumption("value", text) for text in warnings),
    )


def make_estimate(
    peak: int = 300 * MIB, usable: int = 400 * MIB, target: str = "gpt2", warnings: tuple[str, ...] = ()
) -> Estimate:
    trace = make_trace(target, warnings)
    by_category = np.zeros((len(CATEGORIES), 1234), dtype=np.int64)
    by_category[CATEGORIES.index("parameter")] = 100 * MIB
    by_category[CATEGORIES.index("activation")] = peak - 100 * MIB
    timeline = Timeline(
        trace=trace,
        live_bytes=(peak,) * 1234,
        by_category=by_category,
        workspace_bytes=np.zeros(1234, dtype=np.int64),
        persistent_bytes=100 * MIB,
        peak_bytes=peak,
        peak_op=1000,
    )
    return Estimate(
        target=target,
        device=Device("tiny", "cpu", usable),
        trace=trace,
        timeline=timeline,
        memory=DeviceMemory(peak, peak, peak),
        peak=Peak("aten.mm.default", 1000, "GPT.h.3", "backward"),
        modules=(module("GPT", 200, 100, "GPT"), module("GPT.h", 120, 60), module("GPT.head", 80, 40)),
        costs=None,
        time=None,
        seconds={"capture": 1.5, "total": 1.6},
    )


def printed(view: object) -> str:
    stream = io.StringIO()
    show(view, stream)  # type: ignore[arg-type]
    return stream.getvalue()


def test_the_estimate_begins_with_the_answer() -> None:
    lines = printed(estimate_view(estimate_data(make_estimate()))).splitlines()
    assert lines[0] == "gpt2: peak 300.00 MiB (predicted), fits in tiny: 100.00 MiB free"


def test_what_is_too_close_to_call_says_why() -> None:
    """Of 310 MiB a margin of 12.4 is kept: 300 are more than 297.6, and less than 310."""
    gpu = Device("tiny", "cuda", 310 * MIB + CONTEXT_BYTES)
    estimate = replace(make_estimate(), device=gpu)
    flowing = " ".join(printed(estimate_view(estimate_data(estimate))).split())
    assert flowing.startswith(
        "gpt2: peak 300.00 MiB (predicted), too close to call in tiny: 10.00 MiB free, less than the margin "
        "of 12.40 MiB for what is not simulated"
    )
    result = result_json(estimate_data(estimate))
    assert result["fits"] is False and result["verdict"] == "too close to call"
    assert (result["spare_bytes"], result["margin_bytes"]) == (10 * MIB, math.ceil(0.04 * 310 * MIB))


def test_what_does_not_fit_says_by_how_much() -> None:
    lines = printed(estimate_view(estimate_data(make_estimate(usable=200 * MIB)))).splitlines()
    assert lines[0] == "gpt2: peak 300.00 MiB (predicted), does not fit in tiny: 100.00 MiB missing"


def test_the_estimate_says_what_where_and_how() -> None:
    text = printed(estimate_view(estimate_data(make_estimate())))
    flowing = " ".join(text.split())
    assert "The peak is in the backward, in GPT.h.3, at aten.mm.default (op 1,000 of 1,234)." in flowing
    assert "Before the step 100.00 MiB are in use (predicted). tiny has 400.00 MiB for tensors." in flowing
    assert "activation 200.00 MiB 66.7%" in flowing
    assert "parameter 100.00 MiB 33.3%" in flowing
    assert "gradient" not in text  # there is none at the peak
    assert "h Linear 180.00 MiB 60.00 MiB 120.00 MiB" in flowing
    assert "1,234 ops, captured for cuda in 1.50 s (run 2 of 2), torch 2.13.0" in flowing


def test_warnings_are_shown_once_each_and_not_without_end() -> None:
    warnings = ("line 7: assumed true", "line 7: assumed true", *(f"line {n}" for n in range(100, 120)))
    text = printed(estimate_view(estimate_data(make_estimate(warnings=warnings))))
    assert "  line 7: assumed true (2 times)\n" in text
    assert "line 108\n" in text and "line 109" not in text
    assert "and 11 more; -v and --json list all" in text


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_numbers_are_never_cut_short(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    device = Device("a-device-with-a-very-long-name-indeed", "cuda", 123456789012, 3.35e12, {"bf16": 1e15})
    for view in (estimate_view(estimate_data(make_estimate())), devices_view([device]), device_view(device)):
        text = printed(view)
        assert "…" not in text
    assert "114.98 GiB" in printed(devices_view([device]))


def test_hostile_names_are_text() -> None:
    hostile = "[bold]x[/bold] \x1b[31mred\x1b[0m \x07"
    text = printed(estimate_view(estimate_data(make_estimate(target=hostile, warnings=(hostile,)))))
    assert "\x1b" not in text and "\x07" not in text
    assert text.count("[bold]x[/bold]") == 2


def make_verification(predicted: int, measured: int) -> Verification:
    return Verification(
        target="gpt2",
        device=Device("cpu", "cpu", 10**9),
        trace=make_trace(),
        predicted_peak_bytes=predicted,
        predicted_persistent_bytes=100,
        predicted_seconds=0.3,
        measured=Measurement(measured, 100, 0.25),
        warnings=(),
        seconds={"capture": 1.0, "measure": 2.0, "total": 3.0},
    )


def test_equal_bytes_are_exact() -> None:
    text = printed(verification_view(verification_data(make_verification(300 * MIB, 300 * MIB))))
    assert text.startswith("gpt2 on cpu: the predicted peak is exact (314,572,800 bytes)\n")
    assert "step time 300 ms 250 ms +20.0%" in " ".join(text.split())
    assert text.count("exact") == 3  # headline, peak, persistent


@pytest.mark.parametrize(
    ("predicted", "measured", "headline", "cell"),
    [
        (1010, 1000, "1.00% too high (10 bytes)", "+1.00%"),
        (990, 1000, "1.00% too low (10 bytes)", "-1.00%"),
        (10**9 + 1, 10**9, "1e-07% too high (1 bytes)", "+1e-07%"),
    ],
)
def test_an_error_is_never_rounded_to_nothing(
    predicted: int, measured: int, headline: str, cell: str
) -> None:
    text = printed(verification_view(verification_data(make_verification(predicted, measured))))
    assert headline in text
    assert cell in text


@pytest.mark.parametrize("measured", [1000, 1500])
def test_a_plan_for_another_step_is_neither_exact_nor_wrong(measured: int) -> None:
    found = replace(make_verification(1000, measured), plan_differences=(Difference("batch", 512, 64),))
    text = " ".join(printed(verification_view(verification_data(found))).split())
    assert text.startswith("gpt2 on cpu: the plan was made for another step. With it this one has a peak of ")
    assert "it promises 1000 B for its own" in text
    assert "The plan was made for batch 512; this is batch 64." in text
    assert text.count(" other step") == 2  # peak and time
    assert "too low" not in text and "peak is exact" not in text


COMMON_KEYS = {"schema", "target", "device", "torch", "seconds", "ops", "warnings"}


def test_the_json_of_an_estimate() -> None:
    result = json.loads(json.dumps(result_json(estimate_data(make_estimate(warnings=("w",))))))
    assert result.keys() >= COMMON_KEYS | {"peak_bytes", "peak", "by_category", "modules", "fits"}
    assert result["schema"] == 1
    assert (result["target"], result["device"], result["torch"]) == ("gpt2", "tiny", "2.13.0")
    assert (result["peak_bytes"], result["ops"], result["warnings"]) == (300 * MIB, 1234, ["w"])
    assert result["seconds"] == {"capture": 1.5, "total": 1.6}
    assert result["peak"] == {
        "op": "aten.mm.default",
        "op_index": 1000,
        "module": "GPT.h.3",
        "phase": "backward",
    }
    assert set(result["by_category"]) == set(CATEGORIES)
    assert sum(result["by_category"].values()) == 300 * MIB
    for name in ("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"):
        assert result[name] is None
    first = result["modules"][0]
    assert first["name"] == "GPT" and first["parameter_bytes"] == 100 * MIB
    assert first.keys() >= {"activation_bytes", "forward_seconds", "backward_seconds"}


def test_the_json_of_a_verification() -> None:
    result = json.loads(json.dumps(result_json(verification_data(make_verification(1010, 1000)))))
    assert result.keys() >= COMMON_KEYS
    assert (result["predicted_peak_bytes"], result["measured_peak_bytes"]) == (1010, 1000)
    assert (result["predicted_seconds"], result["measured_seconds"]) == (0.3, 0.25)
    assert result["baseline_measured_peak_bytes"] == 1000
    assert result["baseline_measured_seconds"] == 0.25
    assert result["error"] == pytest.approx(0.01)
    for name in ("loss_equal", "gradients_equal", "max_gradient_difference"):
        assert result[name] is None


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json({"a": 1}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(ValueError):
        write_json({"a": float("nan")}, str(file))
    with pytest.raises(FileFormatError, match="cannot write"):
        write_json({"a": 2}, str(tmp_path / "none" / "result.json"))
    assert json.loads(file.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_json_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_a_destination_is_checked_before_the_work(tmp_path: Path) -> None:
    check_destination("-", "--json")
    check_destination(str(tmp_path / "new.json"), "--json")
    with pytest.raises(OptionError, match="--json needs the name of a file"):
        check_destination(str(tmp_path), "--json")
    with pytest.raises(OptionError, match=r"--save-trace .*: there is no folder"):
        check_destination(str(tmp_path / "none" / "x.json"), "--save-trace")


def make_time() -> StepTime:
    operators = (
        OperatorTime("aten.mm.default", 12, 0.06, 0.6, 10**12, "compute", "formula"),
        OperatorTime("mine.twist.default", 1, 0.04, 0.4, 0, "memory", "bandwidth"),
    )
    return StepTime(
        step_seconds=0.1,
        forward_seconds=0.03,
        backward_seconds=0.06,
        optimizer_seconds=0.01,
        lower_seconds=0.08,
        upper_seconds=0.125,
        recompute_seconds=0.0,
        busy_seconds=0.07,
        waiting_share=0.3,
        communication_seconds=0.0,
        exposed_communication_seconds=0.0,
        flops=2 * 10**12,
        model_flops=10**12,
        peak_flops_per_second=1e14,
        samples=8,
        tokens=8192,
        operators=operators,
        sources={"formula": 0.6, "bandwidth": 0.4},
        uncalibrated={"the host": 0.3, "grouped convolutions in tf32": 0.121, "lists": 0.004},
        module_seconds=((0.03, 0.06), (0.02, 0.05), (0.01, 0.01)),
    )


def test_the_time_of_a_step() -> None:
    """20 TFLOP/s in 0.1 s; 10 of them the model's, of a peak of 100."""
    estimate = replace(make_estimate(), time=make_time())
    text = " ".join(printed(estimate_view(estimate_data(estimate))).split())
    assert "; 100 ms per step" in text
    assert (
        "A step takes 100 ms (predicted, likely 80.0 ms to 125 ms): forward 30.0 ms, backward 60.0 ms, "
        in text
    )
    assert "81,920 tokens/s, 20 TFLOP/s, MFU 10.0%." in text
    assert "Launch-bound: tiny waits 30% of the step for the host" in text
    assert "priced by the bytes they move (40.0%): mine.twist.default." in text
    figures = "figures not calibrated on this device: the host 30%, grouped convolutions in tf32 12%."
    assert f"42% of it rests on {figures}" in text
    assert "mm 12 60.0 ms 60.0% compute formula" in text


def test_the_json_of_a_time() -> None:
    result = result_json(estimate_data(replace(make_estimate(), time=make_time())))
    assert (result["step_seconds"], result["backward_seconds"], result["optimizer_seconds"]) == (
        0.1,
        0.06,
        0.01,
    )
    assert (result["lower_seconds"], result["upper_seconds"]) == (0.08, 0.125)
    assert result["tokens_per_second"] == pytest.approx(81920)
    assert result["model_flops_utilisation"] == pytest.approx(0.1)
    assert result["launch_bound"] is True
    assert result["unpriced"] == ["mine.twist.default"]
    assert result["uncalibrated_share"] == pytest.approx(0.425)
    assert result["uncalibrated"]["grouped convolutions in tf32"] == 0.121
    assert result["operators"][0]["name"] == "aten.mm.default"
    assert set(result["orders"]) == {"forward_pre", "forward_post", "backward_pre", "backward_post"}
    json.dumps(result, allow_nan=False)


def timeline_of(used: list[int], workspaces: list[int] | None = None) -> Timeline:
    """Make the timeline of activations alive while each op runs, and of the workspaces of their kernels."""
    by_category = np.zeros((len(CATEGORIES), len(used)), dtype=np.int64)
    by_category[CATEGORIES.index("activation")] = used
    workspace = np.array(workspaces or [0] * len(used), dtype=np.int64)
    peak = int((workspace + used).argmax()) if used else -1
    trace = make_trace()
    return Timeline(
        trace=replace(trace, ops=trace.ops[:1] * len(used)),
        live_bytes=tuple(used),
        by_category=by_category,
        workspace_bytes=workspace,
        persistent_bytes=0,
        peak_bytes=int(workspace[peak]) + used[peak] if used else 0,
        peak_op=peak,
    )


@pytest.mark.parametrize("most", [1, 2, 3, 7, 10, 2000])
def test_a_short_memory_curve_keeps_the_peak_and_its_place(most: int) -> None:
    """Seven ops; two have the same most bytes, and the first of them is the peak."""
    timeline = timeline_of([1, 9, 3, 4, 7, 5, 0], [0, 0, 0, 0, 4, 6, 0])
    curve = memory_curve(timeline, most)
    assert len(curve.ops) == min(most, 7) and list(curve.ops) == sorted(set(curve.ops))
    assert curve.ops[curve.peak] == timeline.peak_op == 4
    assert curve.by_category["activation"][curve.peak] == 7
    assert curve.by_category["temporary"][curve.peak] == 4
    sums = [sum(sizes) for sizes in zip(*curve.by_category.values())]
    assert max(sums) == sums[curve.peak] == timeline.peak_bytes == 11
    assert all(total == timeline.used_bytes[op] for op, total in zip(curve.ops, sums))
    assert timeline.by_category.sum() == 29  # the timeline itself is as it was


def test_a_memory_curve_of_nothing() -> None:
    curve = memory_curve(timeline_of([]))
    assert curve.ops == () and curve.peak == -1 and set(curve.by_category) == set(CATEGORIES)
