"""Settings of FSDP chosen by `trainfit shard` against uniform ones, on 8 models and 3 sizes of the cluster.

    python benchmarks/cluster_decisions.py [--models gpt2,...] [--ranks 8,...] [--rows FILE] [--csv FILE]

For each model and number of ranks there is one budget, between the least that any uniform setting needs and
the most. Uniform are: reshard all units or none of them after forward, each without checkpoints and with
every block under `torch.utils.checkpoint`. Each is captured on its own, replayed and given to the allocator,
apart from the search. Reported: the time of the chosen setting, of the fastest uniform one that fits, and of
the modules that PyTorch's proposed `fsdp_ilp` would wrap (`wrapping_baseline.py`), where these fit. A row
takes about a minute; `--rows` keeps each as it is made, and another run goes on with those that are missing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trainfit
from result_files import arguments, write_rows
from trainfit.allocator.named_options import named_options
from trainfit.api.request import Request
from trainfit.applying.unit_sharding import units_of
from trainfit.devices.device_table import find_device
from trainfit.planning.baselines import UsualWay, UsualWays
from trainfit.planning.certify import Unplanned, certified
from trainfit.planning.planner import Planner
from wrapping_baseline import chosen_wrapping, wrapped_trace

RANKS = (8, 16, 64)
NETWORK = 12.5e9
"""Bytes per second of each GPU: a 100 Gbit/s adapter, where gathers are not hidden for nothing."""
_ROOMY = 1 << 60
"""So that nothing is looked for to make a step fit."""
_FASTER = 1e-6
"""As a share: less is rounding."""


@dataclass(frozen=True)
class Model:
    """A built-in model and its step, small enough that a capture takes seconds."""

    name: str
    options: trainfit.StepOptions


def _model(name: str, batch: int, seq: int | None = None, **changes: Any) -> Model:
    options = trainfit.StepOptions(batch=batch, seq=seq, dtype="bf16", set=changes)
    return Model(name, options)


MODELS = (
    _model("llama-3-8b", 1, 2048, layers=6),
    _model("tinyllama-1.1b", 2, 2048, layers=8),
    _model("llama-3-70b", 1, 1024, layers=4),
    _model("gpt2", 8, 512, layers=8),
    _model("gpt2-xl", 4, 512, layers=6),
    _model("bert-large", 8, 256, layers=8),
    _model("vit-l-16", 16, layers=8),
    _model("mixtral-8x7b", 1, 512, layers=2),
)


@dataclass(frozen=True)
class Uniform:
    """A uniform setting: what it needs, and how long its step takes."""

    name: str
    step: Unplanned
    way: UsualWay

    @property
    def memory_bytes(self) -> int:
        """The least memory with which it runs."""
        return self.way.baseline.memory_bytes

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.way.baseline.step_seconds

    def fits(self, budget_bytes: int) -> bool:
        """Whether it runs with just so much: what runs with less may fail, as blocks lie otherwise then."""
        return certified(self.step, self.way.effects, budget_bytes, 0.0, method="regions").fits


def uniform_settings(model: Model, cluster: trainfit.Cluster) -> list[Uniform]:
    """Capture and replay each of the uniform settings; the search works kept units out, and this does not."""
    device = find_device("h100")
    found = []
    for name, reshard in (("reshard all", True), ("reshard none", False)):
        trace = Request(
            model.name, device, model.options, None, cluster=cluster, changed=partial(_resharded, reshard)
        ).trace()
        step = Unplanned.of(trace, trainfit.price(trace, device), named_options("default"))
        for way in UsualWays(step).within(_ROOMY):
            if way.baseline.name in ("keep everything", "full"):
                found.append(Uniform(f"{name}, {way.baseline.name}", step, way))
    return found


def _resharded(reshard: bool, step: trainfit.Step) -> trainfit.Step:
    for name in units_of(step.model):
        module: Any = step.model.get_submodule(name)
        module.set_reshard_after_forward(reshard, recurse=False)
    return step


def wrapped_seconds(model: Model, cluster: trainfit.Cluster, budget: int) -> float | None:
    """Return the time of a step whose modules are wrapped as `fsdp_ilp` would; None if that does not fit."""
    request = Request(model.name, find_device("h100"), model.options, None, cluster=cluster)
    kinds = chosen_wrapping(request, budget)
    if kinds is None:
        return None
    trace = wrapped_trace(request, kinds)
    plan = Planner(trace, request.price(trace), named_options("default")).nothing(budget)
    return plan.step_seconds if plan.fits else None


def row_of(model: Model, ranks: int) -> dict[str, Any]:
    """Compare the chosen setting with the uniform ones, within a budget between them."""
    cluster = trainfit.Cluster(world_size=ranks, mesh=(("fsdp", ranks),), network_bytes_per_second=NETWORK)
    uniform = uniform_settings(model, cluster)
    needs = sorted(one.memory_bytes for one in uniform)
    budget = (needs[0] + needs[-1]) // 2
    begin = time.process_time()
    result = trainfit.plan_sharding(
        model.name, cluster=cluster, device="h100", options=model.options, budget=budget, seconds_limit=3
    )
    took = time.process_time() - begin
    fitting = [one for one in uniform if one.fits(budget)]
    fastest = min(fitting, key=lambda one: one.seconds)
    chosen = result.sharding
    wrapped = wrapped_seconds(model, cluster, budget)
    limit = 1 + _FASTER
    slower = chosen.step_seconds > fastest.seconds * limit
    slower |= wrapped is not None and chosen.step_seconds > wrapped * limit
    return {
        "model": model.name,
        "layers": model.options.set["layers"],
        "ranks": ranks,
        "budget_bytes": budget,
        "chosen_ms": 1e3 * chosen.step_seconds,
        "chosen_memory_bytes": chosen.memory_bytes,
        "units": len(chosen.units),
        "kept": len(chosen.kept),
        "prefetch": chosen.prefetch,
        "regions": 0 if chosen.plan is None else len(chosen.plan.regions),
        "fastest_uniform": fastest.name,
        "fastest_uniform_ms": 1e3 * fastest.seconds,
        "uniform_that_fit": len(fitting),
        "fsdp_ilp_ms": None if wrapped is None else 1e3 * wrapped,
        "saved_share": 1 - chosen.step_seconds / fastest.seconds,
        "never_slower": not slower and result.data.feasible,
        "search_seconds": took,
    }


def rows_of(models: Sequence[Model], sizes: Sequence[int], file: Path | None) -> Iterator[dict[str, Any]]:
    """Yield each row, those of an earlier run from the file."""
    known: dict[tuple[str, int], dict[str, Any]] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[row["model"], row["ranks"]] = row
    for model in models:
        for ranks in sizes:
            row = known.get((model.name, ranks))
            if row is None:
                row = row_of(model, ranks)
                if file is not None:
                    with file.open("a", encoding="utf-8") as open_file:
                        open_file.write(json.dumps(row) + "\n")
            yield row


def main() -> int:
    """Run the benchmark; 1 if a setting that was not chosen is faster."""
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--rows", type=Path, help="keep rows in this file, and read those that are there")
    given = parser.parse_args()
    rows = []
    models = [model for model in MODELS if model.name in given.models.split(",")]
    for row in rows_of(models, [int(ranks) for ranks in given.ranks.split(",")], given.rows):
        rows.append(row)
        other = f"{row['fsdp_ilp_ms']:.2f} ms" if row["fsdp_ilp_ms"] is not None else "does not fit"
        print(
            f"{row['model']:16} {row['ranks']:4} ranks: {row['chosen_ms']:8.2f} ms ({row['kept']} of "
            f"{row['units']} kept, prefetch {row['prefetch']}, {row['regions']} regions), fastest uniform "
            f"{row['fastest_uniform_ms']:8.2f} ms ({row['fastest_uniform']}), {row['saved_share']:+.1%}, "
            f"fsdp_ilp {other}{'' if row['never_slower'] else '  SLOWER'}",
            flush=True,
        )
    whole = len(rows) == len(MODELS) * len(RANKS)
    write_rows("cluster_decisions", rows, given.csv, everything=whole)
    held = sum(row["never_slower"] for row in rows)
    print(f"never slower than a uniform setting or fsdp_ilp that fits: {held} of {len(rows)}")
    return 0 if held == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
