"""What a reader sees of a calibration, from one made by hand."""

from __future__ import annotations

import io
import json

import pytest
from calibrated_by_hand import RESULT

from trainfit.report.calibrations import calibration_data
from trainfit.report.json_result import result_json
from trainfit.report.tables import show
from trainfit.report.text_calibrations import calibration_view
from trainfit.report.text_devices import device_view
from trainfit.webpage.page import page_html


def shown(columns: int, monkeypatch: pytest.MonkeyPatch, file: str | None = "my-gpu.json") -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    show(calibration_view(calibration_data(RESULT, file)), stream)
    return stream.getvalue()


def test_the_answer_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(200, monkeypatch)
    lines = text.splitlines()
    assert lines[0] == (
        "h100-sxm-80gb (calibrated): 52 TFLOP/s fp32, 712 TFLOP/s bf16, 3,015 GB/s memory (measured); "
        "written to my-gpu.json. Use it as --device my-gpu.json"
    )
    assert lines[2] == (
        "2 real steps were predicted with these figures and then run: predicted is 0.95 to 1.25 of measured. "
        "Predictions with it have a range of a factor of 1.25."
    )
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["bf16 product"][2:] == ["712", "TFLOP/s", "±", "1%", "989", "TFLOP/s", "0.72"]
    assert rows["memory"][1:] == ["3,015", "GB/s", "±", "0%", "3,350", "GB/s", "0.90"]
    assert rows["CUDA context"][2:] == ["500.00", "MiB", "-", "-", "-"]
    assert rows["resnet-50 --batch 64"][3:] == ["95.0", "ms", "100", "ms", "0.95", "±", "1%"]
    assert rows["depthwise_cycles"][1:] == ["1.2", "±", "250%", "0.8", "1.50"]
    assert rows["forward_op"][1:] == ["8.00", "µs", "-", "9.00", "µs", "0.89"]
    assert rows["winograd_gain"][1:] == ["as", "in", "general", "-", "-", "-"]
    assert "no GPU has run this calibration yet" in text
    assert lines[-1] == "measured in 3 min 01 s, other work took 4% of the processors, torch 2.13.0"


def test_without_a_file_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first = shown(200, monkeypatch, None).splitlines()[0]
    assert first.endswith("(measured). Nothing was written; -o FILE writes the device file.")


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_line_is_longer(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(columns, monkeypatch)
    assert max(len(line) for line in text.splitlines()) <= columns and "…" not in text


def test_the_json_has_figures_with_units_beside_what_they_are_compared_with() -> None:
    written = json.loads(json.dumps(result_json(calibration_data(RESULT, None)), allow_nan=False))
    assert list(written)[:5] == ["schema", "device", "torch", "seconds", "warnings"]
    assert written["file"] is None and written["seconds"]["total"] == 181.0
    assert written["figures"][1] == {
        "name": "bf16 product",
        "value": 7.12e14,
        "unit": "FLOP/s",
        "spread": 0.01,
        "reference": 9.89e14,
        "ratio": pytest.approx(0.72, abs=1e-3),
    }
    assert written["constants"][3]["ratio"] is None
    assert written["steps"][0]["ratio"] == pytest.approx(1.25)
    assert (written["uncertainty"], written["undetermined"]) == (0.25, ["winograd_gain"])
    assert written["device_file"]["constants"]["stream_share"] == 0.91


def test_a_calibrated_device_is_shown_as_one() -> None:
    stream = io.StringIO()
    show(device_view(RESULT.device), stream)
    said = " ".join(stream.getvalue().split())
    assert "calibrated by 4 constants of its own" in said and "CUDA context 500.00 MiB" in said


def test_a_calibration_has_a_page() -> None:
    page = page_html(calibration_data(RESULT, "my-gpu.json"), RESULT)
    assert "Measured on this machine" in page and "712 TFLOP/s" in page
    assert "predicted is 0.95 to 1.25 of measured" in page
    assert "winograd_gain: as in general" in page and "--device my-gpu.json" in page
