"""Plans on disk come back as they were, and whatever is wrong with a file is one clear sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.errors import FileFormatError
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import ModulePart, OpDecision, Plan, Region, RegionKind
from trainfit.plans.plan_store import FILE, load_plan, save_plan
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import Settings

PLAN = Plan(
    target="gpt2",
    device="cpu",
    torch="2.13.0",
    trace_hash="ab" * 32,
    budget_bytes=1 << 34,
    kinds=(
        RegionKind(
            (
                OpDecision("aten.mm.default", ((2, 3), ()), Decision.SAVE),
                OpDecision("aten.native_dropout.default", ((2, 3), (2, 3)), Decision.RECOMPUTE, random=True),
            )
        ),
        RegionKind(()),
    ),
    regions=(Region("GPT.blocks.0", 0, 0, 123, 0.5), Region("GPT.blocks.0", 1, 1, 0, 0.0)),
    peak_bytes=99,
    memory_bytes=99,
    step_seconds=1.25,
    baseline_peak_bytes=100,
    baseline_step_seconds=1.0,
    bound_seconds=1.2,
    settings=Settings(batch=8, parameters=1000, modules=3, model=(("layers", "4"), ("dropout", "0.1"))),
)


CLUSTER = dataclasses.asdict(Cluster(world_size=8, rank=3))


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    text = (tmp_path / "plan.json").read_text()
    assert '{"name": "aten.mm.default", "shapes": [[2, 3], []], "decision": "save", "random": false}' in text


def refusal(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(FileFormatError) as error:
        load_plan(path)
    message = str(error.value)
    assert str(path) in message and message.endswith(".")
    return message


def with_hash(plan: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(plan, separators=(",", ":"), sort_keys=True)
    return {
        "format": "trainfit-plan",
        "schema": FILE.schema,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "plan": plan,
    }


def changed(**changes: Any) -> dict[str, Any]:
    return with_hash({**json.loads(json.dumps(dataclasses.asdict(PLAN))), **changes})


def test_a_plan_of_an_older_version_is_read(tmp_path: Path) -> None:
    """Schema 4 did not say for which rank of how many processes a plan was made."""
    content = json.loads(json.dumps(dataclasses.asdict(PLAN)))
    older = {**with_hash({k: v for k, v in content.items() if k not in ("cluster", "parts")}), "schema": 4}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(older), encoding="utf-8")
    assert load_plan(file) == PLAN


def test_the_rank_of_a_plan_is_in_its_file(tmp_path: Path) -> None:
    cluster = Cluster(world_size=8, rank=3, mesh=(("dp", 4), ("tp", 2)))
    plan = dataclasses.replace(PLAN, cluster=cluster, parts=(ModulePart("GPT.norm", 4, 16),))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert "rank 3 of 8 (dp=4, tp=2)" in repr(plan)


def settings(**changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(PLAN.settings), **changes}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "truncated or not JSON"),
        ('{"format": "trainfit-plan", ', "truncated or not JSON"),
        ("[" * 100_000, "truncated or not JSON"),
        ([1], "is not a trainfit plan"),
        ({"format": "trainfit-trace"}, "is not a trainfit plan"),
        (
            {"format": "trainfit-plan", "schema": 8, "plan": {}},
            f"has schema 8, but this trainfit reads schema {FILE.schema}; make it again with trainfit plan",
        ),
        ({"format": "trainfit-plan", "schema": "2"}, "has an unknown schema"),
        ({**changed(), "sha256": "0"}, "damaged: its content does not match its hash"),
        (with_hash({}), "the field 'target' is missing"),
        (changed(budget_bytes="1"), "budget_bytes: expected a whole number, found '1'"),
        (
            changed(budget_bytes=1 << 70),
            "budget_bytes: expected at most 62 bits, found 1180",
        ),
        (changed(peak_bytes=True), "peak_bytes: expected a whole number, found true"),
        (changed(step_seconds=None), "step_seconds: expected a finite number, found null"),
        (changed(step_seconds=10**400), "step_seconds: expected a finite number, found 1000"),
        (changed(kind=[]), "there is no field kind (did you mean 'kinds'?)"),
        (changed(target=3), "target: expected text, found 3"),
        (changed(cluster={**CLUSTER, "rank": 9}), "cluster: there is no rank 9 in a world of 8"),
        (changed(kinds=None), "kinds: expected a list, found null"),
        (changed(settings=settings(batch=0)), "settings: expected counts from zero on"),
        (changed(settings=settings(model=[["layers", "4"], ["a", "x"]])), "and values as JSON text"),
        (changed(settings=settings(model=[["layers"]])), "settings.model[0]: expected 2 values, found 1"),
        (changed(kinds=[]), "region GPT.blocks.0 is of kind 0, of 0"),
        (
            changed(kinds=[{"ops": [["mm"]], "host_inputs": []}] * 2),
            "kinds[0].ops[0]: expected an object, found a list",
        ),
        (
            changed(regions=[{**dataclasses.asdict(PLAN.regions[0]), "kept_bytes": 1, "whole": True}]),
            "region GPT.blocks.0 is recomputed as a whole, but keeps results",
        ),
        (changed(regions=[dataclasses.asdict(PLAN.regions[0])] * 2), "call 0 of GPT.blocks.0 is there twice"),
        (
            changed(
                kinds=[
                    {
                        "ops": [{"name": "a", "shapes": [], "decision": "x", "random": False}],
                        "host_inputs": [],
                    }
                ]
                * 2
            ),
            "kinds[0].ops[0].decision: expected one of save, recompute, skip, offload, found 'x'",
        ),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, content: Any, says: str) -> None:
    assert says in refusal(tmp_path / "plan.json", content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot read .*: No such file"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(FileFormatError, match=r"cannot write .*: No such file"):
        save_plan(PLAN, tmp_path / "nowhere" / "plan.json")


@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_any_changed_byte_is_noticed_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(PLAN, path)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = byte
    path.write_bytes(bytes(data))
    with contextlib.suppress(FileFormatError):
        assert load_plan(path) == PLAN
