"""A capture session: builds the step on hollow tensors, runs it until it is steady, records one step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trainfit.capturing import patches
from trainfit.capturing.assemble import assemble, signature_of
from trainfit.capturing.autograd import NodeHooks, SavedTensorHooks
from trainfit.capturing.composites import ordinary_paths
from trainfit.capturing.dispatch import CaptureMode
from trainfit.capturing.ledger import Ledger
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.random_stream import RandomState, seeded
from trainfit.capturing.recorder import Recorder
from trainfit.capturing.retarget import retargeted_to_cuda
from trainfit.capturing.values import Values, user_line_of
from trainfit.errors import CaptureError, StepError
from trainfit.profiler import no_cycle_collection
from trainfit.step import Step
from trainfit.trace import Trace
from trainfit.user_errors import raise_as_user_error
from trainfit.workspace import with_gpu_workspaces, with_measured_workspaces
from trainfit.workspace.measured import measure_operators


CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator hands out memory in multiples of this."""
_MOST_CORRECTIONS = 16
Build = Callable[[], Step]
Progress = Callable[[str], None]


class Session:
    """Everything one capture shares: ledger, recorder, value rules, hooks and the dispatch mode."""

    def __init__(self, device: str = "cpu") -> None:
        """Prepare a session; nothing is patched until `active` is entered."""
        self.device = device
        self.ledger = Ledger(granularity=CUDA_BLOCK_BYTES if device == "cuda" else 1)
        self.recorder = Recorder(self.ledger)
        self.modules = ModuleTable()
        self.recorder.module_index = self.modules.index
        self.values = Values(lambda: self.modules.name(self.recorder.current_module()))
        self.mode = CaptureMode(self.ledger, self.recorder, self.values)
        self.saved_tensor_hooks = SavedTensorHooks(self.ledger)
        self.node_hooks = NodeHooks(self.recorder)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run ordinary PyTorch code on hollow tensors."""
        retargeted = retargeted_to_cuda() if self.device == "cuda" else contextlib.nullcontext()
        with (
            no_cycle_collection(),
            patches.installed(self),
            self.saved_tensor_hooks.install(),
            ordinary_paths(),
            self.mode,
        ):
            self._calibrate()
            with retargeted:
                yield

    def _calibrate(self) -> None:
        """Learn the reference counts of a gradient buffer that nothing shares, as the mode sees them."""
        seen: list[tuple[int, int]] = []

        def observe(buffered: torch.Tensor) -> bool:
            storage = buffered.untyped_storage()
            seen.append((buffered._use_count(), torch._C._storage_Use_Count(storage._cdata)))
            return False

        self.mode.engine_would_add_in_place = observe  # type: ignore[method-assign]
        try:
            leaf = torch.ones(8, 8, requires_grad=True)
            hub = leaf * 2.0
            ((hub * 3.0) + hub.exp()).sum().backward()
        finally:
            del self.mode.engine_would_add_in_place  # type: ignore[method-assign]
        assert len(seen) == 1, "the calibration graph must make the engine add exactly once"
        self.recorder.unshared_counts = seen[0]
        self.recorder.restart()

    def correct_outputs(self) -> bool:
        """Run each distinct operator of the recording alone, and take over what it really returned.

        Says whether anything was different from the metadata that the recording is based on.
        """
        calls = {id(row.call): row.call for row in self.recorder.rows if not row.call.operator.is_view}
        with torch.utils._python_dispatch._disable_current_modes():
            measured = measure_operators([signature_of(call) for call in calls.values()])
        changed = False
        for call, found in zip(calls.values(), measured):
            if found is not None and self.mode.oracle.correct(call, found.results):
                changed = True
        return changed

    def record_step(self, step: Step) -> Any:
        """Record one run of the step; what it returns is the caller's to keep until the end."""
        gc.collect()
        self.recorder.restart()
        return step.run()


def capture(
    build: Build, *, device: str = "cpu", target: str = "step", progress: Progress | None = None
) -> Trace:
    """Build the step on hollow tensors, run it until it is steady, and return the trace of one more run."""
    report = progress or (lambda stage: None)
    session = Session(device)
    with seeded(), session.active():
        report("building the model")
        step = _user_code(build, "building the step")
        _refuse_unusable(step)
        report("first step")
        _user_code(step.run, "the step")
        if not session.recorder.backward_seen:
            raise StepError(
                "the step runs no backward: run() must call loss.backward() (or torch.autograd.grad)."
            )
        report("recording")
        random_state = RandomState()
        result = _user_code(lambda: session.record_step(step), "the step")
        if device == "cpu":
            report("measuring workspaces")
            for _ in range(_MOST_CORRECTIONS):
                if not session.correct_outputs():
                    break
                # What follows a corrected result may itself come out differently: record it again.
                del result
                random_state.restore()
                result = _user_code(lambda: session.record_step(step), "the step")
        trace = assemble(session, step, target, device)
        del result
    trace = with_measured_workspaces(trace) if device == "cpu" else with_gpu_workspaces(trace)
    trace.check()
    return trace


def _user_code(function: Callable[[], Any], doing: str) -> Any:
    try:
        return function()
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CaptureError(
            f"{user_line_of(error)} asks for values that only a real run has ({error}); "
            "capture cannot follow it."
        ) from error
    except (Exception, SystemExit) as error:
        raise_as_user_error(error, doing)


def _refuse_unusable(step: Any) -> None:
    """Refuse what cannot be captured, before it runs."""
    if not isinstance(step, Step):
        raise StepError(f"the function must return a trainfit.Step, but it returned a {type(step).__name__}.")
    parameters = list(step.model.parameters())
    if not parameters:
        raise StepError(f"the model ({type(step.model).__name__}) has no parameters: there is nothing to train.")
    if any(parameter.is_meta for parameter in parameters):
        raise StepError(
            "the model is on the meta device; build it on an ordinary device: capture allocates nothing anyway."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise StepError("no parameter of the model requires a gradient: there is nothing to train.")
