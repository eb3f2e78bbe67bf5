"""Plans on two real ranks: applied before and after sharding, with the results of the step without a plan."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "applying"))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import small_steps
from plans import as_a_whole, plan_for, save_products

import trainfit
from trainfit.capturing import capture
from trainfit.plans.plan import Plan
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

TWO = Cluster(world_size=2, rank=0)
CHAINED = "planned_then_sharded+blocks-in-a-row"
AROUND = "planned_then_sharded+around-units"
FOUR = "planned_then_sharded+of-four-ranks"
LESS = "planned_then_sharded+of-smaller-parts"
STAGED = tuple(
    f"{arrangement}+{kind}"
    for arrangement in ("staged_then_sharded", "staged_and_sharded", "staged_and_kept", "staged_in_bf16")
    for kind in ("products", "whole")
)
"""Regions around three units each."""
ALONE = ("planned_then_sharded+of-one-process", "sharded_then_planned+of-one-process")


@functools.cache
def trace_of(arrangement: str) -> Trace:
    def build() -> trainfit.Step:
        return small_steps.step_of(getattr(small_steps, arrangement)())

    return capture(build, cluster=None if arrangement == "alone" else TWO)


def plan_of(arrangement: str, *modules: str) -> Plan:
    """Return a plan that makes regions of blocks, which are FSDP units, and of parts of blocks."""
    return plan_of_trace(trace_of(arrangement), *modules)


def plan_of_trace(trace: Trace, *modules: str) -> Plan:
    root = trace.modules[trace.model].name
    inside = f"{root}.module" if root == "DistributedDataParallel" else root
    wanted = modules or ("layers.0", "layers.1", "layers.2.attention", "layers.2.feed_forward")
    names = [f"{inside}.{name}" if name else inside for name in wanted]
    whole, parts = plan_for(trace, names[:1], as_a_whole), plan_for(trace, names, save_products)
    # The first is left to torch as a whole, the others keep products.
    kinds = (*parts.kinds, *whole.kinds)
    first = replace(whole.regions[0], kind=len(parts.kinds))
    return replace(parts, kinds=kinds, regions=(first, *parts.regions[1:]))


def plan_of_stages(name: str) -> Plan:
    arrangement, _, kind = name.partition("+")
    trace = trace_of("staged_and_sharded" if arrangement == "staged_then_sharded" else arrangement)
    policy = as_a_whole if kind == "whole" else save_products
    return plan_for(trace, ["Staged.layers.0", "Staged.layers.1"], policy)


def plans() -> dict[str, Plan]:
    sharded, replicated = plan_of("sharded_then_planned"), plan_of("replicated_then_planned")
    blocks = plan_of("alone", "layers.0", "layers.1")
    regions = tuple(replace(region, continues=n > 0, whole=False) for n, region in enumerate(blocks.regions))
    return {
        "planned_then_sharded+of-one-process": plan_of("alone"),
        "sharded_then_planned+of-one-process": plan_of("alone"),
        "planned_then_sharded+of-the-rank": sharded,
        "sharded_then_planned+of-the-rank": sharded,
        "planned_then_replicated+of-one-process": plan_of("alone"),
        "planned_then_replicated+of-the-rank": replicated,
        "replicated_then_planned+of-the-rank": replicated,
        "parallel_planned_sharded+of-the-rank": plan_of("parallel_planned_sharded"),
        "planned_compiled_sharded+of-the-rank": sharded,
        CHAINED: replace(blocks, regions=regions),
        AROUND: plan_of("alone", ""),
        FOUR: replace(sharded, cluster=replace(TWO, world_size=4, mesh=(("dp", 4),))),
        LESS: replace(sharded, parts=tuple(replace(part, bytes=part.bytes // 2) for part in sharded.parts)),
        **{name: plan_of_stages(name) for name in STAGED},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plans")
    for name, plan in plans().items():
        trainfit.save_plan(plan, folder / f"{name}.json")
    return trained_on(2, folder)


def trained_on(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Train with the plans in the folder on so many processes; return what each of them says."""
    script = Path(__file__).parent / "ranks" / "train_planned.py"
    start = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        [sys.executable, *start, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


NAMES = (
    "planned_then_sharded+of-one-process",
    "sharded_then_planned+of-one-process",
    "planned_then_sharded+of-the-rank",
    "sharded_then_planned+of-the-rank",
    "planned_then_replicated+of-one-process",
    "planned_then_replicated+of-the-rank",
    "replicated_then_planned+of-the-rank",
    "parallel_planned_sharded+of-the-rank",
    "planned_compiled_sharded+of-the-rank",
    CHAINED,
    AROUND,
    FOUR,
    LESS,
    *STAGED,
)
SPOKEN_OF = (CHAINED, AROUND, FOUR, LESS, *ALONE)


@pytest.fixture(scope="module")
def found_on_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Tensor parallelism and FSDP, two by two, in torchtitan's order."""
    trace = capture(lambda: small_steps.step_of(small_steps.parallel_planned_sharded()), cluster=Cluster(4))
    plan, folder = plan_of_trace(trace), tmp_path_factory.mktemp("plans")
    for name in ON_FOUR:
        trainfit.save_plan(plan, folder / f"{name}+of-the-rank.json")
    return trained_on(4, folder)


ON_FOUR = ("parallel_planned_sharded", "parallel_planned_compiled_sharded")


@pytest.mark.parametrize("name", ON_FOUR)
def test_the_order_of_torchtitan(found_on_four: list[dict[str, Any]], name: str) -> None:
    """One block has regions inside: with tensor parallelism torch could not compile around them."""
    for rank in found_on_four:
        result = rank[f"{name}+of-the-rank"]
        assert result["equal"] and result["compared"] > 100
        assert result["keys"] and result["loaded"] and result["said"] == []
        # The blocks without a region, of which there is one.
        assert (result["compiled"] > 0) == ("compiled" in name)


@pytest.mark.parametrize("name", NAMES)
def test_results_and_checkpoints_are_those_without_a_plan(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert rank[name]["equal"] and rank[name]["compared"] > 100
        assert rank[name]["keys"]
        assert rank[name]["loaded"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SPOKEN_OF])
def test_plans_are_followed_without_a_warning(found: list[dict[str, Any]], name: str) -> None:
    assert all(rank[name]["said"] == [] for rank in found)


def test_what_cannot_be_done_around_units_is_said(found: list[dict[str, Any]]) -> None:
    for rank in found:
        # Before that, it is told that its plan is of one process.
        [_, in_a_row] = rank[CHAINED]["said"]
        assert "Transformer.layers.1 does not do what its plan says: it is an FSDP unit" in in_a_row


@pytest.mark.parametrize("name", [*ALONE, AROUND])
def test_a_plan_of_one_process_promises_nothing_to_a_sharded_model(
    found: list[dict[str, Any]], name: str
) -> None:
    for rank in found:
        [said] = rank[name]["said"]
        assert "made for a step of one process, and this model is divided among several" in said
        assert "plan again with trainfit plan --world-size or --mesh" in said


def test_a_plan_of_another_number_of_processes_is_told_apart(found: list[dict[str, Any]]) -> None:
    for rank in found:
        [said] = rank[FOUR]["said"]
        assert "the plan was made for rank 0 of 4 (dp=4), and this is one of 2 processes." in said


def test_a_plan_of_another_division_is_told_apart_by_its_rank(found: list[dict[str, Any]]) -> None:
    """The plan is of rank 0, and only that knows its parts: a norm's 2 * 16 numbers on two ranks."""
    [said] = found[0][LESS]["said"]
    assert "which has 32 B of the parameters of Transformer.layers.1.attention_norm" in said
    assert "and here it has 64 B" in said
    assert found[1][LESS]["said"] == []
