"""Sharded steps, captured and run: to the byte on the CPU; what is shared out; queues on a GPU.

A real run of one rank on torch's backend `fake` allocates what it would among others, where values do not
matter. For DistributedDataParallel and pipelines they do: two real processes exchange them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from sharded_steps import DDP, EVERY_STEP, FSDP, PIPELINES, TENSOR_PARALLEL, Build, Transformer

from trainfit.capturing import capture
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import COMPUTE, Trace
from trainfit.verifying.measuring import measure_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
"""torch's own, as in a real run: of random numbers on distributed tensors, of views that FSDP returns."""

WORLD = 4
BLOCK_BYTES = 4 * (4 * 32 * 32 + 4 * 32 + 2 * 4 * 32 * 32 + 4 * 32 + 32)
"""Four projections, two norms, and the two layers of the feed-forward part with their biases."""


def captured(name: str, device: str = "cpu", rank: int = 1) -> Trace:
    return capture(partial(EVERY_STEP[name], device), cluster=Cluster(WORLD, rank), device=device)


@pytest.mark.parametrize("build", [*FSDP, *TENSOR_PARALLEL], ids=lambda build: build.__name__)
def test_memory_is_that_of_a_real_run_to_the_byte(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = captured(build.__name__)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", str(WORLD))):
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=dist.HashStore())
    try:
        real = measure_step(partial(build, "cpu"), "cpu", steps=trace.steps, timed=0)
    finally:
        dist.destroy_process_group()
    assert (simulate(trace).peak_bytes, trace.persistent_bytes) == (real.peak_bytes, real.persistent_bytes)


REAL_RANK = """
import json, sys
from functools import partial
sys.path.insert(0, sys.argv[1])
from sharded_steps import EVERY_STEP
from trainfit.traces.step_runs import USUAL_STEPS
from trainfit.verifying.rank_control import RankControl
from trainfit.verifying.rank_measuring import measure_rank
from trainfit.verifying.silent_backend import silent_groups
control, found = RankControl.from_environment(), {}
with silent_groups():
    for name in sys.argv[3:]:
        memory, _ = measure_rank(partial(EVERY_STEP[name], "cpu"), USUAL_STEPS, control)
        found[name] = [memory.peak_bytes, memory.persistent_bytes]
json.dump(found, open(f"{sys.argv[2]}/{control.cluster.rank}.json", "w"))
"""


