"""`trainfit.autoplan` in two real processes that train together: one plan, the same results, its memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "clusters"))
import rank_loops
from real_ranks import on_ranks

from trainfit.errors import PlanError

pytestmark = pytest.mark.filterwarnings("ignore")
SHARE = 0.85
CASES = [
    ("ddp", 3),
    ("ddp, unused parameters", 0),
    ("fsdp2", 0),
    ("fsdp2", 3),
]
MORE_CASES = [
    ("ddp", 0),
    ("ddp, accumulating", 3),
    ("ddp, views of buckets", 3),
    ("ddp, a hook", 0),
    ("fsdp2, kept after forward", 3),
]


def check(cases: list[tuple[str, int]]) -> None:
    found = on_ranks(2, rank_loops.all_compared, cases, SHARE)
    for case, ranks in zip(cases, zip(*found)):
        check_case(case, ranks)


def check_case(case: tuple[str, int], ranks: tuple[dict[str, Any], ...]) -> None:
    first, second = ranks
    assert first["same"] and second["same"], case
    assert first["plan"] == second["plan"] and first["ranks"] == second["ranks"], case
    assert not first["fits"] and not second["fits"]
    for one, (_, needed, budget, planned, fits) in zip(ranks, first["ranks"]):
        assert one["own"] == (needed, budget)
        assert fits and planned <= budget < needed, case
        assert one["measured_rise"] == one["promised_rise"], case
    # One line for each time that a plan was asked for, and only the first rank says it.
    fits, planned = first["lines"]
    assert fits.startswith("trainfit: fits without a plan on all 2 ranks: nothing done.")
    assert planned.startswith("trainfit: plan applied on 2 ranks: ")
    assert second["lines"] == [] and second["warnings"] == first["warnings"] == []


def test_two_processes_make_one_plan_and_train_the_same() -> None:
    check(CASES)


def test_other_ways_to_train_together() -> None:
    check(MORE_CASES)


def test_what_one_process_cannot_do_stops_all() -> None:
    first, second = on_ranks(2, rank_loops.failing)
    assert first["own"].startswith("UserCodeError: the step raised ValueError: rank 0 has no data")
    said = "PlanError: rank 0 of 2 cannot plan its step, so none does:\nUserCodeError: the step raised"
    assert second["own"].startswith(said)
    assert "BudgetTooSmall" in first["small"] and "BudgetTooSmall" in second["small"]
    assert first["trained"] and second["trained"]
    for one in (first, second):
        assert "static_graph=True counts its steps where a capture cannot put the count back" in one["static"]
        assert "as the stages of a pipeline do" in one["sent"]
        assert "waits for a Python object that rank" in one["objects"]


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_trainers_of_two_processes(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    import rank_trainers

    train = rank_trainers.with_transformers if library == "accelerate" else rank_trainers.with_lightning
    first, second = on_ranks(2, train, str(tmp_path))
    for one in (first, second):
        assert one["same"] and one["regions"] and one["wrapped"] == "DistributedDataParallel"
        assert not one["left"], "the plan is taken off when training ends"
    assert first["ranks"] == second["ranks"] and len(first["ranks"]) == 2
    assert len(first["lines"]) == 2 and second["lines"] == []
    assert first["lines"][1].startswith("trainfit: plan applied on 2 ranks: ")


def test_processes_without_a_group_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainfit

    monkeypatch.setenv("WORLD_SIZE", "2")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"one of 2 processes .* call torch.distributed.init_process_group"):
        trainfit.autoplan(model, lambda: model(torch.ones(1, 2)).sum().backward())
