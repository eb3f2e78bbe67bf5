"""Is the best way that `trainfit fit` finds as good as it gets? Compared with random combinations.

For each model and device the budget is a share of what the step needs as it is; each device has its own
share. `fit` searches; then random combinations of the same changes are captured, once for all devices where
that makes no difference, and the fastest that fits is compared with the fastest that was found. A combination
that is slower than ours even without a plan cannot be faster with one: it is not planned. For models with
eight layers or more that is asked of a model with few of them first, and counts if it is slower by 2 %: such
figures are within 0.2 % of captures (tests/fitting/test_shallow_steps.py). Exit code 1 if a random one is
faster by more than a thousandth.

Each row is written when it is made; a second run makes those that are missing.

    python benchmarks/fit_quality.py [--samples 200] [--seconds 120] [--again] [models ...]
    python benchmarks/fit_quality.py --only-8b      how long the search takes for llama-3-8b
"""

from __future__ import annotations

import csv
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import trainfit
from result_files import RESULTS, arguments, write_rows
from trainfit.api.find_ways import Ask, fit_step
from trainfit.api.model_depth import model_depth
from trainfit.capturing.metadata import MetadataOracle
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.step_with_changes import made_to, options_with
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import find_device
from trainfit.errors import TrainfitError
from trainfit.fitting.fit_results import FitResult
from trainfit.fitting.shallow_steps import ShallowSteps
from trainfit.fitting.way_candidates import Candidates
from trainfit.models.recipe import StepOptions
from trainfit.plans.ways import Way
from trainfit.renting.shared_captures import SharedCaptures
from trainfit.traces.trace import Trace

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
SHARES = {"h100": 0.75, "a100-40gb": 0.6, "rtx-4090": 0.45}
"""Of what the step needs as it is, on each device."""
_CLEARLY = 1e-3
_CLEARLY_SLOWER = 1.02
_PLAN_SECONDS = 10.0
_DRAWS = 10
"""For each combination that is wanted: there may be fewer different ones."""


@dataclass
class SharedAsk(Ask):
    """Captures a step with changes once for all devices on which it does the same."""

    shared: dict[tuple[str, ...], SharedCaptures] = field(default_factory=dict)

    oracles: dict[str, MetadataOracle] = field(default_factory=dict)

    def captured(self, changes: Sequence[StepChange]) -> tuple[Trace, CostTable] | None:
        """Capture and price the step with changes; None if they cannot be made."""
        return self._shared(changes, options_with(self.options, changes))

    def captured_with(
        self, setting: str, changes: Sequence[StepChange], value: int
    ) -> tuple[Trace, CostTable] | None:
        """Capture and price the step of a model with another setting."""
        options = options_with(self.options, changes)
        options = replace(options, set={**options.set, setting: value})
        return self._shared(changes, options, f"{setting}={value}")

    def _shared(
        self, changes: Sequence[StepChange], options: StepOptions, setting: str = ""
    ) -> tuple[Trace, CostTable] | None:
        key = (setting, *sorted(change.name for change in changes))
        if key not in self.shared:
            arguments = {"options": options, "changed": made_to(changes)}
            self.shared[key] = SharedCaptures(self.target, arguments, self.oracles)
        try:
            request = self.shared[key].request(find_device(str(self.device)), allocator=self.allocator)
            trace = request.trace()
        except TrainfitError:
            return None
        refused = any(change.refused_by(trace) for change in changes)
        return None if refused else (trace, request.price(trace))


