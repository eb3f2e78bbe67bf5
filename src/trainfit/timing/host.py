"""What Python, the dispatcher and autograd take around the operators of a step, measured on this machine.

Some small steps are really run, and their operators timed in turn with them. What the operators do not
explain belongs to the host, and is shared out among the calls. In tiny steps Python finds its own data in
the core's cache. In larger ones the operators push it out, and Python is slower after each of them: that
difference is the time to load it again.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainfit.devices.device_table import Device
from trainfit.operators.recorded_calls import filled_shares, tensors_of
from trainfit.timing.bench import Bench, situations_of
from trainfit.timing.executor_seconds import region_seconds
from trainfit.timing.locality import this_machines_caches
from trainfit.timing.samples import MEDIUM, TINY, Sizes, captured
from trainfit.traces.trace import PHASES, Trace

_BUDGET_SECONDS = 1.0
_LOOP = 300
_ISSUED_STEPS = 40
"""Of each sample on a GPU; the first quarter warms up."""


@dataclass
class UnexplainedPhase:
    """Sums over some samples: what operators do not explain, and the calls it is shared out among."""

    rest: float = 0.0
    spread: float = 0.0
    """Half the distance between the quartiles of the steps."""
    operators: int = 0
    views: int = 0
    calls: int = 0
    tensors: int = 0
    reloads: float = 0.0
    """Operators that fill the core's own cache; those that fill a part of it count in part."""
    wrapped: int = 0
    """Of steps of a rank: operators on distributed tensors, conversions of them, ops of units of FSDP."""
    converted: int = 0
    unit_ops: int = 0
    rank_reloads: float = 0.0
    """Of these three as many as find the core's cache filled by operators."""

    def explained(self, host: Mapping[str, float], operator: str) -> float:
        """Return what these figures of the host take in this phase."""
        return (
            self.operators * host[operator]
            + self.views * host["view_op"]
            + self.calls * host["module_call"]
            + self.tensors * host["tensor"]
        )


class HostSeconds(NamedTuple):
    """What the host takes: the fields of `costs.table.Host`, and how far measurements of some were apart."""

    seconds: dict[str, float]
    spreads: dict[str, float]
    """Half the distance between the quartiles, relative to the figure."""


def host_seconds() -> dict[str, float]:
    """Measure the seconds of each kind of call on the host, beside operators of this machine's processor."""
    return measure_host().seconds


def measure_host() -> HostSeconds:
    """Measure the same, and how far measurements were apart.

    Python runs in one thread, and meanwhile so do the operators: only then is their share known.
    """
    with _one_thread():
        host, spreads = _shared_out(_measure(_TINY_SAMPLES), _measure(_LIST_SAMPLES)["optimizer"])
        medium = _measure((("gpt2", MEDIUM, False), ("llama", MEDIUM, False)))
        slower = sum(phase.rest - phase.explained(host, _OPERATOR[name]) for name, phase in medium.items())
        host |= region_seconds()
        host["cache_bytes"] = this_machines_caches().own_bytes
        host["reload"] = max(slower, 0.0) / sum(phase.reloads for phase in medium.values())
    return HostSeconds(host, spreads)


