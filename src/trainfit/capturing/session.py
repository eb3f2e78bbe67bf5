"""A capture session: builds the step on hollow tensors, runs it until it is steady, records one step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainfit.capturing import patches
from trainfit.capturing.assemble import assemble
from trainfit.capturing.autograd import NodeHooks, SavedTensorHooks
from trainfit.capturing.dispatch import CaptureMode
from trainfit.capturing.ledger import Ledger
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.recorder import Recorder
from trainfit.capturing.values import Values
from trainfit.profiler import no_cycle_collection
from trainfit.step import Step
from trainfit.trace import Trace
from trainfit.workspace import with_measured_workspaces


Build = Callable[[], Step]
Progress = Callable[[str], None]


class Session:
    """Everything one capture shares: ledger, recorder, value rules, hooks and the dispatch mode."""

    def __init__(self) -> None:
        """Prepare a session; nothing is patched until `active` is entered."""
        self.ledger = Ledger()
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
        with patches.installed(self), self.saved_tensor_hooks.install(), self.mode, no_cycle_collection():
            self._calibrate()
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
    session = Session()
    report("building the model")
    with session.active():
        step = build()
        report("first step")
        step.run()
        report("recording")
        result = session.record_step(step)
        trace = assemble(session, step, target, device)
        del result
    if device == "cpu":
        report("measuring workspaces")
        trace = with_measured_workspaces(trace)
    trace.check()
    return trace
