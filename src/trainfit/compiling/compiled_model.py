"""`compile`: torch.compile within a budget in bytes, held by what the compiler keeps and computes again.

Before the first call with gradients the model is looked at (`graph_probe.py`): which graphs it has, how often
each is called. They share the budget (`step_shares.py`). Then torch compiles it, and the partitioner divides
each graph within its share. Nothing of torch's configuration is changed for others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast, get_args

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, list_mode_options
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from trainfit.basics.units import parse_size
from trainfit.compiling.compile_plan import CompilePlan
from trainfit.compiling.graph_planner import Backend
from trainfit.compiling.graph_probe import GraphProbe, nothing_changed
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.planned_partitioner import PlannedPartitioner, too_small
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.compiling.remembered_plans import (
    RememberedGraph,
    has_gradients,
    key_of_graph,
    recalled,
    remember,
)
from trainfit.compiling.standing_memory import device_of, model_bytes, optimizer_bytes
from trainfit.compiling.step_shares import shared, smallest_peak
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import OptionError, StepError, TrainfitError


def compile(
    model: nn.Module,
    *,
    budget: int | str,
    device: Device | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    other: int | str = 0,
    only: Iterable[nn.Module] = (),
    backend: Backend = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a compiled model whose forward and backward need at most `budget` bytes, as fast as that allows.

    `budget` counts everything: parameters, buffers, gradients, the state of the `optimizer`, the batch, what
    forward keeps for backward, and `other` bytes that the caller has besides. `device` says how fast
    operators are (the model's own device if not given). With `only`, these parts of the model are compiled,
    each by itself. The rest is as in `torch.compile`. The plan is the attribute `compile_plan`.

    Raises `BudgetTooSmall` at the first call if no plan fits.
    """
    if backend not in get_args(Backend):
        raise OptionError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}.")
    if not isinstance(model, nn.Module):
        raise StepError(f"compile takes a model (torch.nn.Module), got {type(model).__name__}.")
    found = device if isinstance(device, Device) else find_device(device or device_of(model))
    standing = model_bytes(model) + optimizer_bytes(optimizer) + _bytes(other, found)
    plan = CompilePlan(_bytes(budget, found), standing)
    parts = tuple(only)
    _check_parts(model, parts)
    settings: dict[str, Any] = {"fullgraph": fullgraph, "dynamic": dynamic}
    compiler = _PlannedCompiler(plan, NodeCosts(found), backend, mode, options)
    if parts:
        return _compiled_parts(model, parts, compiler, settings)
    compiled: Any = torch.compile(model, backend=compiler, **settings)
    compiled.forward = _Planned(model, compiler, compiled.forward, settings)
    compiled.compile_plan = plan
    assert isinstance(compiled, nn.Module)
    return compiled


