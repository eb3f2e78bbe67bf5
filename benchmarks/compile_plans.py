"""Compiled steps within a budget in bytes, and against torch's `activation_memory_budget`, on the CPU.

    python benchmarks/compile_plans.py                          what is not among the rows yet
    python benchmarks/compile_plans.py u-net --backend inductor some cases, with another backend
    python benchmarks/compile_plans.py --again                  everything anew

Three parts for each model, each in a process of its own; the rows are kept as they are made, so that a run
that was stopped goes on.

`budgets`: the model compiled without a plan, and within four budgets (shares of the way from the smallest
peak that is promised to the peak without a plan). The peak is that of the profiler's allocation events of
forward and backward in a steady step, with parameters, buffers and batch. Missed if a measured peak is above
its budget, more than 2 % from the promise, or higher than that of a larger budget.

`sweep`: torch's choices for 20 fractions and each of its solvers, those that are the same once. Each is
judged by the same model as ours, and the plan of ours is looked for that its peak as a budget would have.
Missed if that one computes again for longer.

`against`: two of torch's fractions measured, and ours with what was measured as its budget. Missed if ours
has a higher peak, or a step that takes more than 3 % longer: the least processor time of 25 steps of each,
which take turns.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from own_process import CaseFailed, report, run_one
from result_files import RESULTS, arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

SHARES = (0.0, 0.25, 0.5, 0.75)
FRACTIONS = tuple(n / 20 for n in range(20))
SOLVERS = ("dp", "greedy", "ilp") if importlib.util.find_spec("scipy") else ("dp", "greedy")
"""Torch's `ilp` needs scipy."""
AGAINST = (0.5, 0.2)
TURNS = 25
"""Steps of torch's and of ours, one after the other."""
CASE_SECONDS = 2400
BUILT_IN = {
    "gpt2-tiny": {"batch": 4, "seq": 128},
    "bert-tiny": {"batch": 4, "seq": 128},
    "llama-tiny": {"batch": 4, "seq": 128},
    "vit-tiny": {"batch": 8},
    "resnet-tiny": {"batch": 8},
}
OWN = (
    "u-net",
    "dense",
    "mixer",
    "experts",
    "two-traversals",
    "residual",
    "depthwise",
    "dropout",
    "llama-style",
    "encoder-decoder",
    "recurrent",
    "autocast",
    "transformer",
)
CASES = (*OWN, *BUILT_IN)
"""Those that are quick first."""
PARTS = ("budgets", "sweep", "against")


@dataclass(frozen=True)
class Result:
    """One compiled step, or one of torch's choices."""

    case: str
    backend: str
    part: str
    way: str
    """`plain`, `budget 0.25` (a share of the way), `torch dp 0.50` (a fraction), `ours` (at that peak)."""
    budget_bytes: int = 0
    promised_bytes: int = 0
    """Of torch's choices what our model says of their peak, above what is there all the time."""
    measured_bytes: int = 0
    added_seconds: float = math.nan
    """What computing again adds, predicted."""
    ours_bytes: int = 0
    """Of a plan of ours with no higher peak than torch's choice."""
    ours_seconds: float = math.nan
    step_seconds: float = math.nan
    compile_seconds: float = math.nan
    largest_difference: float = math.nan
    """Of loss and gradients to a float64 run, relative to the loss and to the largest gradient."""
    good: bool = True
    failure: str = ""


class Model:
    """One case, built anew, and what calls it."""

    def __init__(self, case: str) -> None:
        import torch

        torch.manual_seed(0)
        self.case = case
        if case in BUILT_IN:
            self.module, self.call, self.batch = _built_in(case)
        else:
            from compile_models import MODELS

            self.module, values = MODELS[case]()
            self.call = lambda model: model(values)
            self.batch = [values]

    def standing_bytes(self) -> int:
        tensors = (*self.module.parameters(), *self.module.buffers(), *self.batch)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def fresh(case: str) -> Model:
    """Build a model for a compiler that has forgotten the ones before."""
    import torch

    torch._dynamo.reset()
    return Model(case)


def _built_in(case: str) -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch

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

    def call(model: Any) -> Any:
        out = model(*args, **kwargs)
        loss: Any = getattr(out, "loss", None)
        loss = out if loss is None else loss
        return loss if loss.dim() == 0 else loss.square().mean()

    return step.model, call, [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]


