"""One rank of a mesh, captured in one process: what it has of the model, and what is said about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainfit
from trainfit import Cluster, StepOptions
from trainfit.errors import OptionError
from trainfit.report.json_result import result_json
from trainfit.report.reading import estimate_data

H100 = "h100-sxm-80gb"


def cluster(rank: int = 0, **mesh: int) -> Cluster:
    return Cluster(math.prod(mesh.values()), rank, mesh=tuple(mesh.items()))


def whole_and_local(trace: trainfit.Trace) -> dict[str, tuple[int, int]]:
    """Return the bytes of each module's own parameters, of all ranks and of this one, by its plain name."""
    return {
        module.name.partition(".")[2]: (
            module.whole_parameter_bytes,
            sum(trace.storages[storage].bytes for storage in module.parameters),
        )
        for module in trace.modules
        if module.parameters
    }


def test_the_shards_of_a_rank_under_fsdp_and_tensor_parallelism() -> None:
    """Of a weight (352, 128): 176 rows by tp=2, of which dp=8 has 22. Norms are whole in tp."""
    trace = trainfit.capture(
        "llama-tiny", device="cpu", cluster=cluster(dp=8, tp=2), options=StepOptions(batch=2, seq=32)
    )
    found = whole_and_local(trace)
    assert found["blocks.3.feed_forward.up"] == (4 * 352 * 128, 4 * 22 * 128)
    assert found["blocks.3.feed_forward.down"] == (4 * 128 * 352, 4 * 16 * 176)
    assert found["blocks.0.attention.key"] == (4 * 64 * 128, 4 * 4 * 128)
    assert found["token_embedding"] == (4 * 4096 * 128, 4 * 256 * 128)
    assert found["norm"] == (4 * 128, 4 * 16)
    assert trace.cluster == cluster(dp=8, tp=2)


@pytest.mark.parametrize(
    ("mesh", "divided_by"), [({"fsdp": 4}, 4), ({"replicate": 4}, 1), ({"replicate": 2, "fsdp": 2}, 2)]
)
def test_what_data_parallelism_divides(mesh: dict[str, int], divided_by: int) -> None:
    trace = trainfit.capture(
        "gpt2-tiny", device="cpu", cluster=cluster(**mesh), options=StepOptions(batch=2, seq=32)
    )
    parameters = sum(local for _, local in whole_and_local(trace).values())
    assert parameters == 4 * 1_350_400 // divided_by
    assert trace.settings.parameters == 1_350_400


def test_each_stage_of_a_pipeline_has_its_blocks() -> None:
    """Four blocks in three stages: one, one and two; the first has the embedding, the last the head."""
    for rank, own in enumerate(
        (["blocks.0", "token_embedding"], ["blocks.1"], ["blocks.2", "blocks.3", "head"])
    ):
        trace = trainfit.capture(
            "llama-tiny", device="cpu", cluster=cluster(rank, pp=3), options=StepOptions(batch=4, seq=32)
        )
        names = {name.removeprefix("model.") for name in whole_and_local(trace)}
        parts = {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in names}
        assert sorted(parts - {"norm"}) == own


def test_the_worst_rank_of_a_pipeline_is_found() -> None:
    """The first stage holds the most micro-batches; the last has the logits, which are the most here."""
    options = StepOptions(batch=4, seq=64)
    found = trainfit.estimate(
        "llama-tiny", device=H100, cluster=cluster(pp=2), worst_rank=True, options=options, allocator=None
    )
    peaks = {one.rank: one.peak_bytes for one in found.ranks}
    assert set(peaks) == {0, 1}
    assert found.trace.cluster is not None
    assert peaks[found.trace.cluster.rank] == max(peaks.values()) == found.peak_bytes
    alone = trainfit.estimate(
        "llama-tiny", device=H100, cluster=cluster(1, pp=2), options=options, allocator=None
    )
    assert alone.peak_bytes == peaks[1]


