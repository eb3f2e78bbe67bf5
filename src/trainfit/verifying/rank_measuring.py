"""Run the real step of one rank among others, and measure it: what it allocates, by phase.

All ranks have to run the step equally often, whatever each of them finds: what decides is asked of all. The
step's process groups are silent ones (`silent_backend.py`); so its time says nothing, and is not measured.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.pipelining  # makes a tensor of four bytes when it is loaded: not while measuring
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfit.basics.doing import doing
from trainfit.capturing.left_as_found import FoundState
from trainfit.capturing.random_stream import seeded
from trainfit.capturing.replacing import replaced
from trainfit.planning.plan_replay import replay_plan
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.traces.simulate import Timeline
from trainfit.traces.step_runs import Steps
from trainfit.traces.trace import PHASES, Trace
from trainfit.verifying.plan_comparison import planned
from trainfit.verifying.rank_control import RankControl
from trainfit.workspace.profiler import AllocationLog, Span, no_cycle_collection, profile_allocations

_FEWEST_WARM_UPS = 2
"""DistributedDataParallel broadcasts and rebuilds its buckets in the second step."""
_MOST_WARM_UPS = 20


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one step of one rank, predicted or measured."""

    peak_bytes: int
    persistent_bytes: int
    phase_bytes: dict[str, int]
    """The most in each phase. `optimizer` is all that follows the last backward; `forward` is the rest."""


def predicted_memory(timeline: Timeline) -> RankMemory:
    """Return what a rank's step is predicted to need."""
    found = dict.fromkeys(PHASES, 0)
    trains = any(op.phase == "backward" for op in timeline.trace.ops)
    following = "optimizer" if trains else "forward"
    for op, used in zip(reversed(timeline.trace.ops), reversed(timeline.used_bytes.tolist())):
        # An optimizer that steps inside of backward is part of it; before another forward, part of that.
        if op.phase == "backward" or (op.phase == "forward" and following != "optimizer"):
            following = op.phase
        found[following] = max(found[following], used)
    return RankMemory(timeline.peak_bytes, timeline.persistent_bytes, found)


def planned_memory(plan: Plan, trace: Trace) -> RankMemory:
    """Return what a rank's step is predicted to need with a plan, which may be that of another rank.

    Raises `PlanDoesNotFit` if the plan's regions are not those of this rank.
    """
    timeline, peak_bytes = replay_plan(plan, trace)
    found = predicted_memory(timeline)
    # What is in no trace is kept by autograd, until backward is over.
    besides = peak_bytes - timeline.peak_bytes
    phases = {name: size + besides * (name != "optimizer") for name, size in found.phase_bytes.items()}
    return RankMemory(peak_bytes, found.persistent_bytes, phases)


def measure_rank(
    build: Callable[[], Step],
    steps: Steps,
    control: RankControl,
    *,
    plan: Plan | None = None,
    eager: bool = False,
) -> tuple[RankMemory, int]:
    """Build the real step of this rank, warm it up, and measure one run; also returns how often it ran."""
    gc.collect()  # what earlier runs left behind in cycles would take real memory beside this one
    stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
    found = FoundState()
    fewest = max(_FEWEST_WARM_UPS, *control.gathered(steps.runs_before))
    try:
        with stance, seeded(), no_cycle_collection(), profile_allocations(only_own=True) as log:
            doing("warming up and counting allocations")
            step = planned(build, plan)()
            runs = _warm_up(step, fewest, steps.all_stepped, control)
            with _backward_ranges(log), log.range("step"):
                result = step.run()
        del result
    finally:
        found.put_back()
    return _memory(log), runs + 1


def _warm_up(step: Step, fewest: int, all_step: bool, control: RankControl) -> int:
    """Run the step until it is steady on all ranks, and return how often that was."""
    stepped: set[int] = set()
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: stepped.update(_parameter_ids(optimizer))
    )
    runs = 0
    try:
        while runs < fewest or (
            runs < _MOST_WARM_UPS and not control.all(_is_steady(step, stepped, all_step))
        ):
            step.run()
            # First steps leave cycles that hold tensors; when they go is chance otherwise.
            gc.collect()
            runs += 1
    finally:
        handle.remove()
    return runs


def _is_steady(step: Step, stepped: set[int], all_step: bool) -> bool:
    own = (_parameter_ids(optimizer) for optimizer in step.optimizers)
    return not all_step or all(not parameters or parameters & stepped for parameters in own)


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@contextlib.contextmanager
def _backward_ranges(log: AllocationLog) -> Iterator[None]:
    """Mark in the log when autograd's engine runs."""

    def marked(original: Any) -> Any:
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            with log.range("backward"):
                return original(*args, **kwargs)

        return _engine_run_backward

    with (
        replaced(graph, "_engine_run_backward", marked),
        replaced(torch.autograd, "_engine_run_backward", marked),
    ):
        yield


def _memory(log: AllocationLog) -> RankMemory:
    usage = log.usage("step")
    [(begin, end)] = log.spans("step")
    backward = [(first, last) for first, last in log.spans("backward") if begin <= first and last <= end]
    over = max((last for _, last in backward), default=end)
    forward: list[Span] = []
    since = begin
    for first, last in backward:
        if first > since:
            forward.append((since, first))
        since = max(since, last)
    phases = {"forward": forward or [(begin, over)], "backward": backward, "optimizer": [(over, end)]}
    return RankMemory(
        usage.peak_bytes,
        usage.start_bytes,
        {name: log.most_bytes(spans) for name, spans in phases.items()},
    )
