"""Is the best way that `trainfit fit` finds as good as it gets? Compared with random combinations.

For each model and device the budget is a share of what the step needs as it is. `fit` searches; then so many
random combinations of the same changes are captured and planned, one by one, and the fastest that fits is
compared with the fastest that was found. Exit code 1 if a random one is faster by more than a thousandth.

    python benchmarks/fit_quality.py [--samples 200] [--share 0.6] [--seconds 60] [models ...]
    python benchmarks/fit_quality.py --only-8b      how long the search takes for llama-3-8b
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import trainfit
from result_files import write_rows
from trainfit.api.find_ways import Ask, fit_step
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.fitting.way_candidates import Candidates
from trainfit.models.recipe import StepOptions
from trainfit.plans.ways import Way

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"batch": 32},
    "llama-tiny": {"batch": 32},
    "bert-tiny": {"batch": 32},
    "vit-tiny": {"batch": 64},
    "resnet-18": {"batch": 64},
    "mixtral-tiny": {"batch": 16},
    "gpt2": {"batch": 16},
    "bert-base": {"batch": 32},
    "vit-b-16": {"batch": 64},
    "resnet-50": {"batch": 64},
    "gpt2-medium": {"batch": 8},
    "llama-3-8b": {"batch": 1},
}
DEVICES = ("h100", "a100-40gb", "rtx-4090")
_CLEARLY = 1e-3


def random_combination(changes: list[StepChange], rng: random.Random) -> list[StepChange]:
    """Return one change, or none, of each kind, of those that go together."""
    chosen: list[StepChange] = []
    for kind in sorted({change.kind for change in changes}):
        options: list[StepChange | None] = [None, *(change for change in changes if change.kind == kind)]
        change = rng.choice(options)
        if change is not None:
            chosen.append(change)
    kinds = {change.kind for change in chosen}
    return [change for change in chosen if not change.excludes & kinds]


def fastest_random(candidates: Candidates, changes: list[StepChange], samples: int, seed: int) -> list[Way]:
    """Return the random combinations that fit, each with a plan if it needs one."""
    rng = random.Random(seed)
    found: dict[tuple[str, ...], Way | None] = {}
    for _ in range(samples):
        combination = random_combination(changes, rng)
        key = tuple(sorted(change.name for change in combination))
        if key in found:
            continue
        way = candidates.unplanned(combination)
        if way is not None and not candidates.fits(way):
            way = candidates.planned(combination, 10.0)
        found[key] = way
    return [way for way in found.values() if way is not None]


def compare(model: str, device: str, samples: int, share: float, seconds: float) -> dict[str, Any]:
    """Search and compare for one model on one device."""
    options = StepOptions(**MODELS[model])
    ask = Ask(model, device, options, None, "default")
    request = ask.request()
    trace = request.trace()
    table = request.price(trace)
    whole = trainfit.estimate(trace, device=device).smallest_memory_bytes
    budget = int(share * whole)
    begin = time.monotonic()
    result = fit_step(Ask(model, device, options, None, "default"), budget, False, seconds)
    took = time.monotonic() - begin
    candidates = Candidates(ask.captured, budget, request.allocator)
    candidates.know((), trace, table)
    changes = changes_of(UnchangedStep(trace, request.device, "built-in", ask.takes))
    others = fastest_random(candidates, changes, samples, seed=0)
    best = min((way.step_seconds for way in others), default=float("inf"))
    ours = result.ways[0].step_seconds if result.ways else float("inf")
    return {
        "model": model,
        "device": device,
        "budget_bytes": budget,
        "search_seconds": round(took, 1),
        "looked_at": result.looked_at,
        "complete": result.complete,
        "ways": len(result.ways),
        "best_seconds": ours,
        "best_way": result.ways[0].words if result.ways else "",
        "random_that_fit": len(others),
        "random_best_seconds": best,
        "never_slower": ours <= best * (1 + _CLEARLY),
    }


def main() -> int:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--devices", nargs="*", default=list(DEVICES))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only-8b", action="store_true")
    asked = parser.parse_args()
    if asked.only_8b:
        begin = time.monotonic()
        result = trainfit.fit("llama-3-8b", device="h100")
        print(f"{result!r}\n{time.monotonic() - begin:.1f} s, {result.looked_at} combinations (bound 30 s)")
        for way in result.ways:
            print(f"  {way.memory_bytes / 2**30:7.2f} GiB {way.step_seconds:8.4f} s  {way.words}")
        return 0
    rows = []
    for model in asked.models:
        for device in asked.devices:
            row = compare(model, device, asked.samples, asked.share, asked.seconds)
            rows.append(row)
            verdict = "ok" if row["never_slower"] else "SLOWER"
            best, other = (1e3 * row[key] for key in ("best_seconds", "random_best_seconds"))
            print(
                f"{model:13} {device:10} {row['search_seconds']:6.1f} s, {row['looked_at']:3} looked at, "
                f"best {best:9.3f} ms, random {other:9.3f} ms of {row['random_that_fit']:3}, {verdict}: "
                f"{row['best_way']}",
                flush=True,
            )
    write_rows("fit_quality", rows)
    worse = [row for row in rows if not row["never_slower"]]
    print(f"{len(rows) - len(worse)} of {len(rows)}: never slower than the best random combination")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
