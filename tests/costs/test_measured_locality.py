"""Where ops find their memory: worked out by hand on small caches."""

from __future__ import annotations

import torch
from torch import nn

from trainfit import Step
from trainfit.capturing import capture
from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import this_cpu
from trainfit.timing.locality import FAR, MIDDLE, NEAR, Caches, Locality, localities, this_machines_caches
from trainfit.traces.trace import Trace

WIDTH = 1 << 16
"""A tensor of 256 KiB."""


def chain(width: int) -> Trace:
    """Three element-wise operators one after another, and their gradients."""

    def build() -> Step:
        layer = nn.Parameter(torch.rand(width))

        def run() -> None:
            layer.exp().tanh().sigmoid().sum().backward()
            layer.grad = None

        model = nn.Module()
        model.layer = layer
        return Step(model, None, run)

    return capture(build)


def of(trace: Trace, name: str, caches: Caches) -> Locality:
    found = localities(trace, caches)
    number = next(n for n, s in enumerate(trace.signatures) if s.name == name)
    (locality,) = found[number]
    return locality


def test_what_was_just_written_is_near() -> None:
    trace = chain(WIDTH)
    large = Caches(1 << 24, 1 << 26)
    assert of(trace, "aten.tanh.default", large).inputs == (NEAR,)
    assert of(trace, "aten.exp.default", large).inputs == (NEAR,)


def test_what_was_used_long_ago_is_far() -> None:
    trace = chain(WIDTH)
    # Two tensors fit into the core's own cache, four into the last one.
    small = Caches(600 << 10, 1200 << 10)
    assert of(trace, "aten.tanh.default", small).inputs == (NEAR,)
    # The parameter was last used at the end of the step before, many tensors ago.
    assert of(trace, "aten.exp.default", small).inputs == (FAR,)
    large = Caches(600 << 10, 1 << 24)
    assert of(trace, "aten.exp.default", large).inputs == (MIDDLE,)


def test_tensors_larger_than_a_cache_are_never_in_it() -> None:
    assert of(chain(WIDTH), "aten.tanh.default", Caches(1 << 12, 1 << 13)).inputs == (FAR,)


def test_small_tensors_do_not_matter() -> None:
    assert of(chain(16), "aten.exp.default", Caches(64, 64)).inputs == (NEAR,)


def test_freed_memory_is_used_again() -> None:
    trace = chain(WIDTH)
    assert of(trace, "aten.sigmoid.default", Caches(1 << 24, 1 << 26)).results == NEAR


def test_operators_repeated_at_once_find_their_code() -> None:
    def build() -> Step:
        weights = nn.ParameterList([nn.Parameter(torch.rand(64)) for _ in range(8)])
        optimizer = torch.optim.SGD(weights, lr=0.1, foreach=False)

        def run() -> None:
            sum(weight.square().sum() for weight in weights).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(weights, optimizer, run)

    trace = capture(build)
    found = localities(trace, Caches(1 << 19, 1 << 24))
    number = next(n for n, s in enumerate(trace.signatures) if s.name == "aten.add_.Tensor")
    assert sum(count for locality, count in found[number].items() if locality.warm_code) >= 7


def test_this_machine_has_caches() -> None:
    caches = this_machines_caches()
    assert 0 < caches.own_bytes <= caches.last_bytes


def test_large_operators_make_python_load_its_data_again() -> None:
    trace = chain(WIDTH)
    table = CostTable(
        this_cpu(),
        Host(True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, reload=1.0, cache_bytes=1 << 20),
        (OpCost(0.0, "assumed"),) * len(trace.signatures),
        0.0,
    )
    plan = schedule(trace, table)
    exp = next(n for n in range(len(trace.ops)) if trace.op_name(n) == "aten.exp.default")
    assert plan.host_seconds[exp] == 0.5  # 256 KiB in and 256 KiB out, of 1 MiB
    assert plan.host_seconds.max() <= 1.0
    assert all(
        seconds == 0
        for seconds, op in zip(plan.host_seconds, trace.ops)
        if trace.signatures[op.signature].view
    )