def build_with_mesh(mesh: Any, width: int = 64, device: str = "cpu") -> trainfit.Step:
    from torch.distributed.fsdp import fully_shard

    assert mesh.mesh_dim_names == ("rows", "columns")
    assert mesh.device_type == device
    # The last dimension is side by side.
    assert mesh["columns"].mesh.tolist() == [4, 5]
    assert mesh["rows"].mesh.tolist() == [1, 3, 5]
    model = nn.Linear(width, width, bias=False, device=device)
    fully_shard(model, mesh=mesh["rows"])
    return trainfit.Step.of(
        model,
        torch.ones(2, width, device=device),
        loss=torch.Tensor.sum,
        optimizer=torch.optim.SGD(model.parameters()),
    )


@pytest.mark.parametrize("device", ["cpu", H100])
def test_a_function_with_a_parameter_mesh_gets_it(device: str) -> None:
    trace = trainfit.capture(build_with_mesh, device=device, cluster=cluster(5, rows=3, columns=2))
    ((whole, local),) = whole_and_local(trace).values()
    assert (whole, local) == (4 * 64 * 64, 4 * 22 * 64)  # rows 44 to 63, padded to as many as the first
    assert not torch.distributed.is_initialized()


def test_what_is_said_about_a_rank() -> None:
    estimate = trainfit.estimate(
        "llama-tiny", device=H100, cluster=cluster(3, dp=8), options=StepOptions(batch=2, seq=64)
    )
    found = result_json(estimate_data(estimate))
    assert (found["world_size"], found["rank"], found["mesh"]) == (8, 3, {"dp": 8})
    assert found["gathered_bytes"] > 0
    assert found["communication_bytes"] == found["by_category"]["communication"]
    # A step this small waits for the host, which hides them.
    assert 0 <= found["exposed_communication_seconds"] <= found["communication_seconds"]
    # Queues run beside each other: shares are of what all of them do.
    assert sum(operator["share"] for operator in found["operators"]) == pytest.approx(1.0)
    assert found["unpriced"] == []
    assert 0 < found["communication_seconds"] < found["step_seconds"]
    (root,) = (module for module in found["modules"] if module["depth"] == 0)
    assert root["whole_parameter_bytes"] == 4 * 1_787_008
    assert root["parameter_bytes"] == pytest.approx(root["whole_parameter_bytes"] / 8, rel=0.05)


def build_with_own_mesh() -> trainfit.Step:
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (2, 3), mesh_dim_names=("replica", "shard"))
    model = fully_shard(nn.Linear(64, 64), mesh=mesh)
    batch = torch.ones(4, 64)
    return trainfit.Step(model=model, optimizer=None, run=lambda: model(batch).sum().backward())


def test_the_mesh_that_a_step_makes_itself_is_shown() -> None:
    estimate = trainfit.estimate(build_with_own_mesh, cluster=Cluster(6, 1))
    found = result_json(estimate_data(estimate))
    assert (found["mesh"], found["own_mesh"]) == ({}, {"replica": 2, "shard": 3})
    assert estimate_data(estimate).subject.mesh_words == "replica=2, shard=3"


def test_a_step_of_one_process_says_so() -> None:
    found = result_json(estimate_data(trainfit.estimate("gpt2-tiny", device=H100)))
    assert (found["world_size"], found["rank"], found["mesh"], found["ranks"]) == (1, 0, {}, [])
    assert found["communication_seconds"] == found["exposed_communication_seconds"] == 0.0


