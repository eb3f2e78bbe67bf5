"""Traces for Perfetto: they keep the format's rules, and show what the schedule and the timeline say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_events import CheckedTrace, check_nesting, end_of
from typer.testing import CliRunner

import trainfit
from trainfit.cli import commands
from trainfit.costs.estimates import Estimate
from trainfit.costs.op_times import op_times
from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.exports.perfetto import perfetto_trace, write_perfetto
from trainfit.exports.shown_step import shown_step
from trainfit.planning.plan_results import PlanResult
from trainfit.traces.trace import Op, Signature, Trace

RESULTS = ("on_cpu", "on_gpu", "sharded", "planned")


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Estimate | PlanResult:
    found: Estimate | PlanResult = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def written(result: Estimate | PlanResult, tmp_path: Path) -> dict[str, Any]:
    write_perfetto(result, tmp_path / "t.json")
    found: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
    return found


def test_it_keeps_the_rules_of_the_format(written: dict[str, Any]) -> None:
    CheckedTrace(written)


def test_the_checker_refuses_what_is_wrong() -> None:
    good = {"ph": "X", "name": "a", "cat": "c", "ts": 0, "dur": 5, "pid": 1, "tid": 1}
    with pytest.raises(AssertionError, match="overlaps"):
        check_nesting([good, {**good, "ts": 3, "dur": 5}])
    check_nesting([good, {**good, "ts": 3, "dur": 2}, {**good, "ts": 5}])
    with pytest.raises(AssertionError, match="lacks"):
        CheckedTrace({"displayTimeUnit": "ms", "otherData": {}, "traceEvents": [{"ph": "X", "name": "a"}]})


def test_every_op_has_its_slices_and_the_step_its_length(
    result: Estimate | PlanResult, written: dict[str, Any]
) -> None:
    checked, step = CheckedTrace(written), shown_step(result)
    assert step.times is not None
    trace, costs = step.timeline.trace, step.times.costs
    on_host = costs.host.runs_kernels
    host = checked.track("runs the ops" if on_host else "issues the ops")
    assert [one["args"]["op"] for one in host] == list(range(len(trace.ops)))
    assert [one["name"] for one in host] == [trace.op_name(op) for op in range(len(trace.ops))]
    assert sum(one["dur"] for one in host) / 1e6 == pytest.approx(
        step.times.host_seconds.sum() + (step.times.device_seconds.sum() if on_host else 0.0), rel=1e-3
    )
    last = max(end_of(one) for slices in checked.slices.values() for one in slices)
    if on_host:
        assert last / 1e6 == pytest.approx(step.times.step_seconds, rel=1e-6)
        return
    queues = {op.queue for op in trace.ops if costs.costs[op.signature].kernels}
    named = {name.removeprefix("communication, ") for name in checked.names.values()}
    assert named == queues | {"issues the ops", "phases and modules"}
    busy = sum(one["dur"] for one in checked.track("compute")) / 1e6
    assert busy == pytest.approx(step.times.busy_seconds, rel=1e-3)
    # The step ends with the last slice; it begins where the device is done with the step before.
    times = step.op_times
    assert times is not None
    before = -min(float(times.host_begin.min()), 0.0)
    assert last / 1e6 - before == pytest.approx(step.times.step_seconds, rel=1e-6)
    if isinstance(result, PlanResult):
        assert step.times.step_seconds == result.plan.step_seconds


def test_nothing_runs_before_it_is_issued_or_before_what_it_waits_for(
    on_gpu: Estimate, sharded: Estimate, planned: PlanResult
) -> None:
    for result in (on_gpu, sharded, planned):
        step = shown_step(result)
        times, schedule_ = step.op_times, step.times
        assert times is not None and schedule_ is not None
        trace, tiny = step.timeline.trace, 1e-12
        for number, op in enumerate(trace.ops):
            if schedule_.costs.costs[op.signature].kernels:
                assert times.begin[number] >= times.host_end[number] + schedule_.costs.host.launch - tiny
            for other in (other for other in op.waits_for if other >= 0):  # others are of the step before
                assert times.begin[number] >= times.end[other] - tiny
            if op.host_waits and number + 1 < len(trace.ops):
                assert times.host_begin[number + 1] >= times.end[number] - tiny
        assert (np.diff(times.host_begin) >= -tiny).all()
        assert times.host_begin[0] >= -schedule_.step_seconds


def test_arrows_show_what_waits_for_what(sharded: Estimate) -> None:
    checked = CheckedTrace(perfetto_trace(shown_step(sharded)))
    trace, costs = sharded.trace, sharded.costs
    assert costs is not None
    runs = [bool(costs.costs[op.signature].kernels) for op in trace.ops]
    arrows = {"launch": set(), "wait": set()}  # type: dict[str, set[tuple[int, int]]]
    kinds = [event["cat"] for event in checked.events if event["ph"] == "s"]
    for kind, (before, after) in zip(kinds, checked.arrows, strict=True):
        arrows.setdefault(kind, set()).add((before["args"]["op"], after["args"]["op"]))
    assert arrows["launch"] == {(op, op) for op in range(len(trace.ops)) if runs[op]}
    expected = set()
    for number, op in enumerate(trace.ops):
        for other in op.waits_for:
            # An op without a kernel is shown by its neighbour on the same queue.
            later = (n for n in range(number, len(trace.ops)) if runs[n] and trace.ops[n].queue == op.queue)
            queue = trace.ops[other].queue
            earlier = (n for n in range(other, -1, -1) if runs[n] and trace.ops[n].queue == queue)
            ends = (next(earlier, -1), next(later, -1))
            if min(ends) >= 0:
                expected.add(ends)
    assert arrows["wait"] == expected and len(expected) > 20


def test_counters_are_the_timeline(result: Estimate | PlanResult, written: dict[str, Any]) -> None:
    checked, timeline = CheckedTrace(written), result.timeline
    by_category = [timeline.categories_at(op) for op in range(len(timeline.trace.ops))]
    changed = [now for last, now in zip([None, *by_category], by_category) if now != last]
    assert [event["args"] for event in checked.counters["memory by category"]] == changed
    totals = [event["args"]["bytes"] for event in checked.counters["memory"]]
    assert totals == [sum(now.values()) for now in changed]
    assert max(totals) == timeline.peak_bytes == int(timeline.used_bytes.max())
    (mark,) = checked.marks
    assert mark["args"]["bytes"] == timeline.peak_bytes and mark["args"]["op"] == timeline.peak_op
    at_peak = [event for event in checked.counters["memory"] if event["args"]["bytes"] == max(totals)]
    assert mark["ts"] == at_peak[0]["ts"]


def test_arguments_say_what_the_op_is(on_gpu: Estimate) -> None:
    checked = CheckedTrace(perfetto_trace(shown_step(on_gpu)))
    trace, costs = on_gpu.trace, on_gpu.costs
    assert costs is not None and on_gpu.time is not None
    found = {one["args"]["op"]: one["args"] for one in checked.track("compute")}
    for number, args in found.items():
        op = trace.ops[number]
        assert args["module"] == trace.module_name(op.module) and args["phase"] == op.phase
        assert args["price"] == costs.costs[op.signature].source
        assert args["bytes in use"] == on_gpu.timeline.used_bytes[number]
    assert sum(args["flops"] for args in found.values()) == on_gpu.time.flops


def test_modules_enclose_their_ops(result: Estimate | PlanResult, written: dict[str, Any]) -> None:
    checked, trace = CheckedTrace(written), result.timeline.trace
    around = checked.track("phases and modules")
    ops = (
        checked.track("runs the ops")
        if "runs the ops" in checked.names.values()
        else checked.track("compute")
    )
    for one in ops[:: max(len(ops) // 50, 1)]:
        op = trace.ops[one["args"]["op"]]
        names = {m["name"] for m in around if m["ts"] <= one["ts"] and end_of(one) <= end_of(m)}
        assert op.phase in names
        assert op.module < 0 or trace.module_name(op.module) in names
        assert ("recomputation" in names) is op.recompute


def test_two_queues_by_hand() -> None:
    """A kernel of 4 s, a copy of 2 s that waits for it, a kernel of 3 s that waits for the copy.

    The host takes 1 s for each and a launch half a second. Steady: the first kernel was issued long before.
    """
    signatures = tuple(Signature(f"aten.{n}.default", (), (), "[[],{}]", False, False, False) for n in "abc")
    ops = (
        Op(0, "forward", -1, -1, False, -1, (), (), ()),
        Op(1, "forward", -1, -1, False, -1, (), (), (), queue="copies", waits_for=(0,)),
        Op(2, "backward", -1, -1, False, -1, (), (), (), waits_for=(1,)),
    )
    trace = Trace("t", "cuda", "2", signatures, ops, (), (), (), (), (), (), 0)
    host = Host(False, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, launch=0.5)
    device = Device("tiny", "cuda", 1 << 30, 1e9, {"fp32": 1e12}, sm_count=4)
    costs = CostTable(device, host, tuple(OpCost(s, "formula") for s in (4.0, 2.0, 3.0)), uncertainty=0.1)
    found = op_times(schedule(trace, costs))
    assert found.begin.tolist() == pytest.approx([0.0, 4.0, 6.0])
    assert found.end.tolist() == pytest.approx([4.0, 6.0, 9.0])
    # The first has to be issued half a second before the step; the others as early as the host can.
    assert found.host_end.tolist() == pytest.approx([-0.5, 2.0, 3.0])
    assert found.host_begin.tolist() == pytest.approx([-1.5, 1.0, 2.0])


def test_a_device_without_speed_is_refused(on_gpu: Estimate, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing is known about the device's speed"):
        write_perfetto(replace(on_gpu, costs=None, time=None), tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_a_device_without_speed_is_refused_before_the_work(tmp_path: Path) -> None:
    """There is no such step: nobody has looked for it yet."""
    device = tmp_path / "device.json"
    device.write_text(json.dumps({"name": "small", "memory_bytes": 1 << 34}))
    line = ["estimate", "missing.py:build", "--device", str(device), "--perfetto", str(tmp_path / "t.json")]
    done = CliRunner().invoke(commands.app, line)
    assert done.exit_code == 2 and "nothing is known about the device's speed" in done.output
    assert "missing.py" not in done.output


def test_a_step_without_ops_is_shown(tmp_path: Path) -> None:
    empty = trainfit.estimate(Trace("t", "cpu", "2.13.0", (), (), (), (), (), (), (), (), 0), device="cpu")
    write_perfetto(empty, tmp_path / "t.json")
    CheckedTrace(json.loads((tmp_path / "t.json").read_text()))
