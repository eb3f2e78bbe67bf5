"""Models over a mesh compute what they compute alone: on real processes, over gloo, some steps long.

A wrong gradient of any weight shows in the losses of later steps. What is only gathered and reduced, of equal
parts, is equal to the bit; sums in another order are equal within rounding.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from divided_models import Case, Trained, trained
from real_ranks import on_ranks

import trainfit
from trainfit.models.recipe import StepOptions

IMAGES = StepOptions(batch=2, optimizer="sgd")
PIPELINE = StepOptions(batch=4, seq=32, optimizer="sgd")
NO_DROPOUT = StepOptions(batch=2, seq=32, optimizer="sgd", set={"dropout": 0.0})
PIPELINE_NO_DROPOUT = StepOptions(batch=4, seq=32, optimizer="sgd", set={"dropout": 0.0})
UNEVEN = StepOptions(batch=2, seq=32, optimizer="sgd", set={"vocab_size": 4095})
BF16 = StepOptions(batch=2, seq=32, optimizer="sgd", dtype="bf16")

TO_THE_BIT = {
    2: [
        Case("llama-tiny", {"fsdp": 2}),
        Case("llama-tiny", {"dp": 2}, BF16),
        Case("gpt2-tiny", {"dp": 2}),
        Case("gpt2-tiny", {"replicate": 2}),
        Case("vit-tiny", {"dp": 2}, IMAGES),
        Case("mixtral-tiny", {"dp": 2}),
        Case("resnet-tiny", {"dp": 2}, IMAGES),
        Case("resnet-tiny", {"replicate": 2}, IMAGES),
    ],
    4: [Case("llama-tiny", {"replicate": 2, "fsdp": 2})],
}
WITHIN_ROUNDING = {
    2: [
        Case("llama-tiny", {"tp": 2}),
        Case("gpt2-tiny", {"tp": 2}),
        Case("gpt2-tiny", {"tp": 2}, UNEVEN),
        Case("bert-tiny", {"tp": 2}, NO_DROPOUT),
        Case("vit-tiny", {"tp": 2}, IMAGES),
        Case("mixtral-tiny", {"tp": 2}),
        Case("llama-tiny", {"cp": 2}),
        Case("gpt2-tiny", {"cp": 2}),
        Case("bert-tiny", {"cp": 2}, NO_DROPOUT),
        Case("mixtral-tiny", {"cp": 2}),
        Case("mixtral-tiny", {"ep": 2}),
        Case("llama-tiny", {"pp": 2}, PIPELINE),
        Case("vit-tiny", {"pp": 2}, StepOptions(batch=4, optimizer="sgd")),
        Case("gpt2-tiny", {"pp": 2}, PIPELINE),
        Case("bert-tiny", {"pp": 2}, PIPELINE_NO_DROPOUT),
    ],
    4: [
        Case("llama-tiny", {"dp": 2, "tp": 2}),
        Case("llama-tiny", {"replicate": 2, "tp": 2}),
        Case("gpt2-tiny", {"dp": 2, "tp": 2}),
        Case("bert-tiny", {"dp": 2, "tp": 2}, NO_DROPOUT),
        Case("vit-tiny", {"dp": 2, "tp": 2}, IMAGES),
        Case("mixtral-tiny", {"dp": 2, "tp": 2}),
        Case("mixtral-tiny", {"dp": 2, "ep": 2}),
        Case("mixtral-tiny", {"replicate": 2, "ep": 2}),
        Case("mixtral-tiny", {"cp": 2, "ep": 2}),
        Case("mixtral-tiny", {"pp": 2, "ep": 2}, PIPELINE),
        Case("llama-tiny", {"pp": 2, "tp": 2}, PIPELINE),
        Case("llama-tiny", {"pp": 2, "dp": 2}, PIPELINE),
        Case("llama-tiny", {"pp": 2, "replicate": 2}, PIPELINE),
        Case("llama-tiny", {"pp": 4}, PIPELINE),
        Case("gpt2-tiny", {"pp": 2, "dp": 2}, PIPELINE),
        Case("gpt2-tiny", {"pp": 2, "tp": 2}, PIPELINE),
        Case("bert-tiny", {"pp": 2, "tp": 2}, PIPELINE_NO_DROPOUT),
        Case("gpt2-tiny", {"pp": 2, "replicate": 2}, PIPELINE),
        Case("llama-tiny", {"cp": 4}),
        Case("bert-tiny", {"cp": 4}, NO_DROPOUT),
        Case("llama-tiny", {"dp": 2, "cp": 2}),
        Case("llama-tiny", {"replicate": 2, "cp": 2}),
        Case("llama-tiny", {"cp": 2, "tp": 2}),
        Case("gpt2-tiny", {"cp": 2, "tp": 2}),
        Case("llama-tiny", {"pp": 2, "cp": 2}, PIPELINE),
        # Last: its first and last stage make a group that the others do not, and torch names the next
        # group of some ranks by how many groups each of them has.
        Case("gpt2-tiny", {"pp": 4}, PIPELINE),
    ],
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 255,
    "architectures": ["LlamaForCausalLM"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mixtral": LLAMA
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Trained]]:
    """For each case what every rank found; one group of processes for all cases of a size."""
    found = {}
    for size in (2, 4):
        cases = TO_THE_BIT[size] + WITHIN_ROUNDING[size]
        for case, *by_rank in zip(cases, *on_ranks(size, trained, cases)):
            found[size, _key(case)] = by_rank
    return found


def _key(case: Case) -> str:
    return f"{case} {case.options}"


@pytest.mark.parametrize("case", [pytest.param((n, c), id=str(c)) for n in TO_THE_BIT for c in TO_THE_BIT[n]])
def test_what_is_only_gathered_is_equal_to_the_bit(
    case: tuple[int, Case], results: dict[tuple[int, str], list[Trained]]
) -> None:
    size, divided = case
    for rank in results[size, _key(divided)]:
        assert rank.losses == rank.plain_losses
        assert rank.largest_difference == 0.0 and rank.compared > 0


@pytest.mark.parametrize(
    "case", [pytest.param((n, c), id=str(c)) for n in WITHIN_ROUNDING for c in WITHIN_ROUNDING[n]]
)
def test_what_is_added_up_in_parts_is_equal_within_rounding(
    case: tuple[int, Case], results: dict[tuple[int, str], list[Trained]]
) -> None:
    size, divided = case
    by_rank = results[size, _key(divided)]
    for rank in by_rank:
        if rank.losses[0] is not None:
            assert rank.losses == pytest.approx(rank.plain_losses, rel=1e-6)
        assert rank.largest_difference < 1e-6 and rank.compared > 0
    # Only the last stage of a pipeline has the loss.
    assert sum(rank.losses[0] is not None for rank in by_rank) == size // divided.mesh.get("pp", 1)


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2},
        {"dp": 2, "tp": 2},
        {"cp": 2},
        {"pp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "tp": 2},
    ],
    ids=lambda mesh: "-".join(mesh),
)
def test_transformers_models_are_divided_by_their_own_plan(mesh: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    cases = []
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        cases.append(Case(f"hf:{tmp_path / name}.json", mesh, PIPELINE))
    for by_rank in zip(*on_ranks(math.prod(mesh.values()), trained, cases)):
        for rank in by_rank:
            if rank.losses[0] is not None:
                assert rank.losses == pytest.approx(rank.plain_losses, rel=1e-6)
            assert rank.largest_difference < 1e-6 and rank.compared > 0
        assert sum(rank.losses[0] is not None for rank in by_rank) == len(by_rank) // mesh.get("pp", 1)


EXPERTS = {
    "mixtral": CONFIGS["mixtral"],
    "qwen3_moe": CONFIGS["qwen3"]
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"dp": 2, "ep": 2}], ids=lambda mesh: "-".join(mesh))
def test_transformers_experts_are_divided_whole(mesh: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    cases = []
    for name, config in EXPERTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        cases.append(Case(f"hf:{tmp_path / name}.json", mesh))
    for by_rank in zip(*on_ranks(math.prod(mesh.values()), trained, cases)):
        for rank in by_rank:
            assert rank.losses == pytest.approx(rank.plain_losses, rel=1e-6)
            assert rank.largest_difference < 1e-6 and rank.compared > 0


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_transformers_model_in_stages_of_divided_layers_is_captured(
    rank: int, device: str, tmp_path: Path
) -> None:
    """Half of a stage's weights, and all of its norms; 4 samples, one after the other."""
    pytest.importorskip("transformers")
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    cluster = trainfit.Cluster(4, rank, mesh=(("pp", 2), ("tp", 2)))
    trace = trainfit.capture(f"hf:{file}", device=device, cluster=cluster, options=PIPELINE)
    width, layers = LLAMA["hidden_size"], LLAMA["num_hidden_layers"] // 2
    own = {number for module in trace.modules for number in module.parameters}
    whole = sum(module.whole_parameter_bytes for module in trace.modules)
    norms = 4 * width * (2 * layers + (rank == 3))
    # Of an odd number of rows of the embedding or the head, the first has one more.
    uneven = 4 * width * (LLAMA["vocab_size"] % 2) * (1 if rank == 0 else -1)
    assert sum(trace.storages[number].bytes for number in own) == (whole - norms + uneven) // 2 + norms
    sent = Counter(
        (one.kind, one.group)
        for op in trace.ops
        if (one := trace.signatures[op.signature].collective) and one.group == "pp"
    )
    assert sent == {("send", "pp"): 4, ("recv", "pp"): 4}
    sums = [
        one.group_size
        for op in trace.ops
        if (one := trace.signatures[op.signature].collective) and one.kind == "all_reduce"
    ]
    assert sums and set(sums) == {2}
    assert not trace.warnings
