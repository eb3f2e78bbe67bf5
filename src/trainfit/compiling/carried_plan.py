"""Carries out plans that were made before: graphs of a model are divided as its `CompiledPlan` says.

There is one partitioner for all models that run such a plan. It knows a graph by what it computes
(`value_names.py`). Graphs of other models, and those that a plan does not know, are divided as they would be
anyway; of a planned model there is one warning then. Nothing runs besides the compiled code.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.backends import debugging
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from trainfit.capturing.compiled import compilations
from trainfit.compiling.graph_planner import problem_workspaces
from trainfit.compiling.joint_problem import CannotPlan, read_joint_graph
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.partition_memory import partition_of
from trainfit.compiling.planned_partitioner import code_hash
from trainfit.compiling.recompute_problem import Partition, RecomputeProblem, Role
from trainfit.compiling.remembered_plans import note_refusal, was_refused
from trainfit.compiling.split_graphs import prepared, split, with_better_order
from trainfit.compiling.standing_memory import device_of
from trainfit.compiling.value_names import GraphValues, named_values
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import PlanError
from trainfit.plans.compiled_plan import CompiledPlan, GraphChoice

Divided = tuple[GraphModule, GraphModule]
_EAGER: Any = debugging
"""Where aot_eager is: it has no setting for its partitioner."""


@dataclass
class CarriedPlan:
    """A plan that a model runs, and what has become of it."""

    plan: CompiledPlan
    carried: list[int] = field(default_factory=list)
    """The plan's graphs that were divided so far, in the order of compiling."""
    refused: list[str] = field(default_factory=list)
    """Why torch divided graphs of the model."""
    watch: Any = None
    """The hook that says so if the model is not compiled."""

    def choice_for(self, values: GraphValues) -> int | None:
        """Return the plan's graph that computes the same, if there is one; of several the next."""
        found = [n for n, g in enumerate(self.plan.graphs) if g.operators_hash == values.operators_hash]
        exact = [n for n in found if self.plan.graphs[n].shapes_hash == values.shapes_hash]
        times = Counter(self.carried)
        return min(exact or found, key=lambda n: (times[n], n), default=None)

    def refuse(self, why: str) -> None:
        """Say once that a graph is not divided as planned."""
        if not self.refused:
            warnings.warn(
                f"torch's own partitioner divides a graph of the compiled model, because {why}: its memory "
                "is not as the plan promises. Plan again for this model with trainfit plan --compile.",
                stacklevel=2,
            )
        self.refused.append(why)
        note_refusal(_identity())


_carried: WeakKeyDictionary[nn.Module, CarriedPlan] = WeakKeyDictionary()
_before: list[tuple[Any, Any]] = []
"""What divided graphs before there were plans: inductor's setting, and what aot_eager calls."""


def apply_compiled_plan(model: nn.Module, plan: CompiledPlan) -> nn.Module:
    """Let everything of `model` that torch.compile compiles run `plan`, and return it.

    It may be compiled already, or be compiled later; what was compiled so far is compiled again.
    """
    root = _inner(model)
    if root in _carried:
        raise PlanError("the model runs a plan already: call trainfit.remove(model) before applying another.")
    carried = CarriedPlan(plan)
    carried.watch = _say_if_not_compiled(root)
    _carried[root] = carried
    if not _before:
        _before.append((inductor_config.custom_partitioner_fn, _EAGER.min_cut_rematerialization_partition))
        inductor_config.custom_partitioner_fn = CarryingPartitioner()
        _EAGER.min_cut_rematerialization_partition = CarryingPartitioner()
    _forget_compiled_code()
    return model


def remove_compiled_plan(model: nn.Module) -> bool:
    """Take such a plan off a model; False if it has none."""
    carried = _carried.pop(_inner(model), None)
    if carried is None:
        return False
    carried.watch.remove()
    if not _carried and _before:
        inductor_config.custom_partitioner_fn, _EAGER.min_cut_rematerialization_partition = _before.pop()
    _forget_compiled_code()
    return True


def carried_plan(model: nn.Module) -> CarriedPlan | None:
    """Return the plan for torch.compile that a model runs, with what has become of it."""
    return _carried.get(_inner(model))


class CarryingPartitioner(CustomPartitionerFn):
    """Divides the graphs of planned models as their plans say."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Divided:
        """Return the graphs of forward and backward."""
        backend = "inductor" if kwargs.get("compiler") == "inductor" else "aot_eager"
        owner, known = _owner()
        # Where no parameter says whose graph it is, what it computes has to.
        candidates = [owner] if owner is not None else [] if known else list(_carried.values())
        if not any(carried.plan.backend == backend for carried in candidates):
            if owner is not None:
                owner.refuse(f"it is compiled by {backend}, and the plan was made for {owner.plan.backend}")
            return _as_before(backend, gm, joint_inputs, kwargs)
        try:
            graph = _PlannedGraph(gm, backend=backend, device=_device(), **kwargs)
            for carried in candidates:
                number = carried.choice_for(graph.values)
                if number is not None:
                    divided = graph.divided(carried.plan.graphs[number])
                    carried.carried.append(number)
                    return divided
        except CannotPlan as why:
            if owner is not None:
                owner.refuse(str(why))
            return _as_before(backend, gm, joint_inputs, kwargs)
        if owner is not None:
            owner.refuse(
                f"it computes something else ({len(graph.values.operators)} operators) than the graphs of "
                f"the plan ({', '.join(str(g.operators) for g in owner.plan.graphs)} operators)"
            )
        return _as_before(backend, gm, joint_inputs, kwargs)

    def uuid(self) -> Any:
        """Identify the decisions for torch's caches: our code and the plans that are carried out.

        Code of a model that was warned about is not found again: who uses it is to hear of it each time.
        """
        identity = _identity()
        return (*identity, os.urandom(16).hex()) if was_refused(identity) else identity


def _identity() -> tuple[str, str]:
    plans = sorted(json.dumps(asdict(carried.plan), sort_keys=True) for carried in _carried.values())
    return code_hash(), hashlib.sha256("\n".join(plans).encode()).hexdigest()


class _Unpriced(NodeCosts):
    """Knows what kernels need inside; what they take was decided when the plan was made."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def seconds(self, node: Any) -> float:
        return 0.0


