"""Two queues, worked out by hand and against a simulation op by op."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.costs import schedule as schedules
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import summarise
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Collective
from trainfit.traces.trace import Module, Op, Signature, Trace

DEVICE = Device("tiny", "cuda", 1 << 30, 1e9, {"fp32": 1e12}, sm_count=4)
HOST = Host(
    runs_kernels=False,
    forward_op=1.0,
    backward_op=1.0,
    optimizer_op=1.0,
    view_op=0.5,
    module_call=0.0,
    tensor=0.0,
)


def trace_of(names: list[str], phases: list[str] | None = None) -> Trace:
    """Make a trace with one signature per op, named as given; a `view` is one, and a `read` is waited for."""
    signatures = tuple(
        Signature(f"aten.{name}.default", (), (), "[[],{}]", "view" in name, False, False) for name in names
    )
    phases = phases or ["forward"] * len(names)
    ops = tuple(
        Op(n, phase, -1, -1, False, -1, (), (), (), host_waits="read" in name)
        for n, (name, phase) in enumerate(zip(names, phases))
    )
    return Trace("t", "cuda", "2", signatures, ops, (), (), (), (), (), (), 0)


def costs_of(seconds: list[float], host: Host = HOST) -> CostTable:
    costs = tuple(OpCost(s, "formula", "compute", kernels=int(s > 0)) for s in seconds)
    return CostTable(DEVICE, host, costs, uncertainty=0.25)


def step_by_step(host: list[float], device: list[float], waits: list[bool], launch: float) -> float:
    """Run two steps through the queues op by op, and return how long the second takes."""
    host_now = device_now = 0.0
    first_end = 0.0
    for number in range(2 * len(host)):
        op = number % len(host)
        host_now += host[op]
        if device[op] > 0:
            device_now = max(device_now, host_now + launch) + device[op]
        if waits[op]:
            host_now = max(host_now, device_now)
        if number == len(host) - 1:
            first_end = device_now
    return device_now - first_end


def test_long_kernels_hide_the_host() -> None:
    """Three kernels of 10 s, issued in 1 s each: the device never waits."""
    found = schedule(trace_of(["a", "b", "c"]), costs_of([10.0, 10.0, 10.0]))
    assert found.step_seconds == pytest.approx(30.0)
    assert found.waiting_share == pytest.approx(0.0)


def test_short_kernels_wait_for_the_host() -> None:
    """Three kernels of 0.1 s, issued in 1 s each: the step takes as long as issuing it."""
    found = schedule(trace_of(["a", "b", "c"]), costs_of([0.1, 0.1, 0.1]))
    assert found.step_seconds == pytest.approx(3.0)
    assert found.waiting_share == pytest.approx(0.9)
    assert summarise(found).launch_bound


def test_reading_a_value_back_stops_the_host() -> None:
    """The host issues 1 s, waits for 10 s of kernel, then issues the next, which the device waits for."""
    names = ["a", "read", "b"]
    found = schedule(trace_of(names), costs_of([10.0, 0.0, 10.0]))
    # Steady: b of the last step runs while a is issued; a ends at 10, the host goes on at 10, issues b in 1.
    assert found.step_seconds == pytest.approx(
        step_by_step([1.0] * 3, [10.0, 0.0, 10.0], [False, True, False], 0)
    )
    assert found.step_seconds > 20.0


def test_once_more_costs_what_the_busier_queue_needs_and_everything_where_the_host_waits() -> None:
    names = ["mm", "read", "mm"]
    host = replace(HOST, launch=0.25)
    short = schedule(trace_of(names), costs_of([0.5, 0.5, 0.5], host))
    assert short.marginal_seconds.tolist() == [1.0, 1.75, 1.0]
    again = schedule(trace_of([*names, "read"]), costs_of([0.5, 0.5, 0.5, 0.5], host))
    assert again.step_seconds - short.step_seconds == pytest.approx(1.75)


def test_on_a_cpu_everything_is_one_queue() -> None:
    host = replace(HOST, runs_kernels=True)
    found = schedule(trace_of(["a", "view", "c"]), costs_of([10.0, 0.0, 10.0], host))
    assert found.step_seconds == pytest.approx(1.0 + 10.0 + 0.5 + 1.0 + 10.0)
    assert summarise(found).waiting_share == 0.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0.0, 2.0))
def test_any_step_equals_the_simulation_op_by_op(seed: int, length: int, launch: float) -> None:
    random_numbers = random.Random(seed)
    device = [random_numbers.choice([0.0, 0.2, 1.0, 3.0]) for _ in range(length)]
    names = [random_numbers.choice(["a", "view", "read"]) + str(n) for n in range(length)]
    device = [0.0 if "view" in name else seconds for name, seconds in zip(names, device)]
    waits = ["read" in name for name in names]
    host = [0.5 if "view" in name else 1.0 for name in names]
    found = schedule(trace_of(names), costs_of(device, replace(HOST, launch=launch)))
    expected = step_by_step(host, device, waits, launch)
    assert found.step_seconds == pytest.approx(expected, abs=1e-9)
    assert np.all(found.op_seconds >= -1e-9)


def test_phases_add_up() -> None:
    phases = ["forward", "backward", "backward", "optimizer"]
    found = schedule(trace_of(["a", "b", "c", "d"], phases), costs_of([2.0, 3.0, 4.0, 5.0]))
    time = summarise(found)
    assert time.forward_seconds + time.backward_seconds + time.optimizer_seconds == pytest.approx(
        time.step_seconds
    )
    assert (time.backward_seconds, time.optimizer_seconds) == (pytest.approx(7.0), pytest.approx(5.0))
    assert (time.lower_seconds, time.upper_seconds) == (pytest.approx(14 / 1.25), pytest.approx(14 * 1.25))


def test_the_range_is_as_wide_as_what_each_part_of_the_step_rests_on() -> None:
    """Three quarters are calibrated to a fifth, a quarter is not and may be twice as long."""
    table = costs_of([6.0, 2.0])
    kinds = (replace(table.costs[0], kind="streams"), replace(table.costs[1], kind="lists"))
    table = replace(
        table, costs=kinds, uncalibrated=frozenset({"lists"}), uncalibrated_uncertainty=1.0, uncertainty=0.2
    )
    time = summarise(schedule(trace_of(["a", "b"]), table))
    assert time.step_seconds == pytest.approx(8.0)
    assert time.uncalibrated == {"lists": pytest.approx(0.25)}
    assert time.uncalibrated_share == pytest.approx(0.25)
    factor = 1.2**0.75 * 2.0**0.25
    assert (time.lower_seconds, time.upper_seconds) == (pytest.approx(8 / factor), pytest.approx(8 * factor))


def test_a_launch_bound_step_rests_on_the_host() -> None:
    """Four ops of a quarter of a second each, issued one per second: three quarters are waiting."""
    table = replace(costs_of([0.25] * 4), uncertainty=0.1, host_uncertainty=3.0)
    time = summarise(schedule(trace_of(["a", "b", "c", "d"]), table))
    assert time.step_seconds == pytest.approx(4.0)
    assert time.uncalibrated == {"the host": pytest.approx(0.75)}
    assert time.upper_seconds == pytest.approx(4 * 1.1**0.25 * 4.0**0.75)


def test_modules_include_what_is_below_them() -> None:
    trace = trace_of(["a", "b", "c"], ["forward", "forward", "backward"])
    modules = (Module("Net", "Net", -1, (), ()), Module("Net.inner", "Linear", 0, (), ()))
    ops = tuple(replace(op, module=module) for op, module in zip(trace.ops, (0, 1, 1)))
    time = summarise(schedule(replace(trace, modules=modules, ops=ops), costs_of([10.0, 20.0, 30.0])))
    assert time.module_seconds == ((pytest.approx(30.0), pytest.approx(30.0)), (20.0, 30.0))


def test_an_empty_step_takes_no_time() -> None:
    time = summarise(schedule(trace_of([]), costs_of([])))
    assert time.step_seconds == 0.0
    assert time.operators == ()
    assert time.model_flops_utilisation is None


def test_operators_are_listed_longest_first_with_their_source() -> None:
    table = costs_of([1.0, 5.0])
    table = replace(table, costs=(table.costs[0], replace(table.costs[1], source="bandwidth")))
    time = summarise(schedule(trace_of(["a", "b"]), table))
    assert [operator.name for operator in time.operators] == ["aten.b.default", "aten.a.default"]
    assert [operator.name for operator in time.unpriced] == ["aten.b.default"]
    assert time.sources == {"formula": pytest.approx(1 / 6), "bandwidth": pytest.approx(5 / 6)}


# Any number of queues -----------------------------------------------------------------------------------


def on_queues(trace: Trace, queues: list[str], waits_for: dict[int, tuple[int, ...]] | None = None) -> Trace:
    ops = (
        replace(op, queue=queue, waits_for=(waits_for or {}).get(number, ()))
        for number, (op, queue) in enumerate(zip(trace.ops, queues))
    )
    return replace(trace, ops=tuple(ops))


def all_queues_op_by_op(trace: Trace, seconds: list[float], launch: float) -> float:
    """Run two steps op by op, each queue for itself; return how long the second takes."""
    ends: list[float] = []
    done: dict[str, float] = {}
    host_now = 0.0
    for number in range(2 * len(trace.ops)):
        op = trace.ops[number % len(trace.ops)]
        step = number - number % len(trace.ops)
        host_now += 1.0
        start = max(
            [done.get(op.queue, 0.0), *(ends[step + other] for other in op.waits_for if step + other >= 0)]
        )
        if seconds[op.signature] > 0:
            start = max(start, host_now + launch)
        done[op.queue] = start + seconds[op.signature]
        ends.append(done[op.queue])
        if op.host_waits:
            host_now = max(host_now, done[op.queue])
    return max(ends) - max(ends[: len(trace.ops)])


def test_what_runs_on_another_queue_takes_no_time_unless_something_waits_for_it() -> None:
    """A gather of 8 s beside 10 s of computing: hidden, until the last op needs it from the beginning."""
    plain = trace_of(["gather", "a", "b"])
    hidden = on_queues(plain, ["group 0", "compute", "compute"])
    exposed = on_queues(plain, ["group 0", "compute", "compute"], {1: (0,)})
    costs = costs_of([8.0, 10.0, 10.0])
    assert schedule(hidden, costs).step_seconds == pytest.approx(20.0)
    assert schedule(hidden, costs).busy_seconds == pytest.approx(20.0)
    # The next step's gather runs while this one computes, so it is hidden there too.
    assert schedule(exposed, costs).step_seconds == pytest.approx(20.0)
    # Unless it has to wait for what the step before does last, as FSDP's has to for the optimizer.
    after_the_last = on_queues(plain, ["group 0", "compute", "compute"], {0: (-1,), 1: (0,)})
    assert schedule(after_the_last, costs).step_seconds == pytest.approx(28.0)
    both_ways = on_queues(
        trace_of(["a", "gather", "b"]), ["compute", "group 0", "compute"], {1: (0,), 2: (1,)}
    )
    assert schedule(both_ways, costs_of([10.0, 8.0, 10.0])).step_seconds == pytest.approx(28.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.floats(0.0, 2.0))
def test_any_number_of_queues_equals_the_simulation_op_by_op(seed: int, length: int, launch: float) -> None:
    random_numbers = random.Random(seed)
    names = [random_numbers.choice(["a", "read"]) + str(n) for n in range(length)]
    seconds = [random_numbers.choice([0.0, 0.2, 1.0, 3.0]) for _ in range(length)]
    queues = [random_numbers.choice(["compute", "copies", "group 0", "group 1"]) for _ in range(length)]
    waits_for = {
        number: tuple(other for other in range(number) if queues[other] != queues[number])[-2:]
        for number in range(length)
        if random_numbers.random() < 0.4
    }
    for number in random_numbers.sample(range(length), length // 4):  # what waits for the step before
        others = [other for other in range(-length, 0) if queues[other] != queues[number]]
        waits_for[number] = (*others[-1:], *waits_for.get(number, ()))
    trace = on_queues(trace_of(names), queues, waits_for)
    found = schedule(trace, costs_of(seconds, replace(HOST, launch=launch)))
    expected = all_queues_op_by_op(trace, seconds, launch)
    assert found.step_seconds == pytest.approx(expected, abs=1e-9)
    assert np.all(found.op_seconds >= -1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 90))
def test_short_and_long_runs_are_added_up_alike_to_the_bit(seed: int, length: int) -> None:
    random_numbers = random.Random(seed)
    seconds = [random_numbers.choice([0.0, random_numbers.random()]) for _ in range(length)]
    queues = ["compute" if n % 40 else random_numbers.choice(["copies", "group 0"]) for n in range(length)]
    trace = on_queues(trace_of([f"a{n}" for n in range(length)]), queues)
    found = []
    for short in (0, 24, 1000):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(schedules, "_SHORT", short)
            found.append(schedule(trace, costs_of(seconds, replace(HOST, launch=0.3))).op_seconds.tolist())
    assert found[0] == found[1] == found[2]


# Communication ------------------------------------------------------------------------------------------


def exchanging(trace: Trace, *numbers: int) -> Trace:
    exchanged = Collective("all_gather", 8, "0", 1 << 20)
    signatures = [
        replace(signature, collective=exchanged) if number in numbers else signature
        for number, signature in enumerate(trace.signatures)
    ]
    return replace(trace, signatures=tuple(signatures))


def test_communication_that_nothing_waits_for_is_hidden() -> None:
    """A collective of 6 s beside kernels of 10 s and 10 s."""
    plain = exchanging(trace_of(["gather", "a", "b"]), 0)
    found = schedule(on_queues(plain, ["group 0", "compute", "compute"]), costs_of([6.0, 10.0, 10.0]))
    assert found.communication_seconds == pytest.approx(6.0)
    assert found.exposed_communication_seconds == pytest.approx(0.0)


def test_communication_is_exposed_as_far_as_compute_waits_for_it() -> None:
    """`b` waits for 16 s of communication, of which `a` hides a part."""
    plain = exchanging(trace_of(["gather", "a", "b"]), 0)
    waiting = on_queues(plain, ["group 0", "compute", "compute"], {2: (0,)})
    found = schedule(waiting, costs_of([16.0, 10.0, 10.0]))
    by_hand = all_queues_op_by_op(waiting, [16.0, 10.0, 10.0], 0.0)
    without = all_queues_op_by_op(waiting, [0.0, 10.0, 10.0], 0.0)
    assert found.step_seconds == pytest.approx(by_hand)
    assert found.exposed_communication_seconds == pytest.approx(by_hand - without)


def test_waiting_for_other_ranks_is_not_waiting_for_the_host() -> None:
    """All in one row: 30 s of communication in a step of 50 s, and a host that is never late."""
    plain = exchanging(trace_of(["a", "gather", "b"]), 1)
    in_turn = on_queues(plain, ["compute", "group 0", "compute"], {1: (0,), 2: (1,)})
    found = schedule(in_turn, costs_of([10.0, 30.0, 10.0]))
    assert found.step_seconds == pytest.approx(50.0)
    assert found.exposed_communication_seconds == pytest.approx(30.0)
    assert found.waiting_share == pytest.approx(0.0)
    assert summarise(found).communication_seconds == pytest.approx(30.0)
    assert not summarise(found).launch_bound


def test_on_a_cpu_all_communication_is_exposed() -> None:
    found = schedule(
        exchanging(trace_of(["a", "gather"]), 1), costs_of([10.0, 30.0], replace(HOST, runs_kernels=True))
    )
    assert found.exposed_communication_seconds == pytest.approx(30.0)
