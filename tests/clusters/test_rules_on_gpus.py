"""How sharded steps hold memory and order their queues on a GPU: the rules, with bytes computed by hand.

Rank 1 of 4, on a device that is not there. What a real run on CPUs allocates is compared elsewhere; here are
the rules that only streams show, and every variant of the benchmark.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainfit import Step
from trainfit.capturing import capture
from trainfit.errors import TrainfitError
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import COMPUTE, Op, Storage, Trace

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
from cluster_cases import CASES, context_steps, fsdp_steps  # noqa: E402
from cluster_cases.small_transformer import Transformer, adamw, start, token_batch, usual_step  # noqa: E402

sys.path.remove(BENCHMARKS)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WORLD = 4
MIB = 1 << 20
BLOCK = 4 * (4 * 64 * 64 + 2 * 2 * 64 + (64 * 256 + 256) + (256 * 64 + 64))
"""Bytes of a unit: four projections, two norms, two layers with biases."""
ROOT = 4 * (256 * 64 + 32 * 64 + 2 * 64 + 64 * 256)
"""Of the root: embeddings of tokens and positions, a norm, the output."""
WHOLE = 3 * BLOCK + ROOT


@functools.cache
def on_gpu(name: str) -> Trace:
    return captured(CASES[name].build, name)


def captured(build: Callable[[], Step], name: str = "step", device: str = "cuda") -> Trace:
    return capture(build, target=name, device=device, cluster=Cluster(WORLD, 1))


def parameters(trace: Trace) -> tuple[int, int]:
    """Return the bytes of all parameters, and of this rank's part of them."""
    own = {number for module in trace.modules for number in module.parameters}
    return (
        sum(module.whole_parameter_bytes for module in trace.modules),
        sum(trace.storages[number].bytes for number in own),
    )


def collectives(trace: Trace, kind: str) -> Iterator[tuple[int, Op]]:
    for number, op in enumerate(trace.ops):
        collective = trace.signatures[op.signature].collective
        if collective is not None and collective.kind == kind:
            yield number, op


def written(trace: Trace, kind: str, phase: str | None = None) -> list[Storage]:
    """Return what the collectives of a kind write, one storage each, in order."""
    found = [op for _, op in collectives(trace, kind) if phase in (None, op.phase)]
    return [trace.storages[op.writes[0]] for op in found]


def reduce_inputs(trace: Trace) -> list[Storage]:
    return [
        trace.storages[next(n for n in op.reads if n not in op.writes)]
        for _, op in collectives(trace, "reduce_scatter")
    ]


# Every variant ---------------------------------------------------------------------------------------------

SHARES = {
    **{name: 4 for name in CASES if name.startswith("fsdp")},
    **dict.fromkeys(("hsdp", "hsdp-pairs", "hsdp-bf16-reduce-fp32"), 2),
    **{name: 1 for name in CASES if name.startswith("ddp")},
    "context-gathered": 1,
    "context-ring": 1,
    "context-fsdp": 4,
}
"""By what the parameters of all ranks are divided, where they are divided evenly."""
QUEUES = {
    "fsdp": {COMPUTE, "copy-in", "reduce-scatter", "group"},
    "hsdp": {COMPUTE, "copy-in", "reduce-scatter", "all-reduce", "group"},
    "fsdp-of-old": {COMPUTE, "stream", "stream 2", "group"},
    "hf-llama-fsdp": {COMPUTE, "copy-in", "reduce-scatter", "group"},
    "tp-fsdp": {COMPUTE, "copy-in", "reduce-scatter", "group"},
    "experts-fsdp": {COMPUTE, "copy-in", "reduce-scatter", "group"},
    "context-fsdp": {COMPUTE, "copy-in", "reduce-scatter", "group"},
}


