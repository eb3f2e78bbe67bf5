"""How fast is planning, end to end (capture, curves, solve, certify)? Against the bare step and PyTorch.

    python benchmarks/plan_speed.py                  all of it, median of 3
    python benchmarks/plan_speed.py --rounds 1       once
    python benchmarks/plan_speed.py --only 8b        8b, pipeline or 405b

- 8b: `trainfit plan llama-3-8b` (batch 1 x 8192, H100) against the bare step: torch's own `FakeTensorMode`
  around forward, backward and optimizer of the same model, nothing recorded. Claim: at most 4 times.
- pipeline: a Llama of 32 narrow layers, planned by us and by PyTorch's tools: MemTracker, RuntimeEstimator,
  SACEstimator, `sac_milp` and the policy of every unit. Claim: at least 8 times faster. PyTorch's roofline
  asks a GPU for its speed and refuses to run without one; here it is told an H100's figures.
- 405b: `trainfit plan llama-3-405b`. Claim: under 60 s.

Every measurement is a process of its own, and the ways take turns. Imports are not counted. Exit
code 1 if a claim is missed. PyTorch's part needs pulp and pwlf, see torch_sac.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from result_files import arguments, write_rows

if TYPE_CHECKING:
    from trainfit import Step, StepOptions
    from trainfit.models.llama import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))

DEVICE = "h100-sxm-80gb"
MOST_OF_THE_BARE_STEP = 4.0
LEAST_OF_THE_PIPELINE = 8.0
MOST_SECONDS_405B = 60.0
BUDGET_SHARE = 0.8
"""Of the peak without a plan, where the device is not the limit."""
H100_GIGABYTES, H100_TERAFLOPS = 3350.0, 989.0


def llama(config: LlamaConfig, batch: int, seq: int, device: str = "cpu") -> Step:
    """Build the step of a Llama with AdamW, in torch's default dtype."""
    import torch

    from trainfit import Step
    from trainfit.models.llama import Llama

    model = Llama(config)
    if device != "cpu":
        model = model.to(device)
    tokens = torch.randint(0, config.vocab_size, (batch, seq), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Step.of(model, {"tokens": tokens, "labels": tokens}, optimizer=optimizer)


def narrow_llama(device: str) -> Step:
    """Build the step of a Llama with 32 layers of small width, in float32."""
    from trainfit.models.llama import LlamaConfig

    config = LlamaConfig(vocab_size=4096, layers=32, heads=8, kv_heads=8, hidden=512, feed_forward=1408)
    return llama(config, batch=4, seq=512, device=device)


def bare() -> dict[str, float]:
    """One steady step of llama-3-8b under fake tensors, nothing recorded."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainfit.models.catalog import PRESETS

    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        step = llama(PRESETS["llama-3-8b"].config, batch=1, seq=8192)
        step.run()
        begin = time.perf_counter()
        step.run()
        return {"seconds": time.perf_counter() - begin}


def plan_8b() -> dict[str, float]:
    # All of the device: with its margin nothing would fit, and there would be no plan to find.
    return _planned("llama-3-8b", "100%")


def plan_405b() -> dict[str, float]:
    from trainfit import StepOptions
    from trainfit.models.catalog import PRESETS

    # AdamW in bfloat16: weights, gradients and two states, without temporaries because it is fused. With one
    # sample nothing else would matter; with four, activations do, and the rest of the budget is for them.
    states = PRESETS["llama-3-405b"].parameter_count * 2 * 4
    return _planned("llama-3-405b", round(1.1 * states), StepOptions(batch=4, optimizer="adamw-fused"))


def plan_narrow() -> dict[str, float]:
    import trainfit
    from trainfit.traces.simulate import simulate

    peak = simulate(trainfit.capture(lambda: narrow_llama("cuda"), device=DEVICE)).peak_bytes
    return _planned(lambda: narrow_llama("cuda"), round(BUDGET_SHARE * peak))


def _planned(
    target: str | Callable[[], Step], budget: int | str, options: StepOptions | None = None
) -> dict[str, float]:
    """Plan from nothing, as the command line does, and say how long each stage took."""
    from trainfit.api import choose
    from trainfit.api.request import Request

    begin = time.perf_counter()
    result = choose.plan_step(Request(target, DEVICE, options), budget=budget)
    seconds = time.perf_counter() - begin
    plan = result.plan
    return {
        "seconds": seconds,
        **{f"{stage}_seconds": value for stage, value in result.seconds.items()},
        "feasible": result.feasible,
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "unplanned_bytes": plan.baseline_peak_bytes,
        "added": plan.added_seconds / plan.baseline_step_seconds,
        "gap": plan.gap,
        "regions": len(plan.regions),
        "ops": len(result.trace.ops),
    }


def torch_narrow() -> dict[str, float]:
    """Let PyTorch's tools do the same, as their documentation shows: three runs, statistics, MILP, policy."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import ilp_utils, mem_tracker, runtime_estimator, sac_estimator, sac_ilp
    from torch.utils import _runtime_estimation as roofline

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(roofline, "get_device_tflops", lambda dtype: H100_TERAFLOPS),
        mock.patch.object(roofline, "get_gpu_dram_gbps", lambda: H100_GIGABYTES),
        FakeTensorMode(),
    ):
        begin = time.perf_counter()
        step = narrow_llama("cpu")
        memory = mem_tracker.MemTracker()
        memory.track_external(step.model, *step.optimizers)
        with memory:
            step.run()
            memory.reset_mod_stats()
            step.run()
        tracked = time.perf_counter()
        runtime = runtime_estimator.RuntimeEstimator()
        with runtime("operator-level-cost-model"):
            step.run()
        timed = time.perf_counter()
        sac = sac_estimator.SACEstimator()
        with sac("operator-level-cost-model"):
            step.run()
        estimated = time.perf_counter()
        info = ilp_utils.aggregate_stats(step.model, memory, runtime, sac, torch.device("cpu"))
        graph = ilp_utils.parse_module_info(info)
        aggregated = time.perf_counter()
        unplanned, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
        decisions, _, peak = sac_ilp.sac_milp(graph, BUDGET_SHARE * unplanned / 2**30)
        for name, share in decisions.items():
            sac_ilp.get_optimal_checkpointing_policy_per_module(sac.sac_mod_stats[name], 1.0 - share)
        end = time.perf_counter()
    return {
        "seconds": end - begin,
        "mem_tracker_seconds": tracked - begin,
        "runtime_estimator_seconds": timed - tracked,
        "sac_estimator_seconds": estimated - timed,
        "aggregate_seconds": aggregated - estimated,
        "milp_seconds": end - aggregated,
        "feasible": peak != -1,
        "regions": len(decisions),
    }


