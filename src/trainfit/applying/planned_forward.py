"""The `forward` that takes the place of a planned module's own and runs the plan's regions."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainfit.applying.execution import execution
from trainfit.applying.plain_checkpoint import KnownCalls, PlainCheckpoint, circumstances_of
from trainfit.applying.planned_model import PlannedModel
from trainfit.applying.python_objects import LastAttributes
from trainfit.applying.region import PlannedCall, RegionCall, inside_checkpoint
from trainfit.applying.sharded_modules import has_distributed_weights
from trainfit.changes.hidden_forward import FORWARD, HiddenForward
from trainfit.plans.plan import NamedCall

Calls = dict[int, PlannedCall]
ROOT, STAGE, PART = ("root", "stage", "part")
"""What a module is to the model: the model itself, a part of one that is never called, anything else."""
_NOT_COMPILED = (
    "this model is compiled as a whole, has distributed tensors and runs the plan: torch cannot compile "
    "around the regions, so it runs without the compiler. Compile it block by block, as in block.compile()."
)


class PlannedForward(HiddenForward):
    """Takes the place of a module's `forward`: runs the calls that are regions under the plan."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        calls: Calls,
        planned_model: PlannedModel,
        part: str = PART,
        watched: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare the calls of one module.

        Beside the calls in `watched` results of other regions are copied to the host and back.
        """
        super().__init__(module)
        self._name = name
        self._calls = calls
        self._planned_model = planned_model
        self._part = part
        self._watched = watched
        # Not the root for its own sake: that would keep the compiler from blocks without regions.
        self._distributed = has_distributed_weights(module)
        self._eager = (part != ROOT or bool(calls)) and self._distributed
        self._known: defaultdict[int, KnownCalls] = defaultdict(KnownCalls)
        self._last_attributes = LastAttributes()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles know nothing yet of their calls."""
        return {**super().__getstate__(), "_known": defaultdict(KnownCalls)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.removed or execution.level:
            return self.__wrapped__(*args, **kwargs)
        if self._distributed and self._part == ROOT and torch.compiler.is_compiling():
            # The whole model is compiled: torch would go on compiling around the regions in it.
            return _whole_uncompiled()(self, args, kwargs)
        return _uncompiled()(self, args, kwargs) if self._eager else self.called(args, kwargs)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, and see to what its part in the model is."""
        if self._part == ROOT:
            with self._planned_model.root_runs():
                return self._run(args, kwargs)
        result = self._run(args, kwargs)
        if self._part == STAGE:
            self._tell_of_backward(result)
        return result

    def _tell_of_backward(self, result: Any) -> None:
        """Let calls be counted anew when autograd comes to a stage, also where no region is in it."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._planned_model.backward_begins)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._planned_model.count_call(self._name) if self._calls or self._watched else 0
        if number in self._watched:
            result = self._run_call(number, args, kwargs)
            self._free_copies(NamedCall(self._name, number), result)
            return result
        return self._run_call(number, args, kwargs)

    def _free_copies(self, call: NamedCall, result: Any) -> None:
        """What was copied beside a call that has ended needs no memory until the call's backward begins."""
        copies = self._planned_model.host_memory.ended(call)

        def fetch(_: torch.Tensor) -> None:
            for copy in copies:
                copy.fetch()

        for tensor in tree_leaves(result) if copies else ():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(fetch)

    def _run_call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.__wrapped__
        if inside_checkpoint():
            # It calls once more in backward and has to find the same then.
            number = 0
        planned = self._calls.get(number)
        if planned is None or execution.regions or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        module = self._module()
        assert module is not None
        self._planned_model.region_begins(module)
        circumstances = circumstances_of(args, kwargs) if planned.whole else None
        on_followed = None
        if circumstances is not None:
            known = self._known[number]
            expected = known.expected(circumstances)
            if expected is not None:
                plain = PlainCheckpoint(self._name, forward, expected, self._planned_model.step_ends)
                return plain.run(args, kwargs)
            on_followed = functools.partial(known.learn, circumstances)
        last = self._last_attributes
        call = RegionCall(self._name, module, forward, planned, self._planned_model, last, on_followed)
        return call.run(args, kwargs)


@functools.cache
def _uncompiled() -> Callable[[PlannedForward, tuple[Any, ...], dict[str, Any]], Any]:
    """Return what runs a planned module without the compiler, nor what is inside of it.

    A region interrupts the graph of a compiled module around it. Where distributed tensors cross that gap,
    autograd is handed plain ones, and fails: with tensor parallelism such a module runs as it is.
    """
    disabled: Any = torch.compiler.disable(PlannedForward.called)
    return disabled  # type: ignore[no-any-return]


@functools.cache
def _whole_uncompiled() -> Callable[[PlannedForward, tuple[Any, ...], dict[str, Any]], Any]:
    """Return what runs a whole model without the compiler, and says so once."""
    disabled: Any = torch.compiler.disable(_run_and_say)
    return disabled  # type: ignore[no-any-return]


def _run_and_say(planned: PlannedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    planned._planned_model.say_once(_NOT_COMPILED)
    return planned.called(args, kwargs)


def planned_forward(module: nn.Module) -> PlannedForward | None:
    """Return the module's planned forward, also where someone has wrapped it since (accelerate does)."""
    forward = vars(module).get(FORWARD)
    while forward is not None and not isinstance(forward, PlannedForward):
        forward = getattr(forward, "__wrapped__", None)
    return None if forward is None or forward.removed else forward