def issuing_seconds(gpu: Device, place: str, synchronize: Callable[[], object]) -> HostSeconds:
    """Measure what the host takes to issue tiny operators, where a GPU runs them.

    `place` is where torch makes the GPU's tensors. The GPU has nothing to do when a step begins, and its
    queue holds all that a step issues: the host never waits.
    """

    def measure(samples: Sequence[tuple[str, Sizes, bool]]) -> dict[str, UnexplainedPhase]:
        phases = {phase: UnexplainedPhase() for phase in PHASES}
        for given in samples:
            sample, trace = captured(*given, gpu=gpu, place=place, clock=time.perf_counter)
            steps: list[dict[str, float]] = []
            for _ in range(_ISSUED_STEPS):
                synchronize()
                steps.append(sample.run())
            _add_steps(phases, steps[len(steps) // 4 :], trace)
        return phases

    return _shared_out(measure(_TINY_SAMPLES), measure(_LIST_SAMPLES)["optimizer"])


def _shared_out(tiny: dict[str, UnexplainedPhase], lists: UnexplainedPhase) -> HostSeconds:
    """Share what tiny steps take among the calls in them."""
    host = dict.fromkeys((*_OPERATOR.values(), "tensor"), 0.0)
    spreads: dict[str, float] = {}
    for name, times in (("view_op", _view_times()), ("module_call", _module_call_times())):
        host[name], spreads[name] = statistics.median(times), half_quartiles(times)
    for name, phase in tiny.items():
        operator = _OPERATOR[name]
        host[operator] = (phase.rest - phase.explained(host, operator)) / phase.operators
        spreads[operator] = phase.spread / phase.operators
    host["tensor"] = (lists.rest - lists.explained(host, "optimizer_op")) / lists.tensors
    spreads["tensor"] = lists.spread / lists.tensors
    return HostSeconds(host, {name: spread / abs(host[name] or 1.0) for name, spread in spreads.items()})


_TINY_SAMPLES = (("gpt2", TINY, False), ("llama", TINY, False))
_LIST_SAMPLES = (("gpt2", TINY, True),)
_OPERATOR = {"forward": "forward_op", "backward": "backward_op", "optimizer": "optimizer_op"}


def _measure(samples: Sequence[tuple[str, Sizes, bool]]) -> dict[str, UnexplainedPhase]:
    phases = {phase: UnexplainedPhase() for phase in PHASES}
    for given in samples:
        sample, trace = captured(*given)
        add_sample(phases, sample.run, trace, _BUDGET_SECONDS)
    return phases


def add_sample(
    phases: dict[str, UnexplainedPhase],
    run: Callable[[], dict[str, float]],
    trace: Trace,
    budget_seconds: float,
) -> None:
    """Run a step, which tells the seconds of its phases, in turn with its operators: add what they leave."""
    situations = situations_of(trace)
    distinct = [situation for found in situations for situation in found]
    steps: list[dict[str, float]] = []
    run()
    timings = Bench("cpu").time(distinct, budget_seconds, between=lambda: steps.append(run()))
    seconds = {s: timing.seconds if timing else 0.0 for s, timing in zip(distinct, timings)}
    per_signature = [
        sum(seconds[situation] * count for situation, count in found.items()) / max(found.total(), 1)
        for found in situations
    ]
    _add_steps(phases, steps, trace)
    for op in trace.ops:
        phases[op.phase].rest -= per_signature[op.signature]


def _add_steps(phases: dict[str, UnexplainedPhase], steps: Sequence[dict[str, float]], trace: Trace) -> None:
    """Add what steps took, and the calls in one of them."""
    for name, phase in phases.items():
        times = [step[name] for step in steps]
        phase.rest += statistics.median(times)
        phase.spread += half_quartiles(times)
    tensors = tensors_of(trace.signatures)
    filled = filled_shares(trace.signatures, this_machines_caches().own_bytes)
    for op in trace.ops:
        phase, signature = phases[op.phase], trace.signatures[op.signature]
        phase.views += signature.view
        phase.operators += not signature.view
        phase.tensors += tensors[op.signature]
        phase.reloads += filled[op.signature]
        phase.wrapped += op.wrapped
        phase.converted += op.converted
        phase.unit_ops += bool(op.exchange)
        phase.rank_reloads += filled[op.signature] * (op.wrapped + op.converted + bool(op.exchange))
    phases["forward"].calls += len(trace.calls)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _view_times() -> list[float]:
    """Time views of a tensor that autograd follows, as a model's forward makes them."""
    base = torch.zeros(8, 8, 8, requires_grad=True) * 1
    views = (lambda: base.view(64, 8), lambda: base.transpose(0, 1), lambda: base[:, :4])
    times = [_seconds(view) for _ in range(_LOOP) for view in views]
    nothing = _seconds_of_nothing()
    return [seconds - nothing for seconds in times]


def _module_call_times() -> list[float]:
    module, value = nn.Sequential(nn.Identity()), torch.zeros(1)
    # Two calls: of the container and of what is in it.
    times = [_seconds(lambda: module(value)) for _ in range(_LOOP)]
    nothing = _seconds_of_nothing()
    return [(both - nothing) / 2 for both in times]


def half_quartiles(times: Sequence[float]) -> float:
    """Return half the distance between the quartiles of some times."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [0.0] * 3
    return (high - low) / 2


def _seconds_of_nothing() -> float:
    return statistics.median(_seconds(lambda: None) for _ in range(_LOOP))


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