ROWS: list[dict[str, str | float]] = []
"""Every figure of every run, for the CSV file."""


def in_own_process(way: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--run-one", way], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(way, {name: round(value, 3) for name, value in found.items()}, flush=True)
    number = sum(row["way"] == way and row["figure"] == "seconds" for row in ROWS)
    ROWS.extend({"way": way, "round": number, "figure": name, "value": found[name]} for name in found)
    return found


def medians(ways: tuple[str, ...], rounds: int) -> list[float]:
    """Run the ways in turns and return the median seconds of each."""
    results: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            results[way].append(in_own_process(way)["seconds"])
    return [statistics.median(results[way]) for way in ways]


def claim(text: str, good: bool) -> bool:
    print(f"{'ok  ' if good else 'MISS'} {text}", flush=True)
    return good


def compare_8b(rounds: int) -> bool:
    bare_seconds, plan_seconds = medians(("bare", "plan_8b"), rounds)
    ratio = plan_seconds / bare_seconds
    text = f"llama-3-8b: planned in {plan_seconds:.2f} s, bare step {bare_seconds:.2f} s: {ratio:.2f} times"
    return claim(text + f" (claim: at most {MOST_OF_THE_BARE_STEP:.0f})", ratio <= MOST_OF_THE_BARE_STEP)


def compare_pipeline(rounds: int) -> bool:
    ours, theirs = medians(("plan_narrow", "torch_narrow"), rounds)
    text = (
        f"32 layers: planned in {ours:.2f} s, by PyTorch's tools in {theirs:.2f} s: {theirs / ours:.1f} times"
    )
    return claim(
        text + f" faster (claim: at least {LEAST_OF_THE_PIPELINE:.0f})",
        theirs >= LEAST_OF_THE_PIPELINE * ours,
    )


def compare_405b(rounds: int) -> bool:
    (seconds,) = medians(("plan_405b",), rounds)
    text = f"llama-3-405b: planned in {seconds:.1f} s (claim: under {MOST_SECONDS_405B:.0f})"
    return claim(text, seconds < MOST_SECONDS_405B)


COMPARISONS = {"8b": compare_8b, "pipeline": compare_pipeline, "405b": compare_405b}


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "--run-one":
        # Imports are not timed; torch's own `FakeTensorMode` would import the compiler.
        import torch._dynamo  # noqa: F401

        import trainfit.api.choose  # noqa: F401

        print(json.dumps(globals()[sys.argv[2]]()))
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(COMPARISONS), action="append", help="a part of it")
    options = parser.parse_args()
    import torch_sac

    chosen = options.only or tuple(COMPARISONS)
    if "pipeline" in chosen and (problem := torch_sac.missing()):
        print(problem, file=sys.stderr)
        return 2
    missed = [name for name in chosen if not COMPARISONS[name](options.rounds)]
    write_rows("plan_speed", ROWS, options.csv, everything=not options.only)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
