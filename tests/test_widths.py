"""Every command keeps to the terminal's width, and cuts no number."""

from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import RenderableType

import trainfit
from trainfit.api import choose
from trainfit.api.arrange import order_anything
from trainfit.api.request import Request
from trainfit.devices.device_table import find_device, known_devices
from trainfit.report.reading import estimate_data, frontier_data, order_data, plan_data, verification_data
from trainfit.report.tables import NumberTable, name_text, show
from trainfit.report.text_devices import device_view, devices_view
from trainfit.report.text_estimates import estimate_view
from trainfit.report.text_orders import order_view
from trainfit.report.text_plans import frontier_view, plan_view
from trainfit.report.text_verification import verification_view
from trainfit.verifying.verification import Measurement, Verification


@cache
def views() -> dict[str, RenderableType]:
    options = trainfit.StepOptions(batch=2)
    trace = trainfit.capture("mixtral-tiny", device="h100", options=options)
    estimate = trainfit.estimate(trace, device="h100")
    too_large = trainfit.estimate(
        trace, device=trainfit.Device("a-device-of-my-own", "cuda", 600 << 20, 1e12)
    )
    verification = Verification(
        target="mixtral-tiny",
        device=find_device("h100"),
        trace=trace,
        predicted_peak_bytes=123_456_789,
        predicted_persistent_bytes=12_345_678,
        predicted_seconds=0.25,
        measured=Measurement(123_456_780, 12_345_678, 0.3),
        warnings=("some warning that is long enough to need more than one line on a narrow terminal",) * 2,
        seconds={"capture": 1.0, "measure": 2.0, "total": 3.0},
    )
    return {
        "estimate": estimate_view(estimate_data(estimate)),
        "too large": estimate_view(estimate_data(too_large)),
        "plan": plan_view(
            plan_data(choose.plan_step(Request(trace, "h100"), budget=estimate.peak_bytes * 9 // 10))
        ),
        "frontier": frontier_view(frontier_data(trainfit.frontier(trace, device="h100", points=2))),
        "verify": verification_view(verification_data(verification)),
        "devices": devices_view(known_devices()),
        "device": device_view(find_device("h100")),
        "order": order_view(order_data(order_anything(trace))),
    }


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize(
    "name", ["estimate", "too large", "plan", "frontier", "verify", "devices", "device", "order"]
)
def test_no_line_is_longer(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    show(views()[name], stream)
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "…" not in text


def test_columns_that_have_no_room_are_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = NumberTable("a name", "first", "second", "third")
    table.add_row("a name that is too long for its column", "1,234.56 GiB", "2,345.67 GiB", "3,456.78 GiB")
    stream = io.StringIO()
    show(table, stream)
    assert "1,234.56 GiB" in stream.getvalue()
    assert "2,345" not in stream.getvalue() and "third" not in stream.getvalue()


def test_what_matters_least_is_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = NumberTable("predicted", "old", "new", "change", "share", least=("share", "old", "new"))
    table.add_row("before the step", "1,234.56 GiB", "2,345.67 GiB", "+1,111.11 GiB", "+90.00%")
    stream = io.StringIO()
    show(table, stream)
    assert stream.getvalue().split() == ["predicted", "change", "before", "the", "step", "+1,111.11", "GiB"]


def test_long_names_do_not_fill_the_terminal() -> None:
    shown = name_text("Net." + "inner." * 200 + "last").plain
    assert len(shown) == 60 and shown.startswith("Net.inner.") and shown.endswith(".last")
    assert name_text("a\u202eb").plain == r"a\u202eb"