def measured(result: Result, model: Model, compiled: Any) -> Result:
    """Run a compiled model and write down what it needs."""
    import torch

    import trainfit
    from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

    begin = time.process_time()
    try:
        torch.manual_seed(1)
        loss = model.call(compiled)
        loss.backward()
    except trainfit.BudgetTooSmall as error:
        return replace(result, failure=str(error), good=False)
    compile_seconds = time.process_time() - begin
    difference = _difference(model, loss)
    del loss
    taken = step_seconds(model, compiled)
    model.module.zero_grad()
    with no_cycle_collection(), profile_allocations() as log, log.range("step"):
        model.call(compiled).backward()
    plan = getattr(compiled, "compile_plan", None) if result.budget_bytes else None
    peak = model.standing_bytes() + log.usage("step").peak_bytes
    promised = (plan.promised_bytes or 0) if plan else 0
    return replace(
        result,
        promised_bytes=promised,
        measured_bytes=peak,
        added_seconds=sum(graph.seconds for graph in plan.graphs) if plan else math.nan,
        step_seconds=taken,
        compile_seconds=compile_seconds,
        largest_difference=difference,
        good=not plan or (peak <= result.budget_bytes and abs(promised - peak) <= 0.02 * peak),
    )


def step_seconds(model: Model, compiled: Any) -> float:
    """Return the processor time of one steady step, forward and backward."""
    model.module.zero_grad()
    begin = time.process_time()
    model.call(compiled).backward()
    return time.process_time() - begin


def _difference(model: Model, loss: Any) -> float:
    """Return how far loss and gradients are from a float64 run; nan where the step is random."""
    reference = _reference(model.case)
    if reference is None:
        return math.nan
    expected, gradients = reference
    pairs = [(p.grad, g) for p, g in zip(model.module.parameters(), gradients) if g is not None]
    largest = max(float(g.abs().max()) for _, g in pairs)
    apart = max(float((p.double() - g).abs().max()) for p, g in pairs) / largest
    return max(apart, float((loss.double() - expected).abs() / expected.abs()))


@functools.cache
def _reference(case: str) -> tuple[Any, list[Any]] | None:
    """Return loss and gradients of a model in float64 without a compiler; None if it is random."""
    import torch

    model = Model(case)
    if any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.module.modules()):
        return None
    torch.set_default_dtype(torch.float64)
    try:
        model.module.double()
        for tensor in model.batch:
            if tensor.is_floating_point():
                tensor.data = tensor.data.double()
        loss = model.call(model.module)
    except RuntimeError:
        return None
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return loss.detach(), [p.grad for p in model.module.parameters()]


def planned(model: Model, budget: int, backend: Any) -> Any:
    import trainfit

    return trainfit.compile(model.module, budget=budget, backend=backend, fullgraph=True)


def budgets(case: str, backend: Any) -> Iterator[Result]:
    """Without a plan, and within four budgets."""
    import torch

    import trainfit

    model = fresh(case)
    row = Result(case, backend, "budgets", "plain")
    plain = measured(row, model, torch.compile(model.module, backend=backend))
    yield plain
    model = fresh(case)
    try:
        model.call(planned(model, 1, backend))
        raise AssertionError("one byte is too small for any model")
    except trainfit.BudgetTooSmall as error:
        smallest = error.minimum_peak_bytes
    most = 0
    for share in SHARES:
        budget = round(smallest + share * max(plain.measured_bytes - smallest, 0))
        model = fresh(case)
        result = Result(case, backend, "budgets", f"budget {share}", budget)
        found = measured(result, model, planned(model, budget, backend))
        if found.measured_bytes < most:
            found = replace(found, good=False, failure="a larger budget has a lower peak")
        most = max(most, found.measured_bytes)
        yield found


def sweep(case: str, backend: Any) -> Iterator[Result]:
    """Judge torch's choices for all fractions and solvers, and look for plans of ours at their peaks."""
    import torch

    from trainfit.compiling.graph_probe import GraphProbe
    from trainfit.compiling.node_costs import NodeCosts
    from trainfit.devices.device_table import find_device

    model = fresh(case)
    probe = GraphProbe(NodeCosts(find_device("cpu")), backend)
    model.call(torch.compile(model.module, backend=probe))
    for planner in probe.planners:
        if planner is not None:
            yield from _choices(Result(case, backend, "sweep", ""), planner)


def _choices(row: Result, planner: Any) -> Iterator[Result]:
    from torch._functorch import config

    from trainfit.compiling.graph_planner import CANDIDATES
    from trainfit.compiling.partition_memory import partition_of
    from trainfit.compiling.recompute_problem import GraphLimits
    from trainfit.compiling.torch_choices import NoChoice

    seen: set[Any] = set()
    for solver in SOLVERS:
        config.activation_memory_budget_solver = solver
        for fraction in (1.0, *reversed(FRACTIONS)):
            try:
                chosen = frozenset(planner.torch_choice(fraction))
            except NoChoice:
                continue  # torch's own compiler would fail on it
            if chosen in seen or (not chosen and fraction):
                continue  # the same again, or nothing
            seen.add(chosen)
            theirs = partition_of(planner.problem, chosen)
            if theirs is None:
                continue  # draws random numbers again, which the compiled step would not do either
            limits = GraphLimits.same(theirs.peak_bytes)
            able = planner.search.candidates(limits, CANDIDATES[row.backend])
            ours = next((partition for partition in able if partition.excess(limits) <= 0), None)
            yield replace(
                row,
                way=f"torch {solver} {fraction:.2f}",
                promised_bytes=theirs.peak_bytes,
                added_seconds=theirs.seconds,
                ours_bytes=0 if ours is None else ours.peak_bytes,
                ours_seconds=math.nan if ours is None else ours.seconds,
                good=ours is not None and ours.seconds <= theirs.seconds * (1 + 1e-9),
            )