@dataclass
class Race:
    """One model on one device: what `fit` found, and the best of what was drawn."""

    ask: SharedAsk
    device: str
    budget: int
    result: FitResult
    seconds: float
    processor_seconds: float
    candidates: Candidates
    random: int = 0
    slower: int = 0
    planned: int = 0
    fitting: list[Way] = field(default_factory=list)

    @property
    def best_seconds(self) -> float:
        return self.result.ways[0].step_seconds if self.result.ways else math.inf

    def look_at(self, combination: list[StepChange]) -> None:
        """Judge one combination as far as it can be faster than ours."""
        outlook = self.candidates.outlook(combination)
        if outlook is not None and outlook.step_seconds > _CLEARLY_SLOWER * self.best_seconds:
            self.random += 1
            self.slower += 1
            return
        way = self.candidates.unplanned(combination)
        if way is None:
            return
        self.random += 1
        if way.step_seconds >= self.best_seconds:
            self.slower += 1
        elif self.candidates.fits(way):
            self.fitting.append(way)
        elif not any("plan" in change.excludes for change in combination):
            self.planned += 1
            planned = self.candidates.planned(combination, _PLAN_SECONDS)
            self.fitting += [planned] if planned is not None else []

    def row(self, model: str) -> dict[str, Any]:
        best = min(self.fitting, key=lambda way: way.step_seconds, default=None)
        seconds = best.step_seconds if best is not None else math.inf
        ours = self.result.ways[0] if self.result.ways else None
        return {
            "model": model,
            "device": self.device,
            "share": SHARES[self.device],
            "budget_bytes": self.budget,
            "fits_as_it_is": self.result.fits,
            "search_seconds": round(self.seconds, 1),
            "processor_seconds": round(self.processor_seconds, 1),
            "looked_at": self.result.looked_at,
            "complete": self.result.complete,
            "ways": len(self.result.ways),
            "best_seconds": self.best_seconds,
            "best_way": ours.words if ours else "",
            "random": self.random,
            "random_slower": self.slower,
            "random_planned": self.planned,
            "random_that_fit": len(self.fitting),
            "random_best_seconds": seconds if best is not None else "",
            "random_best_way": best.words if best is not None else "",
            "never_slower": self.best_seconds <= seconds * (1 + _CLEARLY),
        }


def random_combination(changes: list[StepChange], rng: random.Random) -> list[StepChange]:
    """Return one change, or none, of each kind, of those that go together."""
    chosen: list[StepChange] = []
    for kind in sorted({change.kind for change in changes}):
        options: list[StepChange | None] = [None, *(change for change in changes if change.kind == kind)]
        change = rng.choice(options)
        if change is not None:
            chosen.append(change)
    present = {called for change in chosen for called in (change.kind, change.name)}
    return [change for change in chosen if not change.excludes & present]


def combinations(changes: list[StepChange], samples: int, seed: int) -> list[list[StepChange]]:
    """Return so many different combinations, or as many as draws find."""
    rng, found = random.Random(seed), dict[tuple[str, ...], list[StepChange]]()
    for _ in range(_DRAWS * samples):
        combination = random_combination(changes, rng)
        found.setdefault(tuple(change.name for change in combination), combination)
        if len(found) == samples:
            break
    # Those that differ in a setting of the allocator alone share a capture.
    return sorted(found.values(), key=lambda one: [change.name for change in one if not change.is_setting])


def judging(ask: SharedAsk, budget: int, before: Candidates | None = None) -> Candidates:
    """Return what judges combinations, with nothing remembered of those before."""
    request = ask.request()
    candidates = Candidates(ask.captured, budget, request.allocator)
    if before is not None:
        candidates.shallow = before.shallow
        return candidates
    captured, depth = ask.captured(()), model_depth(request.found())
    assert captured is not None, "the step as it is"
    base = candidates.outlook(())
    if depth is not None and base is not None:
        setting, layers = depth
        candidates.shallow = ShallowSteps.of(partial(ask.captured_with, setting), layers, captured[0], base)
    return candidates


