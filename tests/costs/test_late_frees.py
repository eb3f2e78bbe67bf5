"""Memory that `record_stream` names: free when its queue has caught up, in ops that the host issues."""

from __future__ import annotations

from dataclasses import replace

from trainfit.costs.late_frees import with_late_frees
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Interval, Op, Signature, Storage, Trace

DEVICE = Device("tiny", "cuda", 1 << 30, 1e9, {"fp32": 1e12}, sm_count=4)
HOST = Host(False, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)


def step(side_seconds: float, *, recorded: bool = True, host: Host = HOST) -> Schedule:
    """A copy on a side stream reads a tensor that dies at once; five more ops of a second follow it.

    The host issues an op each second; the last one waits for the side stream, so that steps do not pile up.
    """
    queues = ["compute", "side", *["compute"] * 5, "compute"]
    seconds = [1.0, side_seconds, *[1.0] * 5, 0.5]
    signatures = tuple(Signature(f"aten.op{n}", (), (), "[[],{}]", False, False, False) for n in range(8))
    ops = tuple(
        Op(n, "forward", -1, -1, False, -1, (), (), (), queue, (1,) if n == 7 else (), host_waits=n == 7)
        for n, queue in enumerate(queues)
    )
    held = Storage(512, "temporary", 0, 0, 2, (Interval("program", 0, 2),))
    storage = replace(held, also_used_on=("side",)) if recorded else held
    trace = Trace("t", "cuda", "2", signatures, ops, (storage,), (), (), (), (), (), 0)
    return schedule(trace, CostTable(DEVICE, host, tuple(OpCost(s, "formula") for s in seconds), 0.1))


def test_a_queue_that_is_behind_keeps_memory_from_being_used_again() -> None:
    """The copy is issued as the second op, at 2, and takes 3.5 s: the sixth op is issued after it is done."""
    times = step(3.5)
    late = with_late_frees(times)
    assert late.storages[0].end == 5
    assert simulate(late).live_bytes == (512,) * 5 + (0,) * 3
    # What the program counts stays as it was.
    assert simulate(times.trace).live_bytes == (512,) * 2 + (0,) * 6


def test_a_queue_that_has_caught_up_keeps_nothing_longer() -> None:
    assert with_late_frees(step(0.5)).storages[0].end == 2


def test_the_longer_the_queue_is_behind_the_later_memory_is_free_but_within_the_step() -> None:
    ends = [
        with_late_frees(step(seconds)).storages[0].end or 0 for seconds in (0.5, 1.5, 2.5, 3.5, 4.5, 50.0)
    ]
    assert ends == sorted(ends) and ends[-1] <= 8


def test_what_is_not_recorded_or_runs_on_a_processor_stays() -> None:
    times = step(3.5, recorded=False)
    assert with_late_frees(times) is times.trace
    processor = step(3.5, host=replace(HOST, runs_kernels=True))
    assert with_late_frees(processor) is processor.trace