def test_memory_is_that_of_two_real_processes(tmp_path: Path) -> None:
    names = [build.__name__ for build in (*DDP, *PIPELINES)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        environment = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-W", "ignore", "-c", REAL_RANK, str(Path(__file__).parent), str(tmp_path)]
        ranks.append(subprocess.Popen([*command, *names], env=environment))
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    for rank in range(2):
        for name, (peak, persistent) in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            trace = capture(partial(EVERY_STEP[name], "cpu"), cluster=Cluster(2, rank))
            found = simulate(trace).peak_bytes, trace.persistent_bytes
            assert found == (peak, persistent), (name, rank)


@pytest.mark.parametrize("name", EVERY_STEP)
def test_every_step_is_captured_for_a_gpu(name: str) -> None:
    on_gpu, on_cpu = captured(name, "cuda"), captured(name)
    kinds = [
        Counter(s.collective.kind for op in trace.ops if (s := trace.signatures[op.signature]).collective)
        for trace in (on_gpu, on_cpu)
    ]
    assert kinds[0] == kinds[1]
    assert all(storage.category != "parameter" or storage.bytes >= 0 for storage in on_gpu.storages)
    whole = [sum(module.whole_parameter_bytes for module in trace.modules) for trace in (on_gpu, on_cpu)]
    assert whole[0] == whole[1] > 0
    assert not [text for text in on_gpu.warnings if "on the host" in text]


def test_a_module_says_what_part_of_its_parameters_it_has() -> None:
    trace = captured("fsdp")
    names = {module.name: module for module in trace.modules}
    assert "Transformer.layers.0.feed_forward.w1" in names
    weights = names["Transformer.layers.0.feed_forward.w1"]
    assert weights.whole_parameter_bytes == 4 * (128 * 32 + 128)
    assert sum(trace.storages[number].bytes for number in weights.parameters) == 4 * (128 * 32 + 128) // WORLD
    assert names["Transformer"].class_name == Transformer.__name__


def test_gathered_parameters_are_there_while_their_block_runs() -> None:
    trace = captured("fsdp")
    blocks = [n for n, module in enumerate(trace.modules) if module.class_name == "Block"]
    for block in blocks:
        inside = {block} | {
            n for n, m in enumerate(trace.modules) if m.name.startswith(trace.modules[block].name)
        }
        gathered = [number for n in inside for number in trace.modules[n].gathered]
        assert all(trace.storages[number].gathered for number in gathered)
        (call,) = (c for c in trace.calls if c.module == block and not c.recompute)
        last = call.forward_end - 1
        assert sum(trace.occupied_at(number, last) for number in gathered) == BLOCK_BYTES
        assert sum(trace.occupied_at(number, len(trace.ops) - 1) for number in gathered) == 0


def test_buffers_of_collectives_are_communication_and_what_they_reduce_to_gradients() -> None:
    trace = captured("fsdp")
    kinds = {}
    for op in trace.ops:
        collective = trace.signatures[op.signature].collective
        if collective is not None:
            kinds.setdefault(collective.kind, set()).update(trace.storages[n].category for n in op.writes)
    assert kinds == {"all_gather": {"communication"}, "reduce_scatter": {"gradient"}}
    at_peak = simulate(trace).peak_op
    gathered = sum(trace.occupied_at(n, at_peak) for n, s in enumerate(trace.storages) if s.gathered)
    assert gathered > 0


def test_what_a_block_gathers_early_belongs_to_the_block_whose_parameters_it_is() -> None:
    trace = captured("fsdp_prefetch")
    gathers = [
        (trace.module_name(op.module), trace.modules[trace.calls[op.call].module].name)
        for op in trace.ops
        if trace.op_name(trace.ops.index(op)).startswith("c10d._allgather_base_") and op.call >= 0
    ]
    assert ("Transformer.layers.1", "Transformer.layers.0") in gathers


def test_buckets_are_communication_unless_gradients_live_in_them() -> None:
    def bucket(trace: Trace) -> set[str]:
        reduced = (
            op for op in trace.ops if trace.signatures[op.signature].name.startswith("c10d.allreduce_")
        )
        return {trace.storages[number].category for op in reduced for number in op.writes}

    assert bucket(captured("ddp")) == {"communication"}
    assert bucket(captured("ddp_views")) == {"gradient"}


def test_groups_are_named_by_their_dimension() -> None:
    found = {s.collective.group: s.collective for s in captured("tp_fsdp").signatures if s.collective}
    assert {name: found[name].group_size for name in found} == {"dp": 2, "tp": 2}


def test_the_queues_of_fsdp_on_a_gpu() -> None:
    """Gathers follow the copy-in, compute follows gathers, and reduces follow compute."""
    trace = captured("fsdp", "cuda")
    queues = {op.queue for op in trace.ops}
    assert queues == {COMPUTE, "copy-in", "reduce-scatter", "group world"}
    for number, op in enumerate(trace.ops):
        kind = trace.signatures[op.signature].collective
        behind = {trace.ops[other].queue for other in op.waits_for}
        if kind is not None and kind.kind == "all_gather":
            assert "copy-in" in behind
            reader = next(
                later
                for later in trace.ops[number:]
                if later.queue == COMPUTE and set(op.writes) & set(later.reads)
            )
            assert number in _all_before(trace, trace.ops.index(reader))
        if kind is not None and kind.kind == "reduce_scatter":
            assert "reduce-scatter" in behind or COMPUTE in behind
    streams = {trace.storages[n].stream for op in trace.ops if op.queue == "copy-in" for n in op.creates}
    assert streams == {"copy-in"}


def _all_before(trace: Trace, number: int) -> set[int]:
    """Return what is done when an op of the compute queue begins: what it and those before it waited for."""
    return {n for op in trace.ops[: number + 1] if op.queue == COMPUTE for n in op.waits_for}


def test_the_optimizer_on_a_gpu_waits_for_the_last_reduce() -> None:
    trace = captured("fsdp", "cuda")
    last = max(n for n, op in enumerate(trace.ops) if op.queue == "reduce-scatter")
    first = next(n for n, op in enumerate(trace.ops) if op.phase == "optimizer" and op.queue == COMPUTE)
    assert any(n >= last for n in _all_before(trace, first)) and last < first


def test_distributed_activations_are_held_by_autograd_alone() -> None:
    """Checkpointing frees what autograd holds; what the program holds it could not free."""
    trace = captured("sp")
    backward = min(n for n, op in enumerate(trace.ops) if op.phase == "backward")
    # The first layer of each feed-forward part makes 4 x 16 x (128 / 4 ranks) numbers, which GELU keeps.
    size = 4 * 4 * 16 * 128 // WORLD
    kept = [
        storage
        for storage in trace.storages
        if storage.producer >= 0
        and trace.module_name(trace.ops[storage.producer].module).endswith("feed_forward.w1")
        and storage.bytes == size
        and storage.alive_at(backward)
    ]
    assert len(kept) == 3
    for storage in kept:
        forward = [hold for hold in storage.held_by("program") if hold.start < backward]
        assert all(hold.end is not None and hold.end < backward for hold in forward)
