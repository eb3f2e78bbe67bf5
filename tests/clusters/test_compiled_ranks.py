"""A model that tensor parallelism divides and torch compiles as a whole, with regions of a plan in it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from real_ranks import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "applying"))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import small_steps
from plans import plan_for, save_products

import trainfit
from trainfit.capturing import capture
from trainfit.plans.plan import Plan
from trainfit.traces.ranks import Cluster


def divided() -> nn.Module:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), small_steps.Transformer()
    for layer in model.layers:
        styles: dict[str, Any] = {"feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()}
        parallelize_module(layer, mesh, styles)
    return model


def trained(way: str, plan: Plan | None) -> tuple[list[bytes], list[str], int]:
    """Return losses and weights of two steps, what was said of the compiler, and the number of graphs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model: Any = divided()
    if way == "compiled, then planned":
        model = torch.compile(model, backend="eager")
    elif way == "compiled in place":
        model.compile(backend="eager")
    if plan is not None:
        trainfit.apply(model, plan)
    if way == "planned, then compiled":
        model = torch.compile(model, backend="eager")
    step = small_steps.step_of(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [step.run().detach(), step.run().detach()]
    found += [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    said = [str(one.message) for one in seen if "as a whole" in str(one.message)]
    return [one.detach().numpy().tobytes() for one in found], said, counters["stats"]["unique_graphs"]


WAYS = ("compiled, then planned", "compiled in place", "planned, then compiled")


def in_all_ways(plan: Plan) -> list[Any]:
    return [(trained(way, None), trained(way, plan)) for way in WAYS]


def test_a_divided_model_that_is_compiled_as_a_whole_runs_its_plan_without_the_compiler() -> None:
    """The results are the same, and it is said once."""
    trace = capture(lambda: small_steps.step_of(divided()), cluster=Cluster(2))
    root = trace.modules[trace.model].name
    names = [f"{root}.layers.0", f"{root}.layers.2.feed_forward"]
    for rank in on_ranks(2, in_all_ways, plan_for(trace, names, save_products)):
        for (expected, nothing, graphs), (found, said, none) in rank:
            assert found == expected
            assert (nothing, graphs > 0) == ([], True)
            [text] = said
            assert "runs without the compiler. Compile it block by block" in text
            assert none == 0
