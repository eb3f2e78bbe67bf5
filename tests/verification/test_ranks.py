"""`verify` of several processes: every rank predicted and measured, compared by phase, one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from trace_text import trace

import trainfit
from trainfit.api.prove import verify
from trainfit.api.prove_ranks import verify_ranks
from trainfit.api.rank_prediction import trace_in_child
from trainfit.api.request import Request
from trainfit.errors import OptionError, PlanError, StepError, TargetError
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.verifying.rank_control import started_by_torchrun
from trainfit.verifying.rank_measuring import RankMemory, predicted_memory
from trainfit.verifying.rank_verification import RankFound
from trainfit.verifying.silent_backend import silent_groups
from trainfit.workspace.profiler import profile_allocations

ROOT = Path(__file__).parents[2]
STEPS = Path(__file__).parent / "ranks" / "sharded_steps.py"


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("ranks") / "result.json"
    done = torchrun("-m", "trainfit", "verify", f"{STEPS}:build", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def test_every_rank_is_predicted_and_measured(verified: tuple[str, dict[str, Any]]) -> None:
    _, result = verified
    assert result["world_size"] == 2
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    for rank in result["ranks"]:
        for figure in ("peak", "persistent", "forward", "backward", "optimizer"):
            assert rank[f"predicted_{figure}_bytes"] == rank[f"measured_{figure}_bytes"], figure
    # 17 and 16 rows of three weights and biases. FSDP pads its own parts to the same size; what AdamW keeps,
    # two of each, is as large as the part.
    first, second = (rank["measured_persistent_bytes"] for rank in result["ranks"])
    assert first - second == 2 * 3 * (33 + 1) * 4
    assert result["measured_peak_bytes"] == result["ranks"][0]["measured_peak_bytes"]


def test_one_rank_prints_one_table(verified: tuple[str, dict[str, Any]]) -> None:
    text, _ = verified
    words = " ".join(text.split())
    assert words.count("on 2 ranks: the predicted peak is exact on every rank") == 1
    assert "0 backward" in text and "1 optimizer" in text


def test_every_rank_is_compared_with_the_plan_on_its_own_step(tmp_path: Path) -> None:
    plan = trainfit.plan(f"{STEPS}:build", budget="90KB", cluster=Cluster(world_size=2))
    trainfit.save_plan(plan, tmp_path / "plan.json")
    flags = ("--plan", str(tmp_path / "plan.json"), "--json", str(tmp_path / "result.json"))
    done = torchrun("-m", "trainfit", "verify", f"{STEPS}:build", *flags)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["ranks"]
    assert first["predicted_peak_bytes"] == plan.peak_bytes
    assert first["predicted_peak_bytes"] - second["predicted_peak_bytes"] == 2 * 3 * (33 + 1) * 4
    for rank in (first, second):
        assert rank["gradients_equal"] and rank["baseline_measured_peak_bytes"] > rank["measured_peak_bytes"]
        for figure in ("peak", "persistent", "forward", "backward", "optimizer"):
            assert rank[f"predicted_{figure}_bytes"] == rank[f"measured_{figure}_bytes"], figure


def test_ranks_with_different_numbers_of_batches_that_join(tmp_path: Path) -> None:
    """Each is predicted with its own batches; a rank that is done takes part in what the others exchange."""
    file = tmp_path / "result.json"
    done = torchrun("-m", "trainfit", "verify", f"{STEPS}:joined", "--json", str(file))
    assert done.returncode == 0, done.stderr
    first, second = json.loads(file.read_text(encoding="utf-8"))["ranks"]
    assert second["measured_persistent_bytes"] - first["measured_persistent_bytes"] == 4 * 64 * 32
    for rank in (first, second):
        for figure in ("peak", "persistent", "forward", "backward", "optimizer"):
            predicted, measured = rank[f"predicted_{figure}_bytes"], rank[f"measured_{figure}_bytes"]
            # DDP keeps the handle that told the others of a batch. Ours holds the number that was sent.
            assert predicted - measured == 4, figure


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_what_a_rank_exchanges_to_join(device: str) -> None:
    """Before each batch it says that it has one; when all have none left, the model is made the same."""
    weights = 4 * 2 * (32 * 32 + 32)
    for rank, batches in ((0, 2), (1, 3)):
        found = trainfit.capture(f"{STEPS}:joined", device=device, cluster=Cluster(2, rank))
        kinds = Counter(
            (one.kind, one.bytes)
            for op in found.ops
            if (one := found.signatures[op.signature].collective) and one.bytes > 8
        )
        assert kinds == {("all_reduce", weights): batches, ("broadcast", weights): 1}
        assert not found.warnings


def test_a_plan_of_ranks_is_not_verified_in_one_process() -> None:
    plan = trainfit.plan(f"{STEPS}:build", cluster=Cluster(world_size=2))
    message = r"was made for rank 0 of 2 \(dim0=2\), and this is one process: write torchrun"
    with pytest.raises(PlanError, match=message):
        verify("gpt2-tiny", plan=plan)


def test_a_rank_that_fails_ends_all_with_one_message() -> None:
    done = torchrun("-m", "trainfit", "verify", f"{STEPS}:fails_on_rank_1")
    assert done.returncode != 0
    assert "ValueError: no data for this rank" in done.stderr
    ours = done.stderr.split("torch/distributed/elastic")[0]
    assert "src/trainfit/" not in ours, "a traceback of ours"


def test_predictions_and_real_ranks_agree_on_usual_steps() -> None:
    """A sample; `benchmarks/cluster_truth.py` has all."""
    cases = ("fsdp-bf16-reduce-fp32", "ddp-bucket-views", "pipeline-1f1b")
    command = [sys.executable, "benchmarks/cluster_truth.py", "--ranks", "2", "--no-plans", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 ranks within 0.1%, 6 exact to the byte" in done.stdout


def test_regions_with_collectives_run_again_on_all_ranks() -> None:
    """Tokens go to their experts and back inside of the regions, into given tensors."""
    command = [sys.executable, "benchmarks/cluster_truth.py", "--ranks", "4", "experts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 ranks within 0.1%, 4 exact to the byte; 2 of 2 plans hold" in done.stdout


@pytest.mark.slow
def test_predictions_and_real_ranks_agree_on_all_steps(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/cluster_truth.py", "--csv", str(tmp_path / "rows.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_phases_of_a_prediction() -> None:
    found = predicted_memory(
        simulate(
            trace("""
                w            : 100 held parameter
                -- forward
                a = one(w)   : 400 saved
                b = two(a)   :  50
                -- backward
                g = back(a)  : 300 workspace 7
                -- optimizer
                t = square(g): 300
                w += step(t)
            """)
        )
    )
    assert found.persistent_bytes == 100
    assert found.phase_bytes == {"forward": 550, "backward": 807, "optimizer": 700}
    assert found.peak_bytes == 807


def test_phases_of_a_step_with_several_optimizer_steps() -> None:
    """What is between two backwards counts as forward, as it does where it is measured."""
    found = predicted_memory(
        simulate(
            trace("""
                w            : 100 held parameter
                -- forward
                a = one(w)   :  40 saved
                -- backward
                g = back(a)  :  30
                -- optimizer
                t = square(g): 300
                w += step(t)
                -- forward
                b = one(w)   :  50 saved
                -- backward
                h = back(b)  :  60
                -- optimizer
                u = square(h):  70
                w += step(u)
            """)
        )
    )
    assert found.phase_bytes == {"forward": 430, "backward": 210, "optimizer": 230}
    assert found.peak_bytes == 430


def test_the_log_counts_what_is_there_while_operators_run() -> None:
    held = []
    with profile_allocations() as log:
        with log.range("one"):
            held.append(torch.zeros(100))
            torch.zeros(1000)  # gone again at once
        with log.range("two"):
            held[0].zero_()  # allocates nothing
            held.pop()
        with log.range("two"):
            held.append(torch.zeros(50))
    assert len(log.spans("two")) == 2
    assert log.most_bytes(log.spans("one")) == 4400
    assert log.most_bytes(log.spans("two")[:1]) == 400
    assert log.most_bytes(log.spans("two")) == 400
    assert log.most_bytes(log.spans("two")[1:]) == 200
    assert log.most_bytes([]) == 0


def test_what_a_rank_has_found_goes_through_json() -> None:
    memory = RankMemory(3, 1, {"forward": 3})
    found = RankFound(1, memory, memory, 3, 5, True, None, False, ("a",), (), ("b",))
    assert RankFound.from_data(json.loads(json.dumps(found.as_data()))) == found


def test_what_makes_no_sense_for_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="--runs says how many steps are timed; of several processes none"):
        verify("gpt2-tiny", runs=3)
    with pytest.raises(OptionError, match="ranks are measured on the CPU for now"):
        verify_ranks(Request("gpt2-tiny", "a100-40gb"))


def test_a_process_group_of_the_users_own_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(StepError, match="there is a process group already"), silent_groups():
            pass
    finally:
        dist.destroy_process_group()


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    with pytest.raises(TargetError, match="or a function at the top level of a module"):
        trace_in_child(Request(lambda: None), Cluster(2, 0))


def test_torchrun_is_known_by_its_variables() -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert started_by_torchrun(given)
    assert not started_by_torchrun({**given, "RANK": ""})
    assert not started_by_torchrun({**given, "WORLD_SIZE": "many"})
    assert not started_by_torchrun({name: given[name] for name in ("RANK", "WORLD_SIZE")})
    assert not started_by_torchrun(os.environ)
