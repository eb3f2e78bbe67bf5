"""What it takes to run a region under a plan, measured on this machine.

Small steps are run with and without regions in which every result is kept: nothing is computed again then,
and what the step takes longer is the executor itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from trainfit.applying import applied
from trainfit.capturing import capture
from trainfit.plans import OpDecision, Plan, Region, RegionKind
from trainfit.timing.samples import MEDIUM, TINY, Sample, Sizes
from trainfit.trace import Trace

_FAMILIES = ("gpt2", "llama")
_TINY_ROUNDS, _MEDIUM_ROUNDS = 20, 8

IsRegion = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class _Longer:
    """By how much steps were longer with regions, and what the regions were."""

    seconds: float = 0.0
    regions: int = 0
    ops: int = 0

    def __add__(self, other: _Longer) -> _Longer:
        return _Longer(self.seconds + other.seconds, self.regions + other.regions, self.ops + other.ops)


def region_seconds() -> dict[str, float]:
    """Measure the seconds of a region's call and of each op in it: two fields of `costs.table.Host`.

    The call is measured where everything is in the core's cache, and regions of one op compare with large
    ones. Ops are measured among operators that fill that cache, as in a step that is worth a plan.
    """
    tiny = [_captured(family, TINY) for family in _FAMILIES]
    medium = [_captured(family, MEDIUM) for family in _FAMILIES]
    large, small = _longer(tiny, is_block, _TINY_ROUNDS), _longer(tiny, _is_norm, _TINY_ROUNDS)
    calls = small.seconds * large.ops - large.seconds * small.ops
    call = max(calls / (small.regions * large.ops - large.regions * small.ops), 0.0)
    among_others = _longer(medium, is_block, _MEDIUM_ROUNDS)
    op = max((among_others.seconds - call * among_others.regions) / among_others.ops, 0.0)
    return {"region_call": call, "region_op": op}


def _captured(family: str, sizes: Sizes) -> tuple[Sample, Trace]:
    return Sample(family, sizes), capture(lambda: Sample(family, sizes).as_step())


def is_block(module: nn.Module, name: str) -> bool:
    """Whether a module is one of a numbered row, as the layers of a transformer are."""
    return name.rpartition(".")[2].isdigit()


def _is_norm(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm)


def _longer(samples: Sequence[tuple[Sample, Trace]], is_region: IsRegion, rounds: int) -> _Longer:
    """Run the samples with and without regions in turn; return the sum over the samples."""
    found = _Longer()
    for sample, trace in samples:
        plan = keeping_everything(trace, sample.model, is_region)
        differences: list[float] = []
        sample.run()
        for _ in range(rounds):
            plain = sum(sample.run().values())
            with applied(sample.model, plan):
                differences.append(sum(sample.run().values()) - plain)
        # The first was the first of its kind.
        seconds = statistics.median(differences[1:])
        ops = sum(len(plan.kind_of(region).ops) for region in plan.regions)
        found += _Longer(seconds, len(plan.regions), ops)
    return found


def keeping_everything(trace: Trace, model: nn.Module, is_region: IsRegion) -> Plan:
    """Return a plan whose regions keep all of their results."""
    root = type(model).__name__
    names = {f"{root}.{name}" for name, module in model.named_modules() if is_region(module, name)}
    kinds: dict[RegionKind, int] = {}
    regions: list[Region] = []
    for call in trace.calls:
        if trace.module_name(call.module) in names:
            ops = range(call.forward_start, call.forward_end)
            kind = RegionKind(tuple(OpDecision(trace.op_name(op), (), "save") for op in ops))
            number = kinds.setdefault(kind, len(kinds))
            regions.append(Region(trace.module_name(call.module), 0, number, 0, 0.0))
    return Plan(
        target=trace.target,
        device="cpu",
        torch=trace.torch,
        trace_hash="",
        budget_bytes=0,
        kinds=tuple(kinds),
        regions=tuple(regions),
        peak_bytes=0,
        step_seconds=0.0,
        baseline_peak_bytes=0,
        baseline_step_seconds=0.0,
        bound_seconds=0.0,
    )