def raced(model: str, devices: list[str], samples: int, seconds: float) -> list[Race]:
    """Search on each device, then draw combinations for all of them."""
    options, shared = StepOptions(**MODELS[model]), dict[tuple[str, ...], SharedCaptures]()
    races: list[Race] = []
    changes: list[StepChange] = []
    oracles = dict[str, MetadataOracle]()
    for device in devices:
        ask = SharedAsk(model, device, options, None, "default", shared=shared, oracles=oracles)
        captured = ask.captured(())
        assert captured is not None, "the step as it is"
        whole = trainfit.estimate(captured[0], device=device).smallest_memory_bytes
        budget = int(SHARES[device] * whole)
        wall, processor = time.monotonic(), time.process_time()
        result = fit_step(ask, budget, False, seconds)
        took = time.monotonic() - wall, time.process_time() - processor
        unchanged = UnchangedStep(captured[0], find_device(device), "built-in", ask.takes)
        changes = changes_of(unchanged)
        races.append(Race(ask, device, budget, result, *took, judging(ask, budget)))
    last: list[str] | None = None
    for combination in combinations(changes, samples, seed=0):
        own = [change.name for change in combination if not change.is_setting]
        if own != last:  # hundreds of traces would not find room
            shared.clear()
            for race in races:
                race.candidates = judging(race.ask, race.budget, race.candidates)
        last = own
        for race in races:
            race.look_at(combination)
    return races


def kept_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of runs before, by model and device."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {(row["model"], row["device"]): row for row in csv.DictReader(file)}


def main() -> int:
    """Run the comparisons that are missing, and print them."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--again", action="store_true", help="make rows again that are there")
    parser.add_argument("--only-8b", action="store_true")
    asked = parser.parse_args()
    if asked.only_8b:
        return time_8b()
    path = asked.csv or RESULTS / "fit_quality.csv"
    if len(asked.models) > 1:
        # What one model leaves behind makes captures of the next slower: each has a process of its own.
        given = sys.argv[1:] if asked.models == list(MODELS) else sys.argv[1 : -len(asked.models)]
        for model in asked.models:
            subprocess.run([sys.executable, __file__, *given, model], check=False)
    else:
        make_rows(asked.models[0], {} if asked.again else kept_rows(path), path, asked.samples, asked.seconds)
    rows = kept_rows(path)
    worse = [key for key, row in rows.items() if row["never_slower"] != "True"]
    print(f"{len(rows) - len(worse)} of {len(rows)}: never slower than the best random combination")
    return 1 if worse else 0


def make_rows(model: str, known: dict[Any, Any], path: Path, samples: int, seconds: float) -> None:
    """Make the rows of a model that are not known, write them and print them."""
    missing = [device for device in SHARES if (model, device) not in known]
    if not missing:
        return
    made = [race.row(model) for race in raced(model, missing, samples, seconds)]
    rows = {**kept_rows(path), **{(model, row["device"]): row for row in made}}
    order = sorted(rows, key=lambda key: (list(MODELS).index(key[0]), list(SHARES).index(key[1])))
    write_rows("fit_quality", [rows[key] for key in order], path)
    for row in made:
        show(row)


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    verdict = "ok" if row["never_slower"] else f"SLOWER than {row['random_best_way']}"
    best, other = (1e3 * (row[key] or math.inf) for key in ("best_seconds", "random_best_seconds"))
    print(
        f"{row['model']:13} {row['device']:10} {row['processor_seconds']:6.1f} s, {row['looked_at']:3} seen, "
        f"best {best:9.3f} ms: {row['best_way']}; of {row['random']} random ones {row['random_slower']} "
        f"are slower in any case, {row['random_planned']} planned, best {other:9.3f} ms: {verdict}",
        flush=True,
    )


def time_8b() -> int:
    """Print how long the search takes for an 8B model, and what it finds."""
    wall, processor = time.monotonic(), time.process_time()
    result = trainfit.fit("llama-3-8b", device="h100")
    took, worked = time.monotonic() - wall, time.process_time() - processor
    ended = "all of it" if result.complete else "until time was up"
    print(f"{result!r}\n{took:.1f} s (bound 30), {worked:.1f} s of processor time, {ended}")
    for way in result.ways:
        print(f"  {way.memory_bytes / 2**30:7.2f} GiB {way.step_seconds:8.4f} s  {way.words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
