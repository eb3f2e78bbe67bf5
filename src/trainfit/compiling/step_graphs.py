"""The joint graphs of a step that is compiled, without running it: on tensors without memory.

The step is built as a capture builds it, on hollow tensors, and then runs for as long as its model is called
before backward, with Dynamo and AOTAutograd as they are. Compiled graphs are not run: their results are
hollow tensors, too. What is compiled is what the step compiles itself; if that is nothing, its whole model.
What Python does between graphs runs for real.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from trainfit.basics.doing import doing
from trainfit.basics.user_errors import raise_as_user_error
from trainfit.capturing.hollow import hollow_storage, tensor_over
from trainfit.capturing.random_stream import seeded
from trainfit.capturing.session import Session
from trainfit.compiling.graph_planner import Backend, GraphPlanner
from trainfit.compiling.graph_probe import as_divided, tracing_options
from trainfit.compiling.kernel_memory import copied
from trainfit.compiling.node_costs import NodeCosts, hint
from trainfit.compiling.split_graphs import as_while_traced
from trainfit.errors import StepError, TrainfitError
from trainfit.steps.step import Step

Build = Callable[[], Step]
Divided = tuple[GraphModule, GraphModule]


@dataclass(frozen=True)
class SeenGraph:
    """One joint graph as its backend's partitioner gets it."""

    joint: GraphModule
    joint_inputs: Any
    arguments: dict[str, Any]

    def planner(self, costs: NodeCosts, backend: Backend) -> GraphPlanner:
        """Return what plans it; raises `CannotPlan` where it has something that is not planned."""
        return GraphPlanner(
            copied(self.joint),
            forward_outputs=self.arguments["num_fwd_outputs"],
            costs=costs,
            backend=backend,
            static_inputs=self.arguments.get("static_lifetime_input_indices") or (),
        )

    def as_torch_divides_it(self) -> Divided:
        """Return forward and backward of torch's own partitioner."""
        joint = copied(self.joint)
        with as_while_traced(joint):
            return min_cut_rematerialization_partition(joint, self.joint_inputs, **self.arguments)


@dataclass(frozen=True)
class GraphCall:
    """One call of a compiled graph in a step."""

    graph: int
    module: str
    """The compiled module that called it, by its name in the step's model; empty for the model itself."""
    number: int
    """Which of that module's calls it was, counted from 0."""


@dataclass
class StepGraphs:
    """The graphs of a step, in the order of compiling, and their calls before backward."""

    graphs: list[SeenGraph] = field(default_factory=list)
    calls: list[GraphCall] = field(default_factory=list)


class _Enough(BaseException):
    """Ends the step when its model was called often enough; not an Exception, so that nobody handles it."""


def step_graphs(build: Build, *, backend: Backend, model_calls: int = 1) -> StepGraphs:
    """Return the graphs of the step that `build` returns, which calls its model so often before backward."""
    doing("building the step for the compiler")
    with seeded(), Session("cpu").active():
        try:
            step = build()
        except Exception as error:
            raise_as_user_error(error, "building the step")
    if not isinstance(step, Step):
        raise StepError(f"the target must return a trainfit.Step, got {type(step).__name__}.")
    recorder = _Recorder(backend)
    recorder.put_onto(step.model, model_calls)
    doing("tracing its graphs as torch.compile does")
    torch._dynamo.reset()
    try:
        with seeded(), warnings.catch_warnings(action="ignore"):
            step.run()
    except _Enough:
        pass
    except TrainfitError:
        raise
    except Exception as error:
        raise_as_user_error(error, "tracing the compiled step")
    finally:
        torch._dynamo.reset()
    if not recorder.found.calls:
        raise StepError(
            "nothing that torch.compile makes of the step has a backward: the step does not call its model, "
            "or Dynamo leaves it to eager PyTorch (TORCH_LOGS=graph_breaks says why)."
        )
    return recorder.found


class _Recorder:
    """A backend of torch.compile that notes graphs and calls, and computes nothing."""

    def __init__(self, backend: Backend) -> None:
        self.found = StepGraphs()
        self._backend: Backend = backend
        self._now = ("", 0)
        """The compiled module that runs, and which of its calls it is."""

    def put_onto(self, model: nn.Module, model_calls: int) -> None:
        """Compile with this backend what the step compiles, else the model; and end after so many calls."""
        compiled = {name: part for name, part in model.named_modules() if is_compiled(part)}
        for name, part in (compiled or {"": model}).items():
            self._compile(name, part)
        left = model_calls

        def count(*_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise _Enough

        outermost = model._compiled_call_impl
        if outermost is None:
            model.register_forward_hook(count)
            return

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = outermost(*args, **kwargs)
            count()
            return result

        model._compiled_call_impl = counted

    def _compile(self, name: str, part: nn.Module) -> None:
        inner: Any = part
        if isinstance(part, OptimizedModule):
            inner = part._orig_mod
        run: Any = compiled_call(inner, self)
        calls = 0

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            before, self._now = self._now, (name, calls)
            calls += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._now = before

        if inner is not part:
            part.forward = called
        else:
            part._compiled_call_impl = called

    def __call__(self, gm: GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        before = len(self.found.graphs)
        # Both of torch's backends ask for it.
        options = {**tracing_options(self._backend), "keep_inference_input_mutations": True}
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=_hollow_results,
            bw_compiler=_hollow_results,
            partition_fn=self._divide,
            **options,
        )(gm, example_inputs)
        if len(self.found.graphs) == before:
            return compiled  # nothing in it has a gradient

        def counted(*args: Any) -> Any:
            self.found.calls.append(GraphCall(before, *self._now))
            return compiled(*args)

        return counted

    def _divide(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Divided:
        gm = as_divided(gm, self._backend)
        self.found.graphs.append(SeenGraph(copied(gm), joint_inputs, kwargs))
        static = kwargs.get("static_lifetime_input_indices")
        return default_partition(
            gm,
            joint_inputs,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_lifetime_input_indices=static,
        )


def compiled_call(module: nn.Module, backend: Any) -> Any:
    """Return what calls a module compiled, as torch.compile of the module does.

    Dynamo does not compile functions of torch's own, such as that of a `Sequential`, unless they are wrapped.
    """
    call: Any = module._call_impl
    if trace_rules.check(module.forward):
        call = external_utils.wrap_inline(call)
    return torch.compile(call, backend=backend)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs compiled when it is called."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _hollow_results(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Compile a graph to a function that returns tensors of the right sizes without memory."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    results = tree_leaves(output.args)
    place = {node: number for number, node in enumerate(gm.graph.find_nodes(op="placeholder"))}

    def result(leaf: Any, given: list[Any]) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        if leaf in place:
            return given[place[leaf]]
        value = leaf.meta["val"]
        if not isinstance(value, torch.Tensor):
            return hint(value)
        size, stride = [hint(n) for n in value.shape], [hint(n) for n in value.stride()]
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if 0 not in size else 0
        return tensor_over(hollow_storage(elements * value.itemsize), value.dtype, size, stride, 0)

    def run(given: list[Any]) -> list[Any]:
        found = [result(leaf, given) for leaf in results]
        given.clear()
        return found

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