@pytest.mark.parametrize(
    ("target", "sizes", "options", "message"),
    [
        ("gpt2", {"zp": 2}, {}, "there is no dimension 'zp' .*The dimensions are pp: stages"),
        ("gpt2", {"ep": 2}, {}, "gpt2 cannot be divided by --mesh ep=2: it has no experts; use fsdp"),
        ("mixtral-tiny", {"ep": 3}, {}, "its 8 experts cannot be divided evenly among 3 ranks"),
        ("mixtral-tiny", {"ep": 2, "tp": 2}, {}, "experts are divided either by ep, whole, or by tp"),
        ("gpt2", {"tpp": 2}, {}, "Did you mean tp?"),
        ("gpt2", {"tp": 5}, {}, "gpt2 cannot be divided by --mesh tp=5: its 12 attention heads"),
        ("llama-3-8b", {"tp": 16}, {}, "its 8 key and value heads cannot be divided evenly among 16"),
        ("llama-3-8b", {"tp": 8}, {"seq": 100}, "its 100 tokens cannot be divided evenly"),
        ("gpt2", {"tp": 2, "dp": 4}, {}, "what communicates most comes last; write --mesh dp=4,tp=2"),
        ("gpt2", {"dp": 2, "fsdp": 2}, {}, "dp and fsdp are the same"),
        ("resnet-50", {"pp": 2}, {"batch": 8}, "stages are cut between layers that are alike"),
        ("llama-3-8b", {"pp": 4}, {}, "add --batch 8 or more"),
        ("llama-tiny", {"pp": 8}, {"batch": 8}, "it has 4 layers, fewer than there are stages"),
        ("resnet-50", {"tp": 2}, {}, "resnet-50 cannot be divided by --mesh tp=2: .*convolutions"),
        (
            "llama-3-8b",
            {"cp": 4},
            {"seq": 100},
            "cp=4: its 100 tokens cannot be divided into 8 equal pieces, two for each of the 4 ranks",
        ),
        ("bert-base", {"cp": 3}, {}, "cannot be divided into 3 equal pieces, one for each of the 3 ranks"),
        ("vit-b-16", {"cp": 2}, {}, "vit-b-16 cannot be divided by --mesh cp=2: it reads images"),
        ("llama-3-8b", {"cp": 2, "tp": 8}, {"seq": 8 * 3}, "its 12 tokens cannot be divided evenly among 8"),
        ("llama-tiny", {"cp": 2}, {"dtype": "fp32"}, "no fused kernel .*use bfloat16 or float16"),
        ("gpt2", {"dp": 2}, {"dtype": "fp16-autocast"}, "--dtype fp16-autocast and --mesh"),
        (build_with_mesh, {}, {}, "needs mesh; pass --mesh dp=8,tp=4"),
    ],
)
def test_one_message_for_what_cannot_be_divided(
    target: Any, sizes: dict[str, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(trainfit.TrainfitError, match=message):
        trainfit.capture(
            target,
            device=H100,
            cluster=cluster(**sizes) if sizes else Cluster(8),
            options=StepOptions(**options),
        )


def test_processors_have_no_context_parallelism() -> None:
    with pytest.raises(OptionError, match=r"on GPUs only; name one, as in --device h100"):
        trainfit.capture("llama-tiny", device="cpu", cluster=cluster(cp=2))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_has_its_part_of_every_sequence(rank: int) -> None:
    """256 tokens: 64 for each of four ranks. Parameters are divided among them, too."""
    options = StepOptions(batch=2, seq=256, dtype="bf16")
    trace = trainfit.capture("llama-tiny", device=H100, cluster=cluster(rank, dp=2, cp=4), options=options)
    assert whole_and_local(trace)["blocks.0.feed_forward.up"] == (2 * 352 * 128, 2 * 44 * 128)
    by_name = {module.name.partition(".")[2]: number for number, module in enumerate(trace.modules)}
    logits = {
        trace.storages[number].bytes
        for op in trace.ops
        if op.module == by_name["head"] and op.phase == "forward"
        for number in op.creates
    }
    assert 2 * 2 * 64 * 4096 in logits  # bfloat16, two samples
    assert trace.settings.batch == 2 and trace.settings.seq == 256


def test_a_world_size_alone_does_not_divide_a_built_in_model() -> None:
    with pytest.raises(
        OptionError, match=r"how 64 processes share gpt2: add --mesh, as in --mesh dp=64 \(FSDP\)"
    ):
        trainfit.estimate("gpt2", device=H100, cluster=Cluster(64))


def test_a_mesh_needs_a_parameter_of_that_name() -> None:
    with pytest.raises(OptionError, match=r"has no parameter named mesh.*--world-size 8 instead"):
        trainfit.capture(lambda batch=1: None, cluster=cluster(dp=8))  # type: ignore[arg-type,return-value]


def test_a_trace_keeps_its_cluster() -> None:
    trace = trainfit.capture("gpt2-tiny", device=H100, options=StepOptions(batch=1, seq=8))
    with pytest.raises(OptionError, match="a trace is of one rank already"):
        trainfit.estimate(trace, device=H100, cluster=Cluster(8))
    with pytest.raises(OptionError, match=r"cluster is a trainfit\.Cluster"):
        trainfit.estimate("gpt2-tiny", device=H100, cluster=8)  # type: ignore[arg-type]


def pipeline_and_fsdp() -> trainfit.Step:
    """Two stages of two ranks each, by meshes of the function's own; the second has a larger part."""
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("nccl")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("stages", "shards"))
    stage = mesh["stages"].get_local_rank()
    part = nn.Sequential(*(nn.Linear(256, 256) for _ in range(1 + 3 * stage))).to(place)
    fully_shard(part, mesh=mesh["shards"])
    pipeline = PipelineStage(part, stage, 2, place, group=mesh["stages"].get_group())
    schedule = ScheduleGPipe(pipeline, 2, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    data = torch.randn(8, 256).to(place)

    def run() -> None:
        schedule.step(*((data,) if stage == 0 else ()), **({"target": data} if stage else {}))
        optimizer.step()
        optimizer.zero_grad()

    return trainfit.Step(model=part, optimizer=optimizer, run=run)


def test_the_worst_rank_is_found_without_a_mesh() -> None:
    found = trainfit.estimate(
        pipeline_and_fsdp, device=H100, cluster=Cluster(4), worst_rank=True, allocator=None
    )
    peaks = {one.rank: one.peak_bytes for one in found.ranks}
    assert set(peaks) == {0, 1, 2, 3}
    assert found.trace.cluster is not None and found.trace.cluster.rank in (2, 3)
    # Four layers of 256 x 256 with a bias instead of one: at least the three more are there, gathered.
    assert peaks[2] - peaks[0] > 3 * 4 * (256 * 256 + 256)
    text = str(result_json(estimate_data(found))["ranks"])
    assert all(str(peak) in text for peak in peaks.values())


def test_the_time_of_a_pipeline_is_that_of_all_its_stages() -> None:
    """Four samples through two stages: at best 4 of 5 slots are full, and a stage alone shows no gap."""
    options = StepOptions(batch=4, seq=2048)
    found = trainfit.estimate(
        "llama-tiny", device=H100, cluster=cluster(pp=2), options=options, allocator=None
    ).time
    assert found is not None
    assert found.bubble_share >= 0.2 - 1e-9
    assert found.step_seconds == pytest.approx(
        found.forward_seconds + found.backward_seconds + found.optimizer_seconds + found.bubble_seconds,
        rel=0.02,
    )
    other = trainfit.estimate(
        "llama-tiny", device=H100, cluster=cluster(1, pp=2), options=options, allocator=None
    ).time
    assert other is not None and other.step_seconds == pytest.approx(found.step_seconds)


def test_the_estimate_says_what_each_unit_waits_for() -> None:
    found = trainfit.estimate(
        "llama-tiny",
        device=H100,
        cluster=cluster(dp=16),
        options=StepOptions(batch=2, seq=512),
        allocator=None,
    )
    data = result_json(estimate_data(found))
    names = {row["unit"] for row in data["communication_units"]}
    assert names == {"Llama", *(f"Llama.blocks.{number}" for number in range(4))}
    # Two gathers and one reduction for each block; the root is not gathered again.
    collectives = {row["unit"]: row["collectives"] for row in data["communication_units"]}
    assert collectives == {"Llama": 2, **{f"Llama.blocks.{number}": 3 for number in range(4)}}
    waited = sum(row["exposed_seconds"] for row in data["communication_units"])
    assert 0 <= waited <= data["exposed_communication_seconds"] * (1 + 1e-9)
    assert data["copies"] == 16
    assert data["total_tokens_per_second"] == pytest.approx(16 * data["tokens_per_second"])
    assert data["tokens_per_second_per_device"] == pytest.approx(data["tokens_per_second"])