@pytest.mark.parametrize("name", CASES)
def test_every_variant_is_captured_for_a_gpu(name: str) -> None:
    trace = on_gpu(name)
    queues = {op.queue if not op.queue.startswith("group ") else "group" for op in trace.ops}
    assert queues == QUEUES.get(name) or queues == QUEUES.get(name.split("-")[0], {COMPUTE, "group"})
    whole, own = parameters(trace)
    if name in ("fsdp-uneven", "fsdp-uneven-blocks", "fsdp-offload"):  # padded; on the host
        assert own != whole / 4
    elif name in SHARES and name != "fsdp-of-old":  # which has them in one flat parameter
        assert own == whole / SHARES[name]
    # What is sent and received is on the GPU, and so is what is computed.
    assert all(
        any(trace.storages[n].bytes or trace.storages[n].resizes for n in (*op.writes, *op.creates))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for _, op in collectives(trace, kind)
        if op.phase != "optimizer"
    )
    # Setting up the stages of a pipeline does not count as another kind of run.
    assert not trace.warnings and trace.steps.changing == ()
    assert simulate(trace).peak_bytes > max(own, MIB // 2)


def test_the_parameters_of_the_small_transformer() -> None:
    assert parameters(on_gpu("fsdp")) == (WHOLE, WHOLE // 4) == (736_512, 184_128)
    # 251 x 63 is divided into 63 rows, of which the last rank has 62; all get memory for 63.
    uneven = on_gpu("fsdp-uneven")
    (tokens,) = (module for module in uneven.modules if module.class_name == "Embedding")
    assert [uneven.storages[n].bytes for n in tokens.parameters] == [4 * 63 * 63]


# FSDP2's memory --------------------------------------------------------------------------------------------


def test_in_forward_a_gathered_buffer_is_held_until_the_next_unit_has_its_own() -> None:
    trace = on_gpu("fsdp")
    buffers = written(trace, "all_gather", "forward")
    assert [buffer.bytes for buffer in buffers] == [ROOT, BLOCK, BLOCK, BLOCK]
    assert all((buffer.category, buffer.stream) == ("communication", "copy-in") for buffer in buffers)
    gathers = [number for number, op in collectives(trace, "all_gather") if op.phase == "forward"]
    for buffer, following, after in zip(buffers, gathers[1:], [*gathers[2:], len(trace.ops)]):
        # It is there when the next gather begins, so two are in flight, and gone before the one after that.
        assert buffer.end is not None and following < buffer.end < after
    # The last is let go when forward of the root ends, not with backward.
    backward = next(n for n, op in enumerate(trace.ops) if op.phase == "backward")
    assert buffers[-1].end is not None and buffers[-1].end < backward


def test_in_backward_a_gathered_buffer_goes_at_once_and_the_next_unit_is_gathered_ahead() -> None:
    trace = on_gpu("fsdp")
    gathers = [(number, op) for number, op in collectives(trace, "all_gather") if op.phase == "backward"]
    names = [trace.module_name(op.module).removeprefix("Transformer.") for _, op in gathers]
    assert names == ["layers.2", "layers.1", "layers.0"]  # the root still has its parameters
    buffers = written(trace, "all_gather", "backward")
    copies_out = [
        number
        for number, op in enumerate(trace.ops)
        if op.phase == "backward" and trace.op_name(number).startswith("aten.split_with_sizes_copy")
    ]
    assert [buffer.end for buffer in buffers] == [number + 1 for number in copies_out]
    # The next unit's gather is issued right after the copy out, and its buffer lives through the compute.
    for copy_out, (following, _) in zip(copies_out, gathers[1:]):
        assert copy_out < following < copy_out + 6
    reduces = [number for number, _ in collectives(trace, "reduce_scatter")]
    for reduce, buffer in zip(reduces, buffers[1:]):
        assert buffer.alive_at(reduce)


def test_gathered_parameters_are_freed_by_resizing_and_the_root_keeps_its_own() -> None:
    trace = on_gpu("fsdp")
    by_name = {module.name.removeprefix("Transformer."): module for module in trace.modules}
    (query,) = by_name["layers.1.attention.wq"].gathered
    (output,) = by_name["output"].gathered
    size = 4 * 64 * 64
    assert [new for _, new in trace.storages[query].resizes] == [size, 0, size, 0]
    assert [new for _, new in trace.storages[output].resizes] == [4 * size, 0]
    kept = on_gpu("fsdp-no-reshard")
    by_name = {module.name.removeprefix("Transformer."): module for module in kept.modules}
    (query,) = by_name["layers.1.attention.wq"].gathered
    assert [new for _, new in kept.storages[query].resizes] == [size, 0]


def test_what_a_unit_reduces_is_held_until_the_next_unit_reduces() -> None:
    trace = on_gpu("fsdp")
    inputs = reduce_inputs(trace)
    assert [one.bytes for one in inputs] == [BLOCK, BLOCK, BLOCK, ROOT]
    assert all((one.category, one.stream) == ("communication", COMPUTE) for one in inputs)
    assert [one.end for one in inputs[:-1]] == [one.start for one in inputs[1:]]
    outputs = written(trace, "reduce_scatter")
    assert [one.bytes for one in outputs] == [BLOCK // 4, BLOCK // 4, BLOCK // 4, ROOT // 4]
    assert all((one.category, one.stream) == ("gradient", "reduce-scatter") for one in outputs)


def test_mixed_precision_casts_on_the_copy_in_stream_and_reduces_in_its_own_dtype() -> None:
    """Parameters are gathered in two bytes; gradients are copied into a buffer of the dtype to reduce in."""
    for name, reduced in (("fsdp-bf16", BLOCK // 2), ("fsdp-bf16-reduce-fp32", BLOCK)):
        trace = on_gpu(name)
        assert [one.bytes for one in written(trace, "all_gather", "forward")[1:]] == [BLOCK // 2] * 3
        casts = [
            storage
            for storage in trace.storages
            if storage.bytes == BLOCK // 2 // 4 and storage.category == "communication"
        ]
        assert len([one for one in casts if one.stream == "copy-in"]) == 6  # forward and backward of three
        assert [one.bytes for one in reduce_inputs(trace)[:3]] == [reduced] * 3
        gradients = [s for s in trace.storages if s.category == "gradient" and s.stream == "reduce-scatter"]
        assert sum(s.bytes for s in gradients) == WHOLE // 4  # in four bytes, whatever they were reduced in


def test_prefetched_units_have_a_buffer_each() -> None:
    """Two units ahead: while the first runs forward, its own parameters and two buffers are there."""
    trace = on_gpu("fsdp-prefetch")
    call = next(c for c in trace.calls if trace.modules[c.module].name == "Transformer.layers.0")
    alive = [one for one in written(trace, "all_gather", "forward") if one.alive_at(call.body.stop - 1)]
    assert [one.bytes for one in alive] == [BLOCK, BLOCK, BLOCK]  # its own is held for the next to have one
    assert len([one for one in written(on_gpu("fsdp"), "all_gather") if one.alive_at(call.body.stop - 1)]) < 3


def hsdp_reduced_in_bf16() -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fsdp_steps.sharded(Transformer(), fsdp_steps.two_by(2), mp_policy=policy)
    return usual_step(model, adamw(model), token_batch())


def test_hsdp_holds_what_it_reduces_to_the_end_where_gradients_have_another_dtype() -> None:
    trace = captured(hsdp_reduced_in_bf16)
    buffers = written(trace, "all_reduce")
    sizes = [BLOCK // 2 // 2] * 3 + [ROOT // 2 // 2]  # half as wide, divided by two
    assert [(one.bytes, one.stream) for one in buffers] == [(size, "reduce-scatter") for size in sizes]
    last = max(number for number, op in enumerate(trace.ops) if op.queue == "all-reduce")
    assert all(one.alive_at(last) for one in buffers)
    assert all(one.category == "communication" for one in buffers)
    gradients = [one for one in trace.storages if one.category == "gradient" and one.stream == "all-reduce"]
    assert sorted(one.bytes for one in gradients) == sorted(2 * size for size in sizes)
    # Where the dtype is the same, what is reduced is the gradient itself.
    assert all(one.category == "gradient" for one in written(on_gpu("hsdp"), "all_reduce"))


def test_shards_that_are_offloaded_are_on_the_host() -> None:
    trace = on_gpu("fsdp-offload")
    assert parameters(trace) == (WHOLE, 0)
    tokens = 8 * 4 * 32
    held = [one for one in trace.storages if one.persistent and one.bytes]
    assert [one.bytes for one in held] == [tokens]
    assert [one.bytes for one in written(trace, "all_gather", "forward")] == [ROOT, BLOCK, BLOCK, BLOCK]


def feed_forward(device: str) -> Step:
    """Layers whose kernels are the same on both kinds of device; all sizes are whole blocks of 512 bytes."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh(device, (WORLD,))
    place = torch.device("cuda", 1) if device == "cuda" else torch.device("cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(3))).to(place)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    data = torch.randn(64, 512).to(place)

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(data).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def test_a_gpu_has_allocated_what_a_cpu_has_but_for_rounding() -> None:
    """References order the frees, not `record_stream`."""
    cpu = captured(functools.partial(feed_forward, "cpu"), device="cpu")
    gpu = captured(functools.partial(feed_forward, "cuda"))
    rounded = replace(cpu, device="cuda", observed_peak_bytes=None)
    ranks = 512  # of the mesh: on the host, which counts where the device is the CPU
    assert max(simulate(gpu).live_bytes) == max(simulate(rounded).live_bytes) - ranks
    assert gpu.persistent_bytes == rounded.persistent_bytes - ranks
    assert not any(storage.also_used_on for storage in gpu.storages)


# Queues ----------------------------------------------------------------------------------------------------


def done_before(trace: Trace, number: int) -> set[int]:
    """Return every op that is done when an op begins: before it on its queue, or waited for, and so on."""
    found: set[int] = set()
    last_of: dict[str, list[int]] = {}
    for earlier, op in enumerate(trace.ops[:number]):
        last_of.setdefault(op.queue, []).append(earlier)
    pending = [*trace.ops[number].waits_for, *last_of.get(trace.ops[number].queue, [])[-1:]]
    while pending:
        one = pending.pop()
        if one < 0 or one in found:
            continue
        found.add(one)
        before = [other for other in last_of[trace.ops[one].queue] if other < one]
        pending += [*trace.ops[one].waits_for, *before[-1:]]
    return found


def test_gathers_follow_their_copy_in_and_compute_follows_gathers() -> None:
    trace = on_gpu("fsdp")
    for number, op in collectives(trace, "all_gather"):
        copies = [n for n in range(number) if trace.ops[n].queue == "copy-in"]
        assert max(copies) in op.waits_for
        copy_out = next(
            n
            for n in range(number, len(trace.ops))
            if trace.op_name(n).startswith("aten.split_with_sizes_copy")
            and set(op.writes) & {*trace.ops[n].reads}
        )
        assert trace.ops[copy_out].queue == COMPUTE
        assert number in done_before(trace, copy_out)


def test_after_backward_of_a_unit_compute_waits_for_the_reduce_before() -> None:
    """Not for its own: the reduce of one unit runs beside backward of the next."""
    trace = on_gpu("fsdp")
    reduces = [number for number, _ in collectives(trace, "reduce_scatter")]
    inputs = [one.start for one in reduce_inputs(trace)]
    for reduce, following in zip(reduces, inputs[1:]):
        assert reduce in trace.ops[following].waits_for
        between = range(reduce + 1, following)
        assert not any(reduce in trace.ops[n].waits_for for n in between if trace.ops[n].queue == COMPUTE)
    for reduce in reduces:
        copy_in = max(n for n in range(reduce) if trace.op_name(n).startswith("aten._chunk_cat"))
        assert trace.ops[copy_in].queue == COMPUTE and copy_in in done_before(trace, reduce)


def test_the_all_reduce_of_hsdp_follows_its_reduce_scatter_in_another_group() -> None:
    trace = on_gpu("hsdp")
    pairs = list(zip(collectives(trace, "reduce_scatter"), collectives(trace, "all_reduce")))
    assert len(pairs) == 4
    for (reduce, first), (all_reduce, second) in pairs:
        assert (first.queue, second.queue) == ("group shard", "group replicate")
        assert reduce in done_before(trace, all_reduce)
    optimizer = next(n for n, op in enumerate(trace.ops) if op.phase == "optimizer" and op.queue == COMPUTE)
    assert {number for _, (number, _) in pairs} <= done_before(trace, optimizer)


def test_the_optimizer_waits_for_the_last_reduce_and_the_next_steps_gathers_for_the_optimizer() -> None:
    trace = on_gpu("fsdp")
    optimizer = next(n for n, op in enumerate(trace.ops) if op.phase == "optimizer" and op.queue == COMPUTE)
    assert {number for number, _ in collectives(trace, "reduce_scatter")} <= done_before(trace, optimizer)
    (first, gather), *_ = collectives(trace, "all_gather")
    copy_in = next(op for op in trace.ops if op.queue == "copy-in")
    for op in (copy_in, gather):
        # The last op of the compute queue of the step before, which is the optimizer's.
        (before,) = (n for n in op.waits_for if n < 0)
        assert (trace.ops[before].queue, trace.ops[before].phase) == (COMPUTE, "optimizer")
        assert not any(one.queue == COMPUTE for one in trace.ops[before + len(trace.ops) + 1 :])
    assert first < 10


def separate_groups() -> Step:
    model: Any = fsdp_steps.sharded(Transformer(), fsdp_steps.flat_mesh())
    model.set_separate_reduce_scatter_group()
    return usual_step(model, adamw(model), token_batch())


def test_one_group_takes_turns_and_separate_ones_do_not() -> None:
    def queues(trace: Trace) -> list[set[str]]:
        return [{op.queue for _, op in collectives(trace, kind)} for kind in ("all_gather", "reduce_scatter")]

    assert queues(on_gpu("fsdp")) == [{"group world"}, {"group world"}]
    gathers, reduces = queues(captured(separate_groups))
    assert len(gathers) == len(reduces) == 1 and gathers != reduces


# DDP -------------------------------------------------------------------------------------------------------


def thirty_layers(**how: Any) -> Step:
    """Thirty weights of 1 MiB each."""
    place = start()
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(30))).to(place)
    model = DistributedDataParallel(layers, device_ids=[place.index], **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 512).to(place)

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(data).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def test_buckets_are_of_1_and_25_mib_and_stay() -> None:
    trace = captured(thirty_layers)
    buckets = written(trace, "all_reduce")
    assert [one.bytes for one in buckets] == [MIB, 25 * MIB, 4 * MIB]
    assert all(one.persistent and one.end is None for one in buckets)
    assert all((one.category, one.stream) == ("communication", COMPUTE) for one in buckets)
    gradients = [one for one in trace.storages if one.category == "gradient"]
    assert sum(one.bytes for one in gradients) == 30 * MIB
    # The first is exchanged while backward goes on: compute waits for none before the last gradient.
    first, last = (number for number, _ in list(collectives(trace, "all_reduce"))[::2])
    assert not any(first in op.waits_for for op in trace.ops[first:last] if op.queue == COMPUTE)
    optimizer = next(n for n, op in enumerate(trace.ops) if op.phase == "optimizer")
    assert {first, last} <= done_before(trace, optimizer)


def test_gradients_that_are_views_of_buckets_take_no_memory_of_their_own() -> None:
    plain, views = captured(thirty_layers), captured(lambda: thirty_layers(gradient_as_bucket_view=True))
    assert [one.bytes for one in written(views, "all_reduce")] == [MIB, 25 * MIB, 4 * MIB]
    assert all(one.category == "gradient" for one in written(views, "all_reduce"))
    assert simulate(plain).peak_bytes - simulate(views).peak_bytes > 25 * MIB
    assert sum(one.bytes for one in views.storages if one.category == "communication") == 0


# Context parallel ------------------------------------------------------------------------------------------

SAMPLES, PART, HEADS, HEAD = 4, context_steps.GPU_PART, 4, 16
KEYS = 4 * SAMPLES * HEADS * PART * HEAD
"""Bytes of a layer's keys of one rank; its queries and values are as many, and all in float32."""


def rows_of_attention(trace: Trace, name: str) -> Counter[tuple[int, int]]:
    """Count calls of a kernel by how many rows of queries and of keys it gets."""
    found: Counter[tuple[int, int]] = Counter()
    for number, op in enumerate(trace.ops):
        if trace.op_name(number) == f"aten._scaled_dot_product_efficient_attention{name}.default":
            tensors = [one.shape for one in trace.signatures[op.signature].inputs if len(one.shape) == 4]
            assert {(shape[0], shape[1], shape[3]) for shape in tensors} == {(SAMPLES, HEADS, HEAD)}
            first = 1 if name else 0  # in backward, the gradient of the result comes first
            found[tensors[first][2], tensors[first + 1][2]] += 1
    return found


@pytest.mark.parametrize("name", ["context-gathered", "context-ring", "context-fsdp"])
def test_a_rank_of_a_sequence_computes_on_its_part_alone(name: str) -> None:
    trace = on_gpu(name)
    products = [
        trace.signatures[op.signature]
        for number, op in enumerate(trace.ops)
        if op.phase == "forward" and trace.op_name(number) in ("aten.mm.default", "aten.addmm.default")
    ]
    # Four projections, and two layers with biases, in each of three blocks; the output.
    assert len(products) == 3 * 6 + 1
    assert all((SAMPLES * PART) in {one.shape[0] for one in product.inputs} for product in products)
    # Its own part by itself, causal; keys from before it are seen by half, and those from behind it by the
    # second half of its queries.
    ranks, rank = (2, 1) if name == "context-fsdp" else (4, 1)
    rounds = Counter({(PART, PART): 1, (PART, PART // 2): rank, (PART // 2, PART): ranks - 1 - rank})
    expected = Counter({shape: 3 * count for shape, count in rounds.items() if count})
    assert rows_of_attention(trace, "") == rows_of_attention(trace, "_backward") == expected


@pytest.mark.parametrize("name", ["context-gathered", "context-ring", "context-fsdp"])
def test_what_the_ranks_of_a_sequence_exchange(name: str) -> None:
    """Keys and values of each layer, in forward and again in backward, and their gradients all the way."""
    trace = on_gpu(name)
    ranks = 2 if name == "context-fsdp" else 4
    found = Counter(
        (op.phase, one.kind, one.group_size, one.bytes)
        for op in trace.ops
        if (one := trace.signatures[op.signature].collective)
    )
    expected = Counter({("backward", "permute", ranks, 2 * KEYS): 3 * ranks})
    for phase in ("forward", "backward"):
        if name == "context-ring":
            expected[phase, "permute", ranks, 2 * KEYS] += 3 * (ranks - 1)
        else:
            expected[phase, "all_gather", ranks, ranks * 2 * KEYS] += 3
    # The root has positions for the whole sequence; DDP's first bucket is of 1 MiB, and takes all.
    root = ROOT + 4 * 64 * (PART * ranks - 32)
    if name == "context-fsdp":
        expected["forward", "all_gather", 4, BLOCK] += 3
        expected["forward", "all_gather", 4, root] += 1
        expected["backward", "all_gather", 4, BLOCK] += 3
        expected["backward", "reduce_scatter", 4, BLOCK] += 3
        expected["backward", "reduce_scatter", 4, root] += 1
    else:
        expected["backward", "all_reduce", 4, 3 * BLOCK + root] += 1
    assert found == expected


# Tensor parallel -------------------------------------------------------------------------------------------


def mixed_parameters(foreach: bool | None) -> Step:
    """Weights are distributed, a norm is not."""
    place = start()
    mesh = dist.device_mesh.init_device_mesh("cuda", (WORLD,))
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)).to(place)
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    return Step.of(model, torch.randn(8, 64).to(place), loss=torch.Tensor.sum, optimizer=optimizer)


def dropout_on_a_distributed_tensor() -> Step:
    place = start()
    mesh = dist.device_mesh.init_device_mesh("cuda", (WORLD,))
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)).to(place)
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(input_layouts=Shard(-1))}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step.of(model, torch.randn(8, 64).to(place), loss=torch.Tensor.sum, optimizer=optimizer)


def test_dropout_on_a_distributed_tensor_takes_what_the_kernel_takes() -> None:
    """The rank's part of the result and of the mask; the generators' state is on the host."""
    trace = captured(dropout_on_a_distributed_tensor)
    inside = [n for n, op in enumerate(trace.ops) if trace.module_name(op.module) == "Sequential.1"]
    forward = [n for n in inside if trace.ops[n].phase == "forward"]
    assert [trace.op_name(n) for n in forward] == ["aten.native_dropout.default"]
    made = [trace.storages[number].bytes for n in forward for number in trace.ops[n].creates]
    assert made == [4 * 8 * 64, 8 * 64]
    # No other kernel, no copy to the host and nothing exchanged for it.
    assert not any(op.host_waits for op in trace.ops)
    assert {kind for n in inside if (kind := trace.signatures[trace.ops[n].signature].collective)} == set()


def test_an_optimizer_of_lists_refuses_plain_and_distributed_tensors_as_on_a_real_gpu() -> None:
    with pytest.raises(TrainfitError, match=r"mixed torch\.Tensor and DTensor"):
        captured(lambda: mixed_parameters(None))
    assert captured(lambda: mixed_parameters(False)).ops
