"""A step's forward and backward as one FX graph, traced through AOTAutograd on tensors without memory.

The step runs on fake tensors until it calls `backward` on its loss; what has run by then is the function that
AOTAutograd differentiates. Parameters, buffers and the tensors that the model is called with are the graph's
inputs, the loss and all gradients its outputs. What the step does afterwards (the optimizer) is not part of
the graph.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from trainfit.basics.user_errors import raise_as_user_error
from trainfit.capturing.random_stream import seeded
from trainfit.capturing.session import Session
from trainfit.errors import CaptureError, StepError, TrainfitError
from trainfit.steps.step import Step

Build = Callable[[], Step]


def joint_graph(step: Step) -> GraphModule:
    """Return the forward and backward of a step as one graph, without running either.

    Called with the model's parameters, its buffers and the tensors that the step calls it with, it returns
    what the buffers become, the loss, and a gradient for each parameter that gets one.
    """
    quiet = warnings.catch_warnings(action="ignore")
    with FakeTensorMode(allow_non_fake_inputs=True), quiet, _stop_at_backward():
        forward = _first_run(step)
        try:
            with forward.only_what_gets_gradients():
                module, _ = aot_export_module(forward, (), trace_joint=True, output_loss_index=0)
        except TrainfitError:
            raise
        except Exception as error:
            raise CaptureError(_why(error)) from error
    assert isinstance(module, GraphModule)
    _begin_backward_with_a_constant(module)
    return module


def _begin_backward_with_a_constant(module: GraphModule) -> None:
    """Let backward begin with a one that does not wait for the loss, of which it needs the shape alone.

    As traced, backward begins with `ones_like(loss)`, and nothing of it could run before all of forward has.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.ones_like.default):
        value = node.meta["val"]
        if value.dim() == 0:
            with module.graph.inserting_before(node):
                one = module.graph.call_function(
                    torch.ops.aten.full.default,
                    ([], 1),
                    {"dtype": value.dtype, "device": value.device, "pin_memory": False},
                )
            one.meta = dict(node.meta)
            node.replace_all_uses_with(one)
            module.graph.erase_node(node)
    module.recompile()


def joint_graph_without_memory(build: Build) -> GraphModule:
    """Build a step without allocating its tensors, and return its joint graph.

    The graph can be looked at and ordered, but not run: what the step holds besides its model has no values.
    """
    with seeded(), Session("cpu").active():
        try:
            step = build()
        except Exception as error:
            raise_as_user_error(error, "building the step")
    if not isinstance(step, Step):
        raise StepError(f"the target must return a trainfit.Step, got {type(step).__name__}.")
    return joint_graph(step)


def _first_run(step: Step) -> _UntilBackward:
    try:
        return _UntilBackward(step)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(_why(error)) from error
    except Exception as error:
        raise_as_user_error(error, "the step")


class _UntilBackward(nn.Module):
    """The forward of a step as a module: what `run` computes until it asks for gradients.

    The tensors that the model is called with become buffers of `given`: AOTAutograd makes inputs of those,
    and follows what is computed from inputs even where it is changed in place.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model = step.model
        self.given = nn.Module()  # after the model, so that its buffers come last among the inputs
        self._run = step.run
        self._names: dict[int, str] = {}
        self._loss = self._until_backward(self._note)

    def forward(self) -> tuple[torch.Tensor]:
        return (self._until_backward(self._replace),)

    @contextlib.contextmanager
    def only_what_gets_gradients(self) -> Iterator[None]:
        """Freeze the parameters that the loss does not depend on: AOTAutograd wants a gradient of each."""
        used = _leaves(self._loss)
        idle = [p for p in self.model.parameters() if p.requires_grad and id(p) not in used]
        del self._loss
        for parameter in idle:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in idle:
                parameter.requires_grad_(True)

    def _until_backward(self, hook: Callable[..., Any]) -> torch.Tensor:
        """Return the loss, with a hook before every call of the model."""
        handle = self.model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            self._run()
        except _ReachedBackward as reached:
            return reached.loss
        finally:
            handle.remove()
        raise StepError("the step never calls backward() on a loss, so that it has no joint graph.")

    def _note(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in {*owned, *self._names}:
                self._names[id(leaf)] = f"input_{len(self._names)}"
                self.given.register_buffer(self._names[id(leaf)], leaf)

    def _replace(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        def replaced(leaf: Any) -> Any:
            return getattr(self.given, self._names[id(leaf)]) if id(leaf) in self._names else leaf

        return tree_map(replaced, (args, kwargs))


def _leaves(loss: torch.Tensor) -> set[int]:
    """Return the tensors that get a gradient when `backward` is called on the loss."""
    found: set[int] = set()
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [following for following, _ in node.next_functions]
    return found


class _ReachedBackward(BaseException):
    """Ends the step where it calls backward. Not an Exception, so that the step's own handlers let it by."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__()
        self.loss = loss


@contextlib.contextmanager
def _stop_at_backward() -> Iterator[None]:
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise _ReachedBackward(self)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def _why(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"the step cannot be traced into one graph: {first.strip()[:300]} "
        "(Shapes and branches that depend on values are the usual cause.) "
        "--graph eager orders the step as it runs without a compiler instead."
    )
