"""What it takes to run a region under a plan, measured on this machine.

Small steps are run with and without regions in which every result is kept: nothing is recomputed then,
and what the step takes longer is the executor itself. Where regions are recomputed as a whole, it is what
the step takes longer than twice the regions' forward.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainfit.applying import applied
from trainfit.basics.doing import doing
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import OpDecision, Plan, Region, RegionKind
from trainfit.timing.clocks import cpu_clock
from trainfit.timing.samples import MEDIUM, TINY, Sample, captured
from trainfit.traces.trace import Trace

_FAMILIES = ("gpt2", "llama")
_TINY_ROUNDS, _MEDIUM_ROUNDS = 20, 8
_WARM_UP = 2
"""Steps that are not timed: the very first, and the one that still follows regions recomputed as a whole."""
_FOLLOWED, _WHOLE = Decision.SAVE, Decision.RECOMPUTE

IsRegion = Callable[[nn.Module, str], bool]


@dataclass
class _Longer:
    """By how much steps were longer with regions, and what the regions were."""

    seconds: float = 0.0
    regions: int = 0
    ops: int = 0


def region_seconds() -> dict[str, float]:
    """Measure the seconds of a region's call and of each op in it, for `costs.table.Host`.

    They are measured where everything is in the core's cache, and regions of one op compare with large ones.
    But an op that is followed is measured among operators that fill that cache, as in a step that is worth a
    plan: following it is most of what a region takes.
    """
    tiny, medium = ([captured(family, sizes) for family in _FAMILIES] for sizes in (TINY, MEDIUM))
    doing("measuring what running regions takes, once")
    call, _ = _call_and_op(tiny, _FOLLOWED)
    followed = _longer(medium, is_block, _MEDIUM_ROUNDS, _FOLLOWED)
    op = max((followed.seconds - call * followed.regions) / followed.ops, 0.0)
    checkpoint_call, checkpoint_op = _call_and_op(tiny, _WHOLE)
    return {
        "region_call": call,
        "region_op": op,
        "checkpoint_call": checkpoint_call,
        "checkpoint_op": checkpoint_op,
    }


def _call_and_op(samples: Sequence[tuple[Sample, Trace]], decision: Decision) -> tuple[float, float]:
    large, small = (_longer(samples, each, _TINY_ROUNDS, decision) for each in (is_block, _is_norm))
    calls = small.seconds * large.ops - large.seconds * small.ops
    call = max(calls / (small.regions * large.ops - large.regions * small.ops), 0.0)
    return call, max((large.seconds - call * large.regions) / large.ops, 0.0)


def is_block(module: nn.Module, name: str) -> bool:
    """Whether a module is one of a numbered row, as the layers of a transformer are."""
    return name.rpartition(".")[2].isdigit()


def _is_norm(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm)


def _longer(
    samples: Sequence[tuple[Sample, Trace]], is_region: IsRegion, rounds: int, decision: Decision
) -> _Longer:
    """Run the samples with and without regions in turn; return the sum over the samples."""
    found = _Longer()
    for sample, trace in samples:
        plan, planned = with_regions(trace, sample.model, is_region, decision), copy.deepcopy(sample)
        modules = [module for name, module in sample.model.named_modules() if is_region(module, name)]
        longer: list[float] = []
        with _forward_timed(modules) as forwards, applied(planned.model, plan):
            for _ in range(_WARM_UP + rounds):
                forwards.clear()
                without, with_plan = (sum(each.run().values()) for each in (sample, planned))
                longer.append(with_plan - without - (sum(forwards) if decision == _WHOLE else 0.0))
        found.seconds += statistics.median(longer[_WARM_UP:])
        found.regions += len(plan.regions)
        found.ops += sum(len(plan.kind_of(region).ops) for region in plan.regions)
    return found


@contextlib.contextmanager
def _forward_timed(modules: Sequence[nn.Module]) -> Iterator[list[float]]:
    """Let the seconds of each module's forward be put into a list."""
    clock, begins, found = cpu_clock(), [0.0], []

    def before(*_: Any) -> None:
        begins[0] = clock()

    def after(*_: Any) -> None:
        found.append(clock() - begins[0])

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before))
            hooks.enter_context(module.register_forward_hook(after))
        yield found


def with_regions(trace: Trace, model: nn.Module, is_region: IsRegion, decision: Decision) -> Plan:
    """Return a plan with the same decision for every op of its regions."""
    root = type(model).__name__
    names = {f"{root}.{name}" for name, module in model.named_modules() if is_region(module, name)}
    kinds: dict[RegionKind, int] = {}
    regions: list[Region] = []
    for call in trace.calls:
        if trace.module_name(call.module) in names:
            ops = call.body
            kind = RegionKind(tuple(OpDecision(trace.op_name(op), (), decision) for op in ops))
            number = kinds.setdefault(kind, len(kinds))
            name = trace.module_name(call.module)
            regions.append(Region(name, 0, number, 0, 0.0, whole=decision == _WHOLE))
    return Plan(
        target=trace.target,
        device="cpu",
        torch=trace.torch,
        trace_hash="",
        budget_bytes=0,
        kinds=tuple(kinds),
        regions=tuple(regions),
        peak_bytes=0,
        memory_bytes=0,
        step_seconds=0.0,
        baseline_peak_bytes=0,
        baseline_step_seconds=0.0,
        bound_seconds=0.0,
    )