class _PlannedCompiler:
    """The backend of torch.compile: inductor or aot_eager with our partitioner."""

    __name__ = "trainfit"

    def __init__(
        self,
        plan: CompilePlan,
        costs: NodeCosts,
        backend: Backend,
        mode: str | None,
        options: dict[str, Any] | None,
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.backend: Backend = backend
        self.partitioner = PlannedPartitioner(plan, costs, backend)
        self._patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}

    def __call__(self, gm: GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        if self.backend == "aot_eager":
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=self.partitioner
            )(gm, example_inputs)
            return compiled
        key = key_of_graph(self.partitioner.uuid(), gm, example_inputs)
        before = len(self.plan.graphs)
        made = self._by_inductor(gm, example_inputs)
        if len(self.plan.graphs) > before:
            remember(key, RememberedGraph(self.plan.graphs[-1], self.plan.standing_bytes))
        elif has_gradients(gm, example_inputs):
            # Torch has found compiled code again, and asked nobody.
            known = recalled(key)
            if known is not None:
                self.partitioner.note(known)
            else:
                with functorch_config.patch(enable_autograd_cache=False):
                    made = self._by_inductor(gm, example_inputs)
        return made

    def _by_inductor(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        with inductor_config.patch({**self._patches, "custom_partitioner_fn": self.partitioner}):
            made: Any = compile_fx.compile_fx(gm, example_inputs)
        return cast(Callable[..., Any], made)


class _Planned:
    """What a compiled model calls: before the first call with gradients, its graphs get their shares."""

    def __init__(
        self,
        model: nn.Module,
        compiler: _PlannedCompiler,
        forward: Callable[..., Any],
        settings: dict[str, Any],
    ) -> None:
        self._model = model
        self._compiler = compiler
        self._forward = forward
        self._settings = settings
        # One graph is the whole step: nothing has to be shared, and nothing to be found out before.
        self._shared = bool(settings["fullgraph"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._shared and torch.is_grad_enabled():
            probe = GraphProbe(self._compiler.costs, self._compiler.backend)
            with nothing_changed(self._model):
                torch.compile(self._model, backend=probe, **self._settings)(*args, **kwargs)
            give_shares(self._compiler.partitioner, probe)
            self._shared = True
        try:
            return self._forward(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, TrainfitError):
                raise failure.inner_exception from None
            raise


def give_shares(partitioner: PlannedPartitioner, probe: GraphProbe) -> None:
    """Divide the budget among the graphs that a run of the model showed."""
    plan = partitioner.plan
    planned = [n for n, planner in enumerate(probe.planners) if planner is not None]
    calls = [planned.index(call) for call in probe.calls if call in planned]
    if not calls:
        warnings.warn(
            "nothing that was compiled of the model can be planned, so that the budget is not kept: Dynamo "
            "has left it to eager PyTorch (TORCH_LOGS=graph_breaks says why), or it has no gradients.",
            stacklevel=3,
        )
        return
    first = probe.planners[planned[calls[0]]]
    assert first is not None
    plan.standing_bytes += first.input_bytes()
    plan.calls = tuple(call for call in probe.calls if call in planned)
    uses = probe.uses()
    limit = plan.budget_bytes - plan.standing_bytes
    partitioner.batch_is_counted()
    if len(calls) == 1 and len(planned) == 1:
        return
    shares = shared(uses, calls, limit)
    if shares is None:
        raise too_small(plan, smallest_peak(uses, calls))
    limits = iter(shares.limits)
    # What is not planned has a place among the graphs, too, but no limits that matter.
    free = GraphLimits.same(plan.budget_bytes)
    partitioner.shares = [free if planner is None else next(limits) for planner in probe.planners]


def _compiled_parts(
    model: nn.Module, parts: tuple[nn.Module, ...], compiler: _PlannedCompiler, settings: dict[str, Any]
) -> nn.Module:
    """Compile parts of a model, each by itself; the model stays what it was."""
    probe = GraphProbe(compiler.costs, compiler.backend)
    done = False

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal done
        if done or not torch.is_grad_enabled():
            return
        done = True
        for part in parts:
            part.compile(backend=probe, **settings)
        with nothing_changed(model):
            model(*args, **kwargs)
        give_shares(compiler.partitioner, probe)
        for part in parts:
            part.compile(backend=compiler, **settings)
        handle.remove()

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    model.compile_plan = compiler.plan  # type: ignore[assignment]
    return model


def _check_parts(model: nn.Module, parts: tuple[nn.Module, ...]) -> None:
    inside = set(model.modules())
    for part in parts:
        if not isinstance(part, nn.Module) or part not in inside:
            raise OptionError(f"only= takes modules of the model; {type(part).__name__} is none.")


def _bytes(size: int | str, device: Device) -> int:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise OptionError(f"a size is a number of bytes or text such as 20GiB, got {size!r}.")
    if isinstance(size, int):
        if size < 0:
            raise OptionError(f"a size in bytes is not negative, got {size}.")
        return size
    return parse_size(size, device.usable_bytes)
