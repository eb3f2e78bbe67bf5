"""What it costs the host to run regions: our executor beside torch's own checkpointing, on tiny steps.

    python benchmarks/executor_time.py    three models, about a minute

The steps are so small that operators hardly count: what a step takes longer is Python. Every block is a
region. `checkpoint` is `torch.utils.checkpoint` as it is, `whole` a plan that keeps nothing; `selective` is
torch's own selective checkpointing that keeps the results of matrix products, `plan` a plan with the same
decisions. The five steps run in turn in one process with one thread; figures are medians of the differences
of neighbours.

At the end: what trainfit measures on this machine and counts in predictions (`costs.table.Host`).

Exit code 1 if a plan takes more than torch's selective checkpointing takes, or, whole, more than 1.05 times
what its checkpointing takes.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import trainfit
from result_files import arguments, write_rows
from trainfit import Step, StepOptions
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import Plan, RegionKind
from trainfit.targets.parse import load
from trainfit.timing.clocks import cpu_clock
from trainfit.timing.executor_seconds import is_block, region_seconds, with_regions

TINY = {
    "gpt2-tiny": StepOptions(batch=1, seq=8),
    "llama-tiny": StepOptions(batch=1, seq=8),
    "vit-tiny": StepOptions(batch=1),
}
PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.bmm.default")
ROUNDS = 60
LARGEST_RATIO, LARGEST_WHOLE_RATIO = 1.0, 1.05


@dataclass(frozen=True)
class Result:
    """One model: milliseconds per step, and what its regions are."""

    name: str
    regions: int
    ops: int
    step_ms: float
    checkpoint_ms: float
    whole_ms: float
    selective_ms: float
    plan_ms: float

    @property
    def ratio(self) -> float:
        """Ours to torch's selective checkpointing."""
        return self.plan_ms / self.selective_ms

    @property
    def whole_ratio(self) -> float:
        """Ours to torch's checkpointing, where nothing is kept."""
        return self.whole_ms / self.checkpoint_ms

    @property
    def good(self) -> bool:
        return self.ratio <= LARGEST_RATIO and self.whole_ratio <= LARGEST_WHOLE_RATIO


def keeping_products(trace: trainfit.Trace, model: nn.Module) -> Plan:
    """Return a plan that keeps what torch's policy below keeps."""
    plan = with_regions(trace, model, is_block, Decision.SAVE)
    decisions = {True: Decision.SAVE, False: Decision.RECOMPUTE}
    kinds = [
        tuple(replace(op, decision=decisions[op.name in PRODUCTS]) for op in kind.ops) for kind in plan.kinds
    ]
    return replace(plan, kinds=tuple(map(RegionKind, kinds)))


def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products."""
    keeps = str(operator) in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def under_torch(step: Step, **options: Any) -> Step:
    """Put every block under torch's own checkpointing."""

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    for name, module in step.model.named_modules():
        if is_block(module, name):
            module.forward = checkpointed(module.forward)  # type: ignore[method-assign]
    return step


def run_case(name: str) -> Result:
    """Run the five steps of one model in turn."""
    build = load(name, TINY[name]).build
    trace = trainfit.capture(build, device="cpu")
    steps = [build() for _ in range(5)]
    plan = keeping_products(trace, steps[4].model)
    under_torch(steps[1])
    trainfit.apply(steps[2].model, with_regions(trace, steps[2].model, is_block, Decision.RECOMPUTE))
    under_torch(steps[3], context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    trainfit.apply(steps[4].model, plan)
    clock = cpu_clock()
    times: list[list[float]] = [[] for _ in steps]
    for step in steps * 5:
        step.run()
    for _ in range(ROUNDS):
        for own, step in zip(times, steps):
            begin = clock()
            step.run()
            own.append(clock() - begin)
    longer = [statistics.median(a - b for a, b in zip(own, times[0])) * 1e3 for own in times[1:]]
    ops = sum(len(plan.kind_of(region).ops) for region in plan.regions)
    return Result(name, len(plan.regions), ops, statistics.median(times[0]) * 1e3, *longer)


def as_line(r: Result) -> str:
    verdict = "ok  " if r.good else "MISS"
    return (
        f"{verdict} {r.name:12} {r.regions} regions, {r.ops} ops; step {r.step_ms:.1f} ms, "
        f"checkpoint {r.checkpoint_ms:+.1f}, whole {r.whole_ms:+.1f} ms ({r.whole_ratio:.2f} x), "
        f"selective {r.selective_ms:+.1f}, plan {r.plan_ms:+.1f} ms ({r.ratio:.2f} x)"
    )


def main() -> int:
    parser = arguments(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for name in TINY:
        results.append(run_case(name))
        print(as_line(results[-1]), flush=True)
    host = region_seconds()
    counted: dict[str, float] = {}
    for name, way in (("region", "followed"), ("checkpoint", "whole")):
        call, op = host[f"{name}_call"] * 1e3, host[f"{name}_op"] * 1e6
        counted |= {f"{name}_call_ms": call, f"{name}_op_us": op}
        print(f"counted: {call:.2f} ms per region that is {way}, {op:.0f} µs per op in it")
    write_rows("executor_time", [asdict(result) | counted for result in results], options.csv)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
