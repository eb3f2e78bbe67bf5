"""Compiled steps within a budget in bytes, against torch's `activation_memory_budget`: measured on the CPU.

    python benchmarks/compile_plans.py                  all cases
    python benchmarks/compile_plans.py transformer      some cases
    python benchmarks/compile_plans.py --fractions 5    fewer points of torch's

Every row is a process of its own: a model compiled without a plan, with one of torch's fractions, or within
one of our budgets (shares of the way from the smallest peak that is promised to the peak without a plan). The
peak is that of the profiler's allocation events of forward and backward in a steady step, with parameters,
buffers and batch. Exit code 1 if a measured peak is above its budget, or more than 2 % from the promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

SHARES = (0.0, 0.25, 0.5, 0.75)
CASE_SECONDS = 1500
BUILT_IN = {
    "gpt2-tiny": {"batch": 4, "seq": 128},
    "llama-tiny": {"batch": 4, "seq": 128},
    "bert-tiny": {"batch": 4, "seq": 128},
    "vit-tiny": {"batch": 8},
    "resnet-tiny": {"batch": 8},
}
CASES = ("transformer", "llama-style", "two-traversals", *BUILT_IN)


@dataclass(frozen=True)
class Result:
    """One compiled step."""

    case: str
    way: str
    """`plain`, `torch 0.5` (a fraction) or `budget 0.25` (a share of the way)."""
    budget_bytes: int = 0
    promised_bytes: int = 0
    measured_bytes: int = 0
    added_seconds: float = 0.0
    """What computing again adds, predicted."""
    step_seconds: float = 0.0
    """The fastest of five steps."""
    compile_seconds: float = 0.0
    largest_difference: float = 0.0
    """Of loss and gradients to a float64 run without a compiler, relative to the largest value."""
    failure: str = ""

    @property
    def good(self) -> bool:
        if self.failure or not self.budget_bytes:
            return not self.failure
        close = abs(self.promised_bytes - self.measured_bytes) <= 0.02 * self.measured_bytes
        return self.measured_bytes <= self.budget_bytes and close


def built(case: str) -> tuple[Any, Callable[[Any], Any], list[Any]]:
    """Return a model, what calls it and returns a loss, and the tensors of the batch."""
    import torch

    torch.manual_seed(0)
    if case in BUILT_IN:
        from trainfit import StepOptions
        from trainfit.targets import load

        step = load(case, StepOptions(optimizer="none", **BUILT_IN[case])).build()
        given: list[Any] = []

        def note(_: Any, args: Any, kwargs: Any) -> None:
            given[:] = [args, kwargs]

        handle = step.model.register_forward_pre_hook(note, with_kwargs=True)
        step.run()
        handle.remove()
        step.model.zero_grad()
        args, kwargs = given
        batch = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]

        def call(model: Any) -> Any:
            out = model(*args, **kwargs)
            loss: Any = getattr(out, "loss", None)
            loss = out if loss is None else loss
            return loss if loss.dim() == 0 else loss.square().mean()

        return step.model, call, batch
    from compile_models import MODELS

    make, values = MODELS[case]()
    return make, lambda model: model(values), [values]


def compiled_model(case: str, way: str, budget: int) -> tuple[Any, Any, Callable[[Any], Any], list[Any]]:
    import torch
    from torch._functorch import config as functorch_config

    import trainfit

    model, call, batch = built(case)
    kind, _, amount = way.partition(" ")
    if kind == "torch":
        functorch_config.activation_memory_budget = float(amount)
        functorch_config.activation_memory_budget_solver = "dp"
    if kind == "budget":
        return model, trainfit.compile(model, budget=budget), call, batch
    return model, torch.compile(model), call, batch


def run_case(case: str, way: str, budget: int) -> Result:
    """Compile, run and measure one case in this process."""
    import torch

    import trainfit
    from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

    torch.set_num_threads(1)
    model, compiled, call, batch = compiled_model(case, way, budget)
    begin = time.perf_counter()
    try:
        torch.manual_seed(1)
        loss = call(compiled)
        loss.backward()
    except trainfit.BudgetTooSmall as error:
        return Result(case, way, budget, failure=str(error))
    compile_seconds = time.perf_counter() - begin
    difference = _difference(case, loss, model)
    del loss
    best = float("inf")
    for _ in range(5):
        model.zero_grad()
        begin = time.perf_counter()
        call(compiled).backward()
        best = min(best, time.perf_counter() - begin)
    model.zero_grad()
    with no_cycle_collection(), profile_allocations() as log, log.range("step"):
        call(compiled).backward()
    standing = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in
                (*model.parameters(), *model.buffers(), *batch)}  # fmt: skip
    plan = getattr(compiled, "compile_plan", None) if way.startswith("budget") else None
    return Result(
        case,
        way,
        budget,
        (plan.promised_bytes or 0) if plan else 0,
        sum(standing.values()) + log.usage("step").peak_bytes,
        sum(graph.seconds for graph in plan.graphs) if plan else 0.0,
        best,
        compile_seconds,
        difference,
    )


def _difference(case: str, loss: Any, model: Any) -> float:
    """Return how far loss and gradients are from a float64 run; nan where the step is random."""
    import torch

    reference, call, _ = built(case)
    if any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in reference.modules()):
        return float("nan")
    reference.double()
    try:
        expected = call(reference)
    except RuntimeError:
        return float("nan")  # its batch is float32
    expected.backward()
    pairs = [
        (loss, expected),
        *((p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters())),
    ]
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in pairs
        if a is not None and b is not None
    )


def smallest_of(case: str) -> int:
    """Return the smallest peak that is promised for a case."""
    import trainfit

    model, call, _ = built(case)
    try:
        call(trainfit.compile(model, budget=1))
    except trainfit.BudgetTooSmall as error:
        return error.minimum_peak_bytes
    raise AssertionError("one byte is too small for any model")


def one(case: str, way: str, budget: int = 0) -> Result:
    """Run one row in a process of its own."""
    try:
        return Result(**run_one(__file__, case, "--way", way, "--budget", str(budget), seconds=CASE_SECONDS))
    except CaseFailed as error:
        return Result(case, way, budget, failure=str(error))


def as_line(r: Result) -> str:
    if r.failure:
        return f"MISS {r.case:16} {r.way:12} {r.failure}"
    verdict = "ok  " if r.good else "MISS"
    budget = f"budget {r.budget_bytes:>12,} promised {r.promised_bytes:>12,}" if r.budget_bytes else " " * 42
    return (
        f"{verdict} {r.case:16} {r.way:12} {budget} measured {r.measured_bytes:>12,}, "
        f"step {1e3 * r.step_seconds:8.1f} ms, again {1e3 * r.added_seconds:7.1f} ms (predicted), compiled "
        f"in {r.compile_seconds:5.1f} s, off by {r.largest_difference:.1e}"
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--fractions", type=int, default=4, help="how many fractions of torch's")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        if options.way == "smallest":
            report(asdict(Result(options.run_one, "smallest", measured_bytes=smallest_of(options.run_one))))
        else:
            report(asdict(run_case(options.run_one, options.way, options.budget)))
        return 0
    results: list[Result] = []
    for case in options.names or CASES:
        plain, smallest = one(case, "plain"), one(case, "smallest")
        rows = [plain]
        print(as_line(plain), flush=True)
        for number in range(options.fractions):
            rows.append(one(case, f"torch {(number + 1) / (options.fractions + 1):.2f}"))
            print(as_line(rows[-1]), flush=True)
        for share in SHARES if not plain.failure and not smallest.failure else ():
            low, high = smallest.measured_bytes, plain.measured_bytes
            rows.append(one(case, f"budget {share}", round(low + share * (high - low))))
            print(as_line(rows[-1]), flush=True)
        results += rows
    good = sum(result.good for result in results)
    print(f"{good} of {len(results)} compiled steps keep what they promise")
    write_rows("compile_plans", [asdict(r) for r in results], options.csv, everything=not options.names)
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
