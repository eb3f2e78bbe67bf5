"""What a compiled step needs and takes, predicted: as torch divides its graphs, or within a budget.

The graphs are those of `step_graphs.py`. Divided, they become kernels, and those become a trace
(`compiled_trace.py`), which is replayed and priced like any other. A budget is for the whole step: what is
above it because of what is not compiled is taken from what the graphs may use, and they are planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.basics.doing import doing
from trainfit.compiling.compiled_trace import CompiledTrace, compiled_trace
from trainfit.compiling.graph_planner import Backend, DividedGraph, GraphPlanner, workspaces_by_name
from trainfit.compiling.graph_runs import graph_run
from trainfit.compiling.joint_problem import CannotPlan
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.compiling.step_graphs import StepGraphs
from trainfit.compiling.step_shares import GraphUse, shared
from trainfit.compiling.value_names import named_values
from trainfit.costs.schedule import Schedule, Seconds, issue_seconds, schedule
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.plans.compiled_plan import CompiledPlan, GraphChoice
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import Trace

_TRIALS = 3
"""How often the graphs are planned, each time with what was missing taken off."""


@dataclass(frozen=True)
class CompiledPrediction:
    """A compiled step on a device."""

    trace: Trace
    timeline: Timeline
    memory: StepMemory
    times: Schedule

    @property
    def memory_bytes(self) -> int:
        """The least memory with which it runs."""
        return self.memory.figures.smallest_memory_bytes


@dataclass(frozen=True)
class CompiledChoice:
    """A plan for a compiled step, and the step with it."""

    plan: CompiledPlan
    feasible: bool
    step: CompiledPrediction
    baseline: CompiledPrediction
    warnings: tuple[str, ...] = ()


class CompiledStep:
    """A step that is compiled, on a device."""

    def __init__(
        self,
        trace: Trace,
        graphs: StepGraphs,
        device: Device,
        price: Callable[[Trace], CostTable],
        *,
        backend: Backend = "inductor",
        allocator: AllocatorOptions | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        """Take the captured eager step, its joint graphs, and what prices traces."""
        self._trace, self._graphs, self._device, self._price = trace, graphs, device, price
        self._backend: Backend = backend
        self._allocator = allocator
        self._cuda_graphs = cuda_graphs and device.kind == "cuda"
        self._costs = NodeCosts(device)
        self.warnings: tuple[str, ...] = ()

    def as_torch_divides_it(self) -> CompiledPrediction:
        """Return the step with what torch's own partitioner keeps."""
        doing("dividing its graphs as torch does")
        return self._predicted([graph.as_torch_divides_it() for graph in self._graphs.graphs])

    def planned(self, budget_bytes: int, target: str) -> CompiledChoice:
        """Return the fastest plan that is found within a budget; the smallest if there is none."""
        baseline = self.as_torch_divides_it()
        doing("reading its graphs")
        planners = self._planners()
        limit = budget_bytes - self._standing_bytes()
        best: tuple[bool, float, list[DividedGraph | None], CompiledPrediction] | None = None
        for trial in range(_TRIALS):
            doing(f"solving for the fastest plan (trial {trial + 1})")
            divided, within = self._divided(planners, limit)
            step = self._predicted(
                [
                    graph.as_torch_divides_it() if found is None else (found.forward, found.backward)
                    for graph, found in zip(self._graphs.graphs, divided)
                ]
            )
            excess = step.memory_bytes - budget_bytes
            rank = (excess <= 0, -step.times.step_seconds if excess <= 0 else -step.memory_bytes)
            if best is None or rank > best[:2]:
                best = (*rank, divided, step)
            if excess <= 0 or not within:
                break
            limit -= excess
        assert best is not None, "there was a trial"
        feasible, _, divided, step = best
        plan = self._plan(target, budget_bytes, planners, divided, step, baseline)
        return CompiledChoice(plan, feasible, step, baseline, self.warnings)

    def _planners(self) -> list[GraphPlanner | None]:
        found: list[GraphPlanner | None] = []
        for graph in self._graphs.graphs:
            try:
                planner = graph.planner(self._costs, self._backend)
                found.append(planner)
            except CannotPlan as why:
                found.append(None)
                self.warnings += (f"torch's own partitioner divides a graph of the step, because {why}",)
        return found

    def _standing_bytes(self) -> int:
        """Return what is there when the model is called first: whatever is planned stays above that."""
        trace = self._trace
        begin = min(call.forward_start for call in trace.calls if call.module == trace.model)
        there = (number for number, s in enumerate(trace.storages) if s.start < begin and s.alive_at(begin))
        return sum(trace.occupied_at(number, begin) for number in there)

    def _divided(
        self, planners: Sequence[GraphPlanner | None], limit: int
    ) -> tuple[list[DividedGraph | None], bool]:
        """Return each graph within its limits, or as small as it gets; and whether all are within."""
        divided: list[DividedGraph | None] = []
        within = True
        for planner, own in zip(planners, self._limits(planners, limit)):
            found = None if planner is None else planner.fastest(own)
            if planner is not None and found is None:
                found, within = planner.smallest(), False
            divided.append(found)
        return divided, within

    def _limits(self, planners: Sequence[GraphPlanner | None], limit: int) -> list[GraphLimits]:
        """Return what each graph may use: all there is, or its share."""
        whole = [GraphLimits.same(limit)] * len(planners)
        known = [number for number, planner in enumerate(planners) if planner is not None]
        calls = [known.index(call.graph) for call in self._graphs.calls if call.graph in known]
        if len(calls) < 2:
            return whole
        uses = []
        for planner in planners:
            if planner is not None:
                planner.search.look_everywhere()
                uses.append(GraphUse(tuple(planner.search.trade_offs), planner.gradient_bytes()))
        shares = shared(uses, calls, limit)
        if shares is None:
            return [GraphLimits.same(0)] * len(planners)
        for number, own in zip(known, shares.limits):
            whole[number] = own
        return whole

    def _predicted(self, divided: Sequence[tuple[GraphModule, GraphModule]]) -> CompiledPrediction:
        runs = []
        for graph, (forward, backward) in zip(self._graphs.graphs, divided):
            runs.append(
                graph_run(
                    forward,
                    backward,
                    forward_outputs=graph.arguments["num_fwd_outputs"],
                    backend=self._backend,
                    workspaces=self._workspaces(forward, backward),
                )
            )
        made = compiled_trace(self._trace, runs, self._graphs.calls)
        table = self._price(made.trace)
        timeline = simulate(made.trace)
        times = schedule(made.trace, table, self._saved_on_the_host(made, table))
        return CompiledPrediction(
            made.trace, timeline, StepMemory(timeline, self._device, self._allocator), times
        )

    def _workspaces(self, *modules: GraphModule) -> dict[str, int]:
        nodes = [node for module in modules for node in module.graph.nodes]
        inside = self._costs.workspaces(nodes, fuses=self._backend == "inductor")
        return workspaces_by_name((inside.get(node, 0), node) for node in nodes)

    def _saved_on_the_host(self, made: CompiledTrace, table: CostTable) -> Seconds:
        """Return by how much less the host does for each op: compiled code has no autograd in it.

        A kernel that compiled code launches takes it about as long as autograd's engine takes for one of
        backward; CUDA graphs launch all kernels of a graph at once.
        """
        host = table.host
        issued = issue_seconds(made.trace, host)
        found = 0.0 * issued
        before = False
        for place, is_kernel in enumerate(made.kernels):
            if is_kernel and self._cuda_graphs:
                found[place] = (host.forward_op if not before else 0.0) - issued[place]
            elif is_kernel:
                found[place] = min(host.backward_op - issued[place], 0.0)
            before = is_kernel
        return found

    def _plan(
        self,
        target: str,
        budget_bytes: int,
        planners: Sequence[GraphPlanner | None],
        divided: Sequence[DividedGraph | None],
        step: CompiledPrediction,
        baseline: CompiledPrediction,
    ) -> CompiledPlan:
        numbers: dict[int, int] = {}
        choices: list[GraphChoice] = []
        for number, (planner, found) in enumerate(zip(planners, divided)):
            if planner is not None and found is not None:
                numbers[number] = len(choices)
                choices.append(choice_of(planner, found))
        return CompiledPlan(
            target=target,
            device=self._device.name,
            torch=torch.__version__,
            backend=self._backend,
            budget_bytes=budget_bytes,
            graphs=tuple(choices),
            calls=tuple(numbers[c.graph] for c in self._graphs.calls if c.graph in numbers),
            peak_bytes=step.timeline.peak_bytes,
            memory_bytes=step.memory_bytes,
            step_seconds=step.times.step_seconds,
            baseline_peak_bytes=baseline.timeline.peak_bytes,
            baseline_step_seconds=baseline.times.step_seconds,
            settings=self._trace.settings,
        )


def choice_of(planner: GraphPlanner, divided: DividedGraph) -> GraphChoice:
    """Return a division by the names of what it keeps."""
    values = named_values(planner.problem, planner.nodes)
    partition = divided.partition
    kept = [values.names[number] for number in partition.kept if number in values.names]
    return GraphChoice(
        operators_hash=values.operators_hash,
        shapes_hash=values.shapes_hash,
        operators=len(values.operators),
        kept=tuple(kept),
        kept_bytes=partition.kept_bytes,
        repeated=len(partition.repeated),
        recompute_seconds=partition.seconds,
        forward_peak_bytes=divided.forward_peak_bytes,
        backward_peak_bytes=divided.backward_peak_bytes,
    )
