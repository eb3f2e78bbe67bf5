"""Calls on distributed tensors that a trace counts are those of a real run, and take time of the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute
from torch.utils._python_dispatch import TorchDispatchMode

import trainfit
from trainfit.capturing.distributed.fake_groups import rank_of
from trainfit.costs import pricing
from trainfit.costs.schedule import issue_seconds
from trainfit.costs.table import Host
from trainfit.devices.device_table import this_cpu
from trainfit.models.recipe import StepOptions
from trainfit.operators.recorded_calls import nbytes
from trainfit.targets.parse import load
from trainfit.timing import distributed_seconds
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

HOST = Host(
    True, forward_op=9e-6, backward_op=7e-6, optimizer_op=4e-6, view_op=1e-6, module_call=1e-6, tensor=0
)
MESHES = ((("dp", 2),), (("tp", 2),), (("dp", 2), ("tp", 2)))


def cluster_of(mesh: tuple[tuple[str, int], ...]) -> Cluster:
    return Cluster(2 ** len(mesh), 0, mesh=mesh)


def captured(mesh: tuple[tuple[str, int], ...], name: str = "llama-tiny") -> Trace:
    return trainfit.capture(name, device="cpu", cluster=cluster_of(mesh), options=StepOptions(batch=1, seq=8))


class _Counting(TorchDispatchMode):
    """Counts operators on distributed tensors, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            self.calls += func is not torch.ops.aten.detach.default
            return NotImplemented
        return func(*args, **(kwargs or {}))


@contextmanager
def conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note every function that makes, takes apart or divides anew, while the block runs."""
    found: list[str] = []

    def noted(name: str, original: Any) -> Any:
        def convert(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        return convert

    with monkeypatch.context() as patch:
        for function in (_api._FromTorchTensor, _api._ToTorchTensor, _redistribute.Redistribute):
            for name in ("forward", "backward"):
                patch.setattr(function, name, staticmethod(noted(name, getattr(function, name))))
        name = "redistribute_local_tensor"
        patch.setattr(_dispatch, name, noted(name, getattr(_dispatch, name)))
        yield found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_counts_are_those_of_a_real_step(
    mesh: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, trace = cluster_of(mesh), captured(mesh)
    with rank_of(cluster):
        step = load("llama-tiny", replace(StepOptions(batch=1, seq=8), cluster=cluster)).build()
        for _ in range(2):
            step.run()
        with _Counting() as counting, conversions(monkeypatch) as converted:
            step.run()
        del step
        gc.collect()
    assert sum(op.wrapped for op in trace.ops) == counting.calls > 0
    assert sum(op.converted for op in trace.ops) == len(converted)
    assert bool(converted) == ("tp" in dict(mesh))


def test_the_host_takes_time_for_each() -> None:
    trace = captured(MESHES[2])
    slower = replace(HOST, wrapped_op=1.0, conversion=1e3, unit_op=1e6)
    more = (issue_seconds(trace, slower) - issue_seconds(trace, HOST)).tolist()
    expected = [op.wrapped + 1e3 * op.converted + (1e6 if op.exchange else 0.0) for op in trace.ops]
    assert more == pytest.approx(expected)
    assert {bool(op.exchange) for op in trace.ops} == {True, False}


def test_the_host_takes_longer_where_operators_fill_its_cache() -> None:
    trace = captured(MESHES[2])
    usual = replace(HOST, cache_bytes=10_000)
    more = (issue_seconds(trace, replace(usual, rank_reload=1.0)) - issue_seconds(trace, usual)).tolist()
    for op, seconds in zip(trace.ops, more):
        signature = trace.signatures[op.signature]
        specs = (*signature.inputs, *signature.outputs)
        size = sum(map(nbytes, specs))
        filled = 0.0 if signature.view else min(size / 10_000, 1.0)
        assert seconds == pytest.approx(filled * (op.wrapped + op.converted + bool(op.exchange)))
    assert max(more) > 1.0


def test_figures_are_measured_for_steps_of_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def host(distributed: bool, **_: Any) -> tuple[Host, None]:
        asked.append(distributed)
        return HOST, None

    monkeypatch.setattr("trainfit.costs.this_machine.host", host)
    device = replace(this_cpu(), bandwidth_bytes_per_second=1e10, flops={"fp32": 1e11}, sm_count=1)
    alone = trainfit.capture("llama-tiny", device="cpu", options=StepOptions(batch=1, seq=8))
    for trace in (alone, captured(MESHES[0])):
        pricing.price_trace(trace, device)
    assert asked == [False, True]


def test_measured_figures_are_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_seconds, "_BUDGET_SECONDS", 0.05)
    monkeypatch.setattr(distributed_seconds, "_SAMPLES", ("gpt2-tiny",))
    monkeypatch.setattr(distributed_seconds, "_SMALL", StepOptions(batch=1, seq=8))
    monkeypatch.setattr(distributed_seconds, "_MEDIUM", StepOptions(batch=1, seq=8))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = distributed_seconds.measured(asdict(HOST))
    finally:
        torch.set_num_threads(threads)
    assert found.keys() == {"wrapped_op", "conversion", "unit_op", "rank_reload"}
    # A real machine takes 10 to 100 microseconds for each; nothing is said about a busy one.
    assert all(1e-6 < seconds < 1e-2 for name, seconds in found.items() if name != "rank_reload")
    assert 0 <= found["rank_reload"] < 1e-2
