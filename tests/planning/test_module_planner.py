"""Plans by modules: certified, within the names that are allowed, and honest about several processes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainfit
from trainfit import Step, StepOptions, Trace
from trainfit.api import choose
from trainfit.api.request import Request
from trainfit.cli import commands as cli
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.errors import BudgetTooSmall, OptionError, PlanError
from trainfit.planning.modules.sharding import divided, gathered_by
from trainfit.planning.modules.unit_planner import ModulePlanner
from trainfit.planning.planner import Planner
from trainfit.targets.parse import load
from trainfit.traces.simulate import simulate

H100 = find_device("h100-sxm-80gb")
BLOCKS = [f"GPT2.blocks.{number}" for number in range(4)]
STATES = {"parameter", "gradient", "optimizer_state"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture("gpt2-tiny", device=H100)


@pytest.fixture(scope="module")
def planner(trace: Trace) -> ModulePlanner:
    """PyTorch's formulation knows nothing of what an executor takes, so nothing is counted for it."""
    costs = roofline_costs(trace, H100)
    executor = ("region_call", "region_op", "checkpoint_call", "checkpoint_op")
    costs = replace(costs, host=replace(costs.host, **dict.fromkeys(executor, 0.0)))
    # PyTorch's formulation knows of no allocator.
    return ModulePlanner(trace, costs, allocator=None)