class _PlannedGraph:
    """A joint graph that is about to be divided as a plan says."""

    def __init__(
        self,
        gm: GraphModule,
        *,
        backend: str,
        device: Device,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> None:
        self._module = prepared(gm, num_fwd_outputs)
        self._outputs = num_fwd_outputs
        self._static = static_lifetime_input_indices or ()
        self._backend = backend
        fuses = backend == "inductor"
        self._problem, self._nodes = read_joint_graph(
            self._module, num_fwd_outputs, _Unpriced(device), fuses=fuses
        )
        self.values = named_values(self._problem, self._nodes)

    def divided(self, choice: GraphChoice) -> Divided:
        """Divide the graph; raises `CannotPlan` if that is not possible."""
        partition = bound_partition(self._problem, self.values, choice)
        if partition.kept_bytes > choice.kept_bytes and self.values.shapes_hash != choice.shapes_hash:
            warnings.warn(
                "the compiled model is called with larger inputs than its plan was made for: the plan is "
                "carried out, but the peak that it promises does not hold.",
                stacklevel=2,
            )
            note_refusal(_identity())
        forward, backward = split(
            self._module,
            partition,
            self._problem,
            self._nodes,
            forward_outputs=self._outputs,
            static_inputs=self._static,
        )
        if self._backend == "aot_eager":
            backward, _ = with_better_order(backward, problem_workspaces(self._problem, self._nodes))
        return forward, backward


def bound_partition(problem: RecomputeProblem, values: GraphValues, choice: GraphChoice) -> Partition:
    """Return the partition of a graph that keeps what a plan names; raises `CannotPlan` if it lacks some."""
    missing = [name for name in choice.kept if name not in values.numbers]
    if missing:
        first = missing[0]
        raise CannotPlan(f"it has no {first.operator} number {first.number} in {first.module or 'the model'}")
    chosen = {values.numbers[name] for name in choice.kept}
    # What cannot run again and has no name is kept where it is needed: sizes, and states of random numbers.
    chosen |= {
        number
        for number, node in enumerate(problem.nodes)
        if node.role is Role.FORWARD and node.keepable and (number not in values.names or not node.repeatable)
    }
    partition = partition_of(problem, chosen)
    if partition is None:
        raise CannotPlan("backward needs something that the plan neither keeps nor can compute again")
    return partition


def _as_before(backend: str, gm: GraphModule, joint_inputs: Sequence[object], kwargs: Any) -> Divided:
    """Divide a graph as if there were no plans."""
    inductors, eagers = _before[0] if _before else (None, min_cut_rematerialization_partition)
    before = inductors if backend == "inductor" else eagers
    divided: Divided = (before or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
    return divided


def _owner() -> tuple[CarriedPlan | None, bool]:
    """Return the plan of the model whose parameters the graph takes that is compiled now, if it has one.

    And whether it is known: a graph that takes no parameters at all may be anybody's.
    """
    translator: Any = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return None, False
    given = [argument.example for argument in translator.output.graphargs]
    numbers = set(map(id, given))
    for model, carried in _carried.items():
        if any(id(tensor) in numbers for tensor in (*model.parameters(), *model.buffers())):
            return carried, True
    return None, any(isinstance(tensor, nn.Parameter) for tensor in given)


def _device() -> Device:
    return find_device(next((device_of(model) for model in _carried), "cpu"))


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside of what torch.compile and DistributedDataParallel put around it."""
    inside: Any = model
    while True:
        wrapped = getattr(inside, "_orig_mod", None)
        if wrapped is None and isinstance(inside, nn.parallel.DistributedDataParallel):
            wrapped = inside.module
        if not isinstance(wrapped, nn.Module):
            found: nn.Module = inside
            return found
        inside = wrapped


def _forget_compiled_code() -> None:
    """Let everything be compiled again: code that is there was divided by other rules."""
    if compilations():
        torch._dynamo.reset()


def _say_if_not_compiled(model: nn.Module) -> Any:
    """Warn when the model runs without being compiled: then the plan does nothing. Return the hook."""

    def check(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        handle.remove()
        compiled = any(part._compiled_call_impl is not None for part in module.modules())
        if module in _carried and not compiled and torch.is_grad_enabled():
            warnings.warn(
                "the model runs without torch.compile, which is what carries its plan out: its memory is not "
                "as the plan promises. Write model = torch.compile(model).",
                stacklevel=2,
            )

    handle = model.register_forward_pre_hook(check)
    return handle
