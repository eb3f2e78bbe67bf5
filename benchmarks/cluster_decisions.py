"""Settings of FSDP chosen by `trainfit shard` against uniform ones, on 8 models and 3 sizes of the cluster.

    python benchmarks/cluster_decisions.py [--models gpt2,...] [--ranks 8,...] [--csv FILE]

For each model and number of ranks there is one budget, between the least that any uniform setting needs and
the most. Uniform are: reshard all units or none of them after forward, each without checkpoints and with
every block under `torch.utils.checkpoint`. Each is captured on its own, replayed and given to the allocator,
apart from the search. Reported: the time of the chosen setting and of the fastest uniform one that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trainfit
from result_files import arguments, write_rows
from trainfit.allocator.named_options import named_options
from trainfit.devices.device_table import find_device
from trainfit.planning.baselines import UsualWays
from trainfit.planning.certify import Unplanned
from trainfit.sharding.unit_trials import Setting, UnitTrials

RANKS = (8, 16, 64)
NETWORK = 12.5e9
"""Bytes per second of each GPU: a 100 Gbit/s adapter, where gathers are not hidden for nothing."""
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
    memory_bytes: int
    seconds: float


def uniform_settings(model: Model, cluster: trainfit.Cluster) -> list[Uniform]:
    """Capture and replay each of the uniform settings."""
    device = find_device("h100")
    trials = UnitTrials(model.name, device, model.options, None, cluster, "70GiB", seconds_limit=1)
    found = []
    none = trials.trial(Setting("blocks", 0))
    for name, kept in (("reshard all", 0), ("reshard none", len(none.units))):
        trial = trials.trial(Setting("blocks", kept))
        step = Unplanned.of(trial.trace, trainfit.price(trial.trace, device), named_options("default"))
        for way in UsualWays(step).within(0):
            if way.baseline.name in ("keep everything", "full"):
                one = way.baseline
                found.append(Uniform(f"{name}, {one.name}", one.memory_bytes, one.step_seconds))
    return found


def row_of(model: Model, ranks: int) -> dict[str, Any]:
    """Compare the chosen setting with the uniform ones, within a budget between them."""
    cluster = trainfit.Cluster(world_size=ranks, mesh=(("fsdp", ranks),), network_bytes_per_second=NETWORK)
    uniform = uniform_settings(model, cluster)
    needs = sorted(one.memory_bytes for one in uniform)
    budget = (needs[0] + needs[-1]) // 2
    result = trainfit.plan_sharding(
        model.name, cluster=cluster, device="h100", options=model.options, budget=budget, seconds_limit=3
    )
    fitting = [one for one in uniform if one.memory_bytes <= budget]
    fastest = min(fitting, key=lambda one: one.seconds)
    chosen = result.sharding
    return {
        "model": model.name,
        "layers": model.options.set["layers"],
        "ranks": ranks,
        "budget_bytes": budget,
        "chosen_ms": 1e3 * chosen.step_seconds,
        "chosen_memory_bytes": chosen.memory_bytes,
        "chosen": f"{len(chosen.kept)} of {len(chosen.units)} kept, prefetch {chosen.prefetch}, "
        f"{0 if chosen.plan is None else len(chosen.plan.regions)} regions",
        "fastest_uniform": fastest.name,
        "fastest_uniform_ms": 1e3 * fastest.seconds,
        "saved_share": 1 - chosen.step_seconds / fastest.seconds,
        "never_slower": chosen.step_seconds <= fastest.seconds * (1 + _FASTER) and result.data.feasible,
        "uniform_that_fit": len(fitting),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    given = parser.parse_args()
    rows = []
    for model in (model for model in MODELS if model.name in given.models.split(",")):
        for ranks in map(int, given.ranks.split(",")):
            row = row_of(model, ranks)
            rows.append(row)
            print(
                f"{model.name:16} {ranks:4} ranks: {row['chosen_ms']:8.2f} ms ({row['chosen']}), "
                f"fastest uniform {row['fastest_uniform_ms']:8.2f} ms ({row['fastest_uniform']}), "
                f"{row['saved_share']:+.1%}{'' if row['never_slower'] else '  SLOWER'}",
                flush=True,
            )
    whole = len(rows) == len(MODELS) * len(RANKS)
    write_rows("cluster_decisions", rows, given.csv, everything=whole)
    held = sum(row["never_slower"] for row in rows)
    print(f"never slower than a uniform setting that fits: {held} of {len(rows)}")


if __name__ == "__main__":
    main()