def budgets(planner: ModulePlanner) -> list[int]:
    smallest = planner.smallest().peak_bytes
    return [smallest + (planner.step.peak_bytes - smallest) * part // 6 for part in range(1, 7)]


def test_every_plan_is_certified_within_its_budget(planner: ModulePlanner) -> None:
    before = float("inf")
    for budget in budgets(planner):
        found = planner.plan(budget)
        plan = found.plan
        assert found.fits
        assert plan.method == "modules"
        assert plan.peak_bytes == found.timeline.peak_bytes <= budget
        assert plan.bound_seconds <= plan.step_seconds <= before
        before = plan.step_seconds
    assert before == planner.step.step_seconds


def test_what_is_stored_and_what_is_computed_again_is_in_the_plan(planner: ModulePlanner) -> None:
    """Nothing but the ops after the last value that backward needs is skipped."""
    found = planner.plan(budgets(planner)[2])
    plan = found.plan
    assert found.fits
    assert plan.regions
    for kind in plan.kinds:
        decisions = [op.decision for op in kind.ops]
        end = decisions.index("skip") if "skip" in decisions else len(decisions)
        assert set(decisions[:end]) <= {"save", "recompute"}
        assert "save" not in decisions[end:]


@pytest.mark.parametrize("solver", [Planner, ModulePlanner])
def test_the_executor_runs_again_what_the_plan_was_priced_with(solver: type[Planner | ModulePlanner]) -> None:
    """Also where a policy discards what nobody needs: that is not recomputed."""
    build = load("llama-tiny", StepOptions(batch=4)).build
    trace = trainfit.capture(build)
    planner = solver(trace, roofline_costs(trace, replace(H100, name="cpu")), allocator=None)
    found = planner.plan(planner.step.peak_bytes * 7 // 10)

    def planned() -> Step:
        step = build()
        trainfit.apply(step.model, found.plan)
        return step

    again = trainfit.capture(planned)
    assert found.fits and simulate(again).peak_bytes == found.peak_bytes
    assert computed_again(found.timeline.trace) == computed_again(again)


def computed_again(trace: Trace) -> Counter[str]:
    """Return the operators that are recomputed; views are made again without being in a plan's replay."""
    again = (number for number, op in enumerate(trace.ops) if op.recompute)
    names = Counter(trace.op_name(n) for n in again if not trace.signatures[trace.ops[n].signature].view)
    del names["torch.get_rng_state"]
    return names


def test_the_regions_solver_is_at_least_as_good(planner: ModulePlanner) -> None:
    regions = Planner(planner.trace, planner.costs, allocator=None)
    for budget in budgets(planner):
        ours, modules = regions.plan(budget), planner.plan(budget)
        assert ours.fits and modules.fits
        assert ours.step_seconds <= modules.step_seconds * 1.003


def test_a_budget_that_cannot_be_met_says_what_can(planner: ModulePlanner) -> None:
    answer = planner.plan(1 << 20)
    assert not answer.fits
    assert answer.peak_bytes == planner.smallest().peak_bytes
    with pytest.raises(BudgetTooSmall, match="smallest peak"):
        trainfit.plan(planner.trace, budget=1 << 20, device=H100, solver="modules")


def test_only_the_units_that_are_named_are_checkpointed(trace: Trace) -> None:
    plan = trainfit.plan(trace, budget="220MiB", device=H100, solver="modules", ac_units=["blocks.*"])
    assert plan.regions
    assert {region.module.rpartition(".")[0] for region in plan.regions} == {"GPT2.blocks"}
    one = trainfit.plan(
        trace, budget="175MiB", allocator="none", device=H100, solver="modules", ac_units=["GPT2.blocks.1"]
    )
    assert [region.module for region in one.regions] == ["GPT2.blocks.1"]


def test_no_unit_lies_around_an_fsdp_unit(trace: Trace) -> None:
    inner = next(
        m.name for m in trace.modules if m.name.startswith("GPT2.blocks.0.") and m.name.count(".") == 3
    )
    part = inner.rpartition(".")[2]
    planner = ModulePlanner(trace, roofline_costs(trace, H100), fsdp_units=[f"blocks.*.{part}"])
    names = {trace.module_name(candidate.region.module) for candidate in planner.candidates}
    assert names and "GPT2" not in names
    assert not names & {f"GPT2.blocks.{number}" for number in range(4)}


def test_several_processes_divide_the_states_and_count_what_is_gathered(trace: Trace) -> None:
    part = simulate(divided(trace, 4))
    there = [s for s in trace.storages if s.persistent]
    sizes = [-(-s.bytes // 4) if s.category in STATES else s.bytes for s in there]
    assert part.persistent_bytes == sum((size + 511) // 512 * 512 for size in sizes)  # blocks of a GPU
    request = Request(trace, H100, allocator=None)
    result = choose.plan_step(
        request, budget="150MiB", solver="modules", world_size=4, fsdp_units=["blocks.*"]
    )
    assert result.plan.world_size == 4
    assert result.plan.peak_bytes <= result.plan.budget_bytes
    sizes = {m.name: sum(trace.storages[s].bytes for s in m.parameters) for m in trace.modules}
    own = {block: sum(size for name, size in sizes.items() if name.startswith(block)) for block in BLOCKS}
    root = sum(sizes.values()) - sum(own.values())
    gathered = gathered_by(trace, ["blocks.*"])
    assert gathered.parameter_bytes == root + 2 * max(own.values())
    # Every parameter is trained; the head is tied to the embedding and has no gradient of its own.
    assert gathered.gradient_bytes == root + max(own.values())
    # The peak is in backward, where all of it counts.
    expected = part.peak_bytes + gathered.parameter_bytes + gathered.gradient_bytes
    assert result.plan.baseline_peak_bytes == expected
    assert result.baselines[0].peak_bytes == expected
    assert "one of 4 processes" in " ".join(result.warnings)
    assert "On top of them are what FSDP gathers" in " ".join(result.warnings)
    with pytest.raises(PlanError, match="one of 4 processes"):
        trainfit.verify("gpt2-tiny", plan=result.plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ac_units": ["block.0"]}, "AC unit 'block.0' is not in the model; it has modules such as blocks.0"),
        ({"fsdp_units": ["layers.*"]}, r"FSDP unit 'layers.\*' is not in the model"),
        ({"ac_units": ["GPT2.token_embedding"]}, "has no modules inside"),
        ({"ac_units": ["GPT2"], "fsdp_units": ["blocks.*"]}, "lies around an FSDP unit"),
        ({"ac_units": "blocks.0"}, "lists of names"),
        ({"world_size": 0}, "--world-size must be at least 1, got 0"),
        ({"solver": "milp"}, "--solver must be one of regions, modules, got 'milp'"),
        ({"solver": "regions", "world_size": 2}, "belong to the solver `modules`"),
        ({"solver": "regions", "ac_units": ["blocks.0"]}, "Add --solver modules"),
    ],
)
def test_what_cannot_be_meant_is_refused(trace: Trace, given: dict[str, object], message: str) -> None:
    arguments = {"solver": "modules", **given}
    with pytest.raises(OptionError, match=message):
        trainfit.plan(trace, device=H100, **arguments)


def test_the_command_says_what_it_counts_and_refuses_what_it_cannot_mean(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command = ["plan", "gpt2-tiny", "--device", "h100", "--budget", "220MiB", "--json", str(file)]
    units = ["--ac-unit", "blocks.0", "--ac-unit", "blocks.*", "--fsdp-unit", "blocks.*"]
    result = CliRunner().invoke(cli.app, [*command, "--solver", "modules", *units, "--world-size", "2"])
    assert result.exit_code == 0, result.output
    assert "in each of 2 processes" in result.output
    found = json.loads(file.read_text())
    assert (found["method"], found["world_size"]) == ("modules", 2)
    assert any("On top of them are what FSDP gathers" in warning for warning in found["warnings"])
    refused = CliRunner().invoke(cli.app, [*command, "--ac-unit", "blocks.0"])
    assert refused.exit_code == 2
    assert "Add --solver modules, or leave them out" in refused.output


def test_a_captured_rank_has_true_figures_instead_of_a_division() -> None:
    """Peak and units are those of the capture, the replay is its own, and nothing is divided again."""
    cluster = trainfit.Cluster(world_size=8, mesh=(("dp", 8),))
    sharded = trainfit.capture("gpt2-tiny", device=H100, cluster=cluster)
    costs = roofline_costs(sharded, H100)
    planner = ModulePlanner(sharded, costs, allocator=None)
    peak = simulate(sharded).peak_bytes
    assert planner.step.peak_bytes == peak
    assert list(planner.fsdp_units) == BLOCKS
    assert not planner.warnings
    plan = planner.plan((planner.smallest().peak_bytes + peak) // 2)
    assert plan.fits
    assert plan.plan.regions
    assert plan.plan.cluster == sharded.cluster
    # The region of a module that is a unit is inside of its hooks: the better solver is at least as fast.
    best = Planner(sharded, costs, None).plan(plan.plan.budget_bytes)
    assert best.step_seconds <= plan.step_seconds
    with pytest.raises(OptionError, match="captured as a rank of a cluster"):
        ModulePlanner(sharded, costs, world_size=2)
