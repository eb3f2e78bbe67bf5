"""What Python, the dispatcher and autograd take around the operators of a step, measured on this machine.

Some small steps are really run, and their operators timed in turn with them. What the operators do not
explain belongs to the host, and is shared out among the calls. The models are large enough that their
tensors push Python's own data out of the nearest caches, as in a real step, and take milliseconds.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.capturing import capture
from trainfit.costs.table import tensors_of
from trainfit.models.gpt2 import GPT2, GPT2Config
from trainfit.models.llama import Llama, LlamaConfig
from trainfit.step import Step
from trainfit.timing.clocks import cpu_clock
from trainfit.timing.operators import Bench, situations_of
from trainfit.trace import PHASES, Trace

_VOCABULARY, _BATCH, _SEQUENCE = 512, 4, 128
_BUDGET_SECONDS = 1.5
_LOOP = 300


@dataclass
class Sample:
    """A small step whose phases can be run one by one."""

    model: nn.Module
    foreach: bool = False

    def __post_init__(self) -> None:
        """Make the tokens and the optimizer."""
        self.tokens = torch.randint(0, _VOCABULARY, (_BATCH, _SEQUENCE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=self.foreach)

    def run(self) -> dict[str, float]:
        """Run a step and return the seconds of each phase."""
        clock = cpu_clock()
        times = [clock()]
        loss: torch.Tensor = self.model(self.tokens, labels=self.tokens)
        times.append(clock())
        loss.backward()
        times.append(clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(clock())
        return {phase: times[n + 1] - times[n] for n, phase in enumerate(PHASES)}

    def as_step(self) -> Step:
        """Return the step in the form in which it is captured."""
        return Step(self.model, self.optimizer, self.run)


SAMPLES: tuple[Callable[[], Sample], ...] = (
    lambda: Sample(GPT2(GPT2Config(_VOCABULARY, _SEQUENCE, layers=3, heads=4, hidden=192)).train()),
    lambda: Sample(
        Llama(LlamaConfig(_VOCABULARY, layers=3, heads=4, kv_heads=4, hidden=192, feed_forward=512)).train()
    ),
    lambda: Sample(
        GPT2(GPT2Config(_VOCABULARY, _SEQUENCE, layers=3, heads=4, hidden=192)).train(), foreach=True
    ),
)


@dataclass
class _Phase:
    """Sums over the samples: what operators do not explain, and the calls it is shared out among."""

    rest: float = 0.0
    operators: int = 0
    views: int = 0
    calls: int = 0
    tensors: int = 0


def host_seconds() -> dict[str, float]:
    """Measure the seconds of each kind of call on the host: the fields of `costs.table.Host`.

    Python runs in one thread; so do the operators meanwhile, whose time is only known then.
    """
    with _one_thread():
        return _host_seconds()


def _host_seconds() -> dict[str, float]:
    view, module_call = _view_seconds(), _module_call_seconds()
    plain = {phase: _Phase() for phase in PHASES}
    foreach = {phase: _Phase() for phase in PHASES}
    for make in SAMPLES:
        sample = make()
        trace = capture(lambda make=make: make().as_step())  # type: ignore[misc]
        _add_sample(foreach if sample.foreach else plain, sample, trace)
    forward, backward, optimizer, lists = *plain.values(), foreach["optimizer"]
    optimizer_op = (optimizer.rest - optimizer.views * view) / optimizer.operators
    return {
        "forward_op": (forward.rest - forward.views * view - forward.calls * module_call) / forward.operators,
        "backward_op": (backward.rest - backward.views * view) / backward.operators,
        "optimizer_op": optimizer_op,
        "view_op": view,
        "module_call": module_call,
        "tensor": (lists.rest - lists.operators * optimizer_op) / lists.tensors,
    }


def _add_sample(phases: dict[str, _Phase], sample: Sample, trace: Trace) -> None:
    situations = situations_of(trace)
    distinct = [situation for found in situations for situation in found]
    steps: list[dict[str, float]] = []
    sample.run()
    timings = Bench("cpu").time(distinct, _BUDGET_SECONDS, between=lambda: steps.append(sample.run()))
    seconds = {s: timing.seconds if timing else 0.0 for s, timing in zip(distinct, timings)}
    per_signature = [
        sum(seconds[situation] * count for situation, count in found.items()) / max(found.total(), 1)
        for found in situations
    ]
    for name, phase in phases.items():
        phase.rest += statistics.median(step[name] for step in steps)
    tensors = tensors_of(trace.signatures)
    for op in trace.ops:
        phase = phases[op.phase]
        phase.rest -= per_signature[op.signature]
        phase.views += trace.signatures[op.signature].view
        phase.operators += not trace.signatures[op.signature].view
        phase.tensors += tensors[op.signature]
    phases["forward"].calls += len(trace.calls)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _view_seconds() -> float:
    """Time views of a tensor that autograd follows, as a model's forward makes them."""
    base = torch.zeros(8, 8, 8, requires_grad=True) * 1
    views = (lambda: base.view(64, 8), lambda: base.transpose(0, 1), lambda: base[:, :4])
    return statistics.median(_seconds(view) for _ in range(_LOOP) for view in views) - _seconds_of_nothing()


def _module_call_seconds() -> float:
    module, value = nn.Sequential(nn.Identity()), torch.zeros(1)
    # Two calls: of the container and of what is in it.
    both = statistics.median(_seconds(lambda: module(value)) for _ in range(_LOOP))
    return (both - _seconds_of_nothing()) / 2


def _seconds_of_nothing() -> float:
    return statistics.median(_seconds(lambda: None) for _ in range(_LOOP))


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
