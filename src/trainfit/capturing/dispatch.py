"""The dispatch mode: every operator of the step passes here, is recorded, and returns hollow tensors.

It sits below autograd, so autograd, views, version counters and hooks are torch's own. An operator is not
run, except where its inputs are small and known (see `values.py`): then it runs for real, so that questions
about values get the answer that a real run would give.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.capturing import handlers, sparse
from trainfit.capturing.autograd import called_by_engine
from trainfit.capturing.engine import as_the_engine_would, sums_masked_gradient
from trainfit.capturing.hollow import tensor_over
from trainfit.capturing.hollow_results import NewStorages, fit_out, made, storage_of_out
from trainfit.capturing.known_masks import constant_summed, makes_floats, note_constant
from trainfit.capturing.ledger import OUTSIDE, LiveStorage
from trainfit.capturing.metadata import (
    Call,
    Key,
    MetadataOracle,
    NewTensor,
    Output,
    call_key,
    describe_call,
    differs,
)
from trainfit.capturing.mixing import goes_over_link, note_mixed
from trainfit.capturing.own_kernels import OWN_KERNELS
from trainfit.capturing.plain_tensors import is_plain
from trainfit.capturing.random_stream import RandomStream
from trainfit.capturing.recorder import Recorder
from trainfit.capturing.replacing import while_set
from trainfit.capturing.schemas import Operator, aten, describe
from trainfit.capturing.values import ASSUMED_RESULTS, Values, assume_result, decide, script_line
from trainfit.capturing.waiting import note_wait
from trainfit.errors import CaptureError
from trainfit.operators.value_use import SHAPED_LIKE

if TYPE_CHECKING:
    from trainfit.capturing.retarget.streams import Streams

_REFUSES_HALF = ("not implemented for 'Half'", "not implemented for 'BFloat16'")


class CaptureMode(TorchDispatchMode):
    """Records operators and gives back plain tensors without data."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below in two more frames, on every operator call.
        return False

    def __init__(self, recorder: Recorder, values: Values, oracle: MetadataOracle, device: str) -> None:
        """Share the recorder and value rules of one session, and what is known of operators of `device`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = recorder.ledger
        self.recorder = recorder
        self.values = values
        self.oracle = oracle
        self.random = RandomStream()
        self.for_gpu = device != "cpu"
        self.measures_workspaces = not self.for_gpu
        """Whether the kernels of this machine are those of the trace."""
        self.in_torchs_formula = False
        self.handlers = handlers.HANDLERS
        self.streams: Streams | None = None
        """The streams of the GPU, if it is for one."""
        self.of_cluster = False
        """Whether the step is one of several processes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one operator call; `func` is an OpOverload."""
        if types and not all(map(is_plain, types)):
            if not self.of_cluster and any(kind.__name__ == "DTensor" for kind in types):
                raise CaptureError(
                    f"{script_line()} uses distributed tensors (FSDP2, tensor parallelism): say how many "
                    "processes there are, with --world-size N or in Python with cluster=trainfit.Cluster(N)."
                )
            # A tensor subclass (nested, distributed): it unwraps itself, and its parts come back here.
            # Where autograd saves tensors it detaches them for our hooks, which a real run does not have.
            self.recorder.wrapped += func is not aten.detach.default
            return NotImplemented
        # Without the function mode that changes what user code sees (`retarget/device.py`).
        with torch._C.DisableTorchFunction(), self.ledger.lock:
            result = self._handle(func, args, kwargs or {})
            if self.for_gpu:
                note_wait(self, func, args, kwargs or {})
            return result

    def _handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = describe(func)
        if operator.invisible:
            return func(*args, **kwargs)
        if sparse.is_sparse_call(func, args):
            return sparse.handle(self, func, args, kwargs)
        if self.recorder.in_engine and (self.in_torchs_formula or called_by_engine(depth=3)):
            if func is aten.where.self and sums_masked_gradient(self.recorder):
                return handlers.masked_select(self, aten.masked_select.default, (args[1], args[0]), {})
            func = as_the_engine_would(self, func, args, kwargs)
        handler = self.handlers.get(func)
        if handler is not None:
            result = handler(self, func, args, kwargs)
            if result is not handlers.NOT_HANDLED:
                return result
        if operator.composite and func not in OWN_KERNELS:
            # Before views: `contiguous`, `reshape` and `to` say that they are one, and may copy.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if operator.is_view:
            return self.view(func, args, kwargs)
        return self.compute(func, args, kwargs)

    def view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a view for real: it touches metadata only, and shares storage as it should."""
        key, tensors = call_key(func, args, kwargs)
        if tensors and (tensors[0].is_meta or tensors[0]._is_zerotensor()):
            return func(*args, **kwargs)  # neither has memory
        call = self.oracle.without_results(describe(func), key)
        lives = [self.live(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        self.recorder.record(call, lives, (), ())
        return result

    def compute(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        kernel: Callable[..., Any] | None = None,
        shape_args: tuple[Any, ...] | None = None,
    ) -> Any:
        """Return the outputs of an operator, run for real if all is known, else hollow.

        `kernel` and `shape_args` replace what determines the outputs' metadata, where it depends on values.
        """
        key, tensors = call_key(func, args, kwargs)
        if _on_meta_device(func, tensors, kwargs):
            return func(*args, **kwargs)
        lives = [self.live(tensor) for tensor in tensors if not tensor.is_meta]
        if lives and self.ledger.on_host is None and all(live.on_host for live in lives):
            # What is computed from the host's tensors alone is computed on the host.
            with while_set(self.ledger, "on_host", True):
                return self.compute(func, args, kwargs, kernel=kernel, shape_args=shape_args)
        if self.ledger.host_by_default and any(live.on_host for live in lives):
            note_mixed(self, func, tensors, lives)
        if shape_args is not None:
            # The same call with another result; what it was called with stays as it is.
            key = ((func, call_key(func, shape_args, {})[0]), *key[1:])
        asked = args if shape_args is None else shape_args
        over_link = self.for_gpu and goes_over_link(func, lives, self.ledger.on_host)
        if over_link:
            # The same call between two places is another row of the trace's table.
            key = ((key[0], "link"), *key[1:])
        call = self.oracle.look_up(key) or self.oracle.ask(func, key, asked, kwargs, kernel)
        call.over_link = over_link
        constant = constant_summed(call, args, lives)
        if (
            call.operator.runs_on_cpu
            and not call.unlike_cpu
            and (constant is not None or self._inputs_known(call, lives))
            and self.small_outputs(call, tensors)
        ):
            if constant is not None:
                args = (constant, *args[1:])
            # Not if it would change the user's own tensors, made before the capture.
            if all(live.producer != OUTSIDE for live in self._written(call.operator, args, kwargs)):
                return self.run_real(func, call, key, args, kwargs, tensors, lives)
        return self.hollow(func, call, args, kwargs, tensors, lives)

    def live(self, tensor: torch.Tensor) -> LiveStorage:
        """Return the ledger's entry for a tensor, adding what torch made without an operator call."""
        live = self.ledger.find(tensor)
        if live is None:
            known = self.values.worth_knowing(tensor.dtype, tensor.numel())
            # In backward such a storage is where the gradients are; a step may have loaded its own anywhere.
            without_device = not self.recorder.in_engine
            live = self.ledger.register(tensor, OUTSIDE, known=known, without_device=without_device)
        return live

    def run_real(
        self,
        func: OpOverload,
        call: Call | None,
        key: Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        lives: list[LiveStorage],
    ) -> Any:
        """Run an operator whose inputs have real values, and keep the values of what it makes."""
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if call is None or self.measures_workspaces or not str(error).endswith(_REFUSES_HALF):
                raise
            # The call is for a GPU, which has kernels in 16 bits that the CPU does not have.
            call.unlike_cpu = True
        if call is None:
            call = describe_call(func, key, tensors, result)
        elif not self.measures_workspaces:
            call.unlike_cpu = call.unlike_cpu or differs(call.outputs, (result,) if call.single else result)
        if call.unlike_cpu:
            return self.hollow(func, call, args, kwargs, tensors, lives)
        read = () if call.operator.made_like else lives
        assumption = next((live.assumption for live in read if live.assumption), None)
        undecided = assumption is not None and any(live.undecided for live in lives)
        if undecided and isinstance(result, torch.Tensor):
            decide(call.operator.name, result)
        written = self._written(call.operator, args, kwargs)
        for live in written:
            if not call.operator.overwrites_first:
                live.known = True
                live.assumption = assumption
            else:
                live.assumption = assumption if live.covered_by(tensors[0]) else assumption or live.assumption
                live.fill(tensors[0])
        created: list[LiveStorage] = []
        wrapped = self._adopt(result, call.operator, created)
        for live in created:
            live.assumption = assumption
            live.undecided = undecided
        self.recorder.record(call, lives, written, created)
        return wrapped

    def adopted(self, call: Call, values: Any, lives: list[LiveStorage]) -> Any:
        """Record an operator whose results are known, and return them."""
        created: list[LiveStorage] = []
        result = self._adopt(values, call.operator, created)
        assumption = next((live.assumption for live in lives if live.assumption), None)
        for live in created:
            live.assumption = assumption
        self.recorder.record(call, lives, (), created)
        return result

    def _adopt(self, value: Any, operator: Operator, created: list[LiveStorage]) -> Any:
        """Put the tensors that a real run of an operator made under the ledger's control."""
        if isinstance(value, torch.Tensor):
            if value._is_zerotensor() or self.ledger.find(value) is not None:
                return value
            live, storage = self.ledger.adopt(value, operator.name, known=not operator.uninitialised)
            created.append(live)
            return tensor_over(storage, value.dtype, value.shape, value.stride(), int(value.storage_offset()))
        if isinstance(value, list | tuple):
            return type(value)([self._adopt(item, operator, created) for item in value])
        return value

    def hollow(
        self,
        func: OpOverload,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        lives: list[LiveStorage],
    ) -> Any:
        """Record an operator that is not run, and return tensors without memory."""
        operator = call.operator
        written = self._written(operator, args, kwargs)
        for live in written:
            live.forget()
        new: NewStorages = {}
        replaced = [storage_of_out(value) for value in kwargs.values()]  # alive until it is recorded
        results: list[Any] = []
        for output, argument in zip(call.outputs, operator.returned):
            if argument is None:
                results.append(made(self, output, operator, lives, new))
            else:
                given = args[argument] if isinstance(argument, int) else kwargs[argument]
                fit_out(self, given, output, operator, new)
                results.append(given)
        self.recorder.record(call, lives, written, [live for live, _ in new.values()])
        del replaced
        note_constant(call, args, lives, [live for live, _ in new.values()])
        if operator.random:
            self.random.advance(func, args, kwargs, results)
        if operator.name in ASSUMED_RESULTS:
            live = self.live(results[ASSUMED_RESULTS[operator.name][0]])
            if live.backing is not None:
                assume_result(operator.name, tensors, results, live)
        if not results:
            return None
        return results[0] if call.single else tuple(results)

    def _written(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[LiveStorage]:
        return [self.live(tensor) for tensor in operator.written(args, kwargs)]

    def _inputs_known(self, call: Call, lives: list[LiveStorage]) -> bool:
        operator = call.operator
        if operator.made_like and not makes_floats(call):
            return True
        if operator.overwrites_first and lives and lives[0].backing is not None:
            lives = lives[1:]  # it has memory that can be written to
        return all(live.known for live in lives)

    def small_outputs(self, call: Call, inputs: list[torch.Tensor]) -> bool:
        """Whether the results of a call are small enough to be computed for real."""
        sized = [tensor for tensor in inputs if tensor.dim()]
        of_integers = bool(sized) and not any(tensor.is_floating_point() for tensor in sized)
        return all(self._small(output, of_integers) for output in call.outputs)

    def _small(self, output: Output | list[Output], of_integers: bool) -> bool:
        if isinstance(output, list):
            return all(self._small(item, of_integers) for item in output)
        return not isinstance(output, NewTensor) or self.values.worth_knowing(
            output.dtype, output.size.numel(), of_integers=of_integers
        )

    def torchs_own_formula(self) -> AbstractContextManager[None]:
        """Treat the operators of a formula that capture calls as if autograd's engine had called it."""
        return while_set(self, "in_torchs_formula", True)


def _on_meta_device(func: OpOverload, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    # A tensor like one without memory may have some: `model.to_empty(device=...)`.
    given_memory = device is not None and str(func) in SHAPED_LIKE
    return not given_memory and any(tensor.is_meta for tensor in tensors)