def against(case: str, backend: Any) -> Iterator[Result]:
    """Measure some of torch's fractions, and ours with no higher peak; their steps take turns."""
    import torch
    from torch._functorch import config

    for fraction in AGAINST:
        their_model = fresh(case)
        way = f"torch dp {fraction:.2f}"
        their_step = torch.compile(their_model.module, backend=backend)
        with config.patch(activation_memory_budget=fraction, activation_memory_budget_solver="dp"):
            theirs = measured(Result(case, backend, "against", way), their_model, their_step)
        our_model = Model(case)
        budget = theirs.measured_bytes
        result = Result(case, backend, "against", f"ours at {fraction:.2f}", budget)
        our_step = planned(our_model, budget, backend)
        ours = measured(result, our_model, our_step)
        if ours.failure:
            yield from (theirs, ours)
            continue
        taken = [
            (step_seconds(their_model, their_step), step_seconds(our_model, our_step)) for _ in range(TURNS)
        ]
        # Other programs only ever make a step longer: the least of many is what it takes.
        their_seconds, our_seconds = (min(column) for column in zip(*taken))
        yield replace(theirs, step_seconds=their_seconds)
        good = ours.measured_bytes <= budget and our_seconds <= 1.03 * their_seconds
        yield replace(ours, step_seconds=our_seconds, good=good)


def run_part(case: str, backend: str, part: str) -> list[Result]:
    import torch

    torch.set_num_threads(1)
    make = {"budgets": budgets, "sweep": sweep, "against": against}[part]
    return list(make(case, backend))


def in_own_process(case: str, backend: str, part: str) -> list[Result]:
    try:
        rows = run_one(__file__, case, "--backend", backend, "--part", part, seconds=CASE_SECONDS)
    except CaseFailed as error:
        return [Result(case, backend, part, "failed", good=False, failure=str(error))]
    return [Result(**row) for row in rows]


def kept_rows(path: Path) -> list[Result]:
    """Return the rows of an earlier run."""
    if not path.exists():
        return []
    kinds = {field.name: str(field.type) for field in fields(Result)}
    read: dict[str, Callable[[str], Any]] = {
        "int": lambda text: int(text or 0),
        "float": lambda text: float(text or "nan"),
        "bool": lambda text: text == "True",
        "str": str,
    }
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Result(**{name: read[kind](row[name]) for name, kind in kinds.items()})
            for row in csv.DictReader(file)
        ]


def as_line(r: Result) -> str:
    start = f"{'ok  ' if r.good else 'MISS'} {r.case:16} {r.backend:9} {r.way:16}"
    if r.failure and not r.measured_bytes:
        return f"{start} {r.failure}"
    if r.part == "sweep":
        return (
            f"{start} peak {r.promised_bytes:>12,}, again {1e3 * r.added_seconds:8.2f} ms; ours "
            f"{r.ours_bytes:>12,}, {1e3 * r.ours_seconds:8.2f} ms"
        )
    budget = f"budget {r.budget_bytes:>12,} promised {r.promised_bytes:>12,}" if r.budget_bytes else " " * 42
    return (
        f"{start} {budget} measured {r.measured_bytes:>12,}, step {1e3 * r.step_seconds:8.1f} ms, compiled "
        f"in {r.compile_seconds:5.1f} s, off by {r.largest_difference:.1e} {r.failure}"
    )


def summary(rows: Sequence[Result]) -> str:
    """Say how many rows of each part keep what they promise, and how much lower our peaks are."""
    lines = []
    for part in PARTS:
        of_part = [r for r in rows if r.part == part and (part == "sweep" or r.budget_bytes or r.failure)]
        if of_part:
            good, models = sum(r.good for r in of_part), len({r.case for r in of_part})
            lines.append(f"{part}: {good} of {len(of_part)} rows of {models} models hold")
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--backend", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--part", choices=PARTS, help="one part only (default: all)")
    parser.add_argument("--again", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        report([asdict(row) for row in run_part(options.run_one, options.backend, options.part)])
        return 0
    path = options.csv or RESULTS / "compile_plans.csv"
    rows = [] if options.again else kept_rows(path)
    for part in (options.part,) if options.part else PARTS:
        for case in options.names or CASES:
            if any((r.case, r.backend, r.part) == (case, options.backend, part) for r in rows):
                continue
            made = in_own_process(case, options.backend, part)
            print(*map(as_line, made), sep="\n", flush=True)
            rows += made
            write_rows("compile_plans", [{**asdict(r), "good": str(r.good)} for r in rows], path)
    print(summary(rows))
    return 0 if all(r.good for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
