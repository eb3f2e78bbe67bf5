"""A capture session: builds the step on hollow tensors, runs it until it is steady, records one step."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trainfit.basics.doing import doing
from trainfit.capturing import patches, refusals
from trainfit.capturing.assemble import signature_of
from trainfit.capturing.autograd import SavedTensorHooks
from trainfit.capturing.categories import categories_now
from trainfit.capturing.compiler import eager_only
from trainfit.capturing.composites import ordinary_paths
from trainfit.capturing.counting import counted
from trainfit.capturing.disk.pretended import Disk
from trainfit.capturing.dispatch import CaptureMode
from trainfit.capturing.distributed.fake_groups import rank_of
from trainfit.capturing.distributed.rank_messages import Messages, NeedsRank, RankHasSpoken
from trainfit.capturing.explaining import user_code
from trainfit.capturing.interrupts import heard, interrupts_held
from trainfit.capturing.ledger import Ledger
from trainfit.capturing.left_as_found import FoundState
from trainfit.capturing.lent_tensors import LentState, lent
from trainfit.capturing.metadata import MetadataOracle
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.own_gpu import gpu_of
from trainfit.capturing.random_stream import RandomState, seeded
from trainfit.capturing.recorder import Recorder
from trainfit.capturing.replacing import while_set
from trainfit.capturing.retarget import retargeted_to
from trainfit.capturing.retarget.device import LooksLikeCuda
from trainfit.capturing.retarget.gpu import Gpu
from trainfit.capturing.retarget.libraries import libraries_on
from trainfit.capturing.steps import NotSettled, Runs
from trainfit.capturing.values import Values
from trainfit.devices.device_table import ANY_GPU, Device
from trainfit.errors import CaptureError, TrainfitError
from trainfit.steps.step import Step
from trainfit.traces.memory_model import memory_model
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import UNKNOWN_SETTINGS, Settings
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.workspace import with_measured_workspaces
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces
from trainfit.workspace.measured import QUICK, Limits, affordable, measure_operators
from trainfit.workspace.profiler import no_cycle_collection

_MOST_CORRECTIONS = 16
Build = Callable[[], Step]
Guard = Callable[[int], None]
"""Called with the most bytes that the step has had alive so far, before its operators are run for real."""


class Session:
    """Everything one capture shares: ledger, recorder, value rules, hooks and the dispatch mode."""

    def __init__(
        self,
        device: str | Device = "cpu",
        oracle: MetadataOracle | None = None,
        settings: Settings = UNKNOWN_SETTINGS,
        cluster: Cluster | None = None,
    ) -> None:
        """Prepare a session; nothing is patched until `active` is entered."""
        self.cluster = cluster
        self.device = device.kind if isinstance(device, Device) else device
        self.settings = settings
        self.ledger = Ledger(memory_model(self.device))
        self.gpu = Gpu(device if isinstance(device, Device) else ANY_GPU, self.ledger)
        self.recorder = Recorder(self.ledger)
        self.modules = ModuleTable()
        self.recorder.module_index = self.modules.index
        self.recorder.module_name = self.modules.name
        self.values = Values(lambda: self.modules.name(self.recorder.current_module()))
        self.mode = CaptureMode(
            self.recorder, self.values, oracle or MetadataOracle(self.device), self.device
        )
        self.saved_tensor_hooks = SavedTensorHooks(self.recorder, self.values)
        self.stepped: set[int] = set()
        """Ids of parameters of the optimizers that have stepped: the first of each group."""
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        """Those that have stepped, by id: the step's own, and what they wrap."""
        self.categories_at_start: dict[int, str] = {}
        self.messages = Messages()
        self.listener: int | None = None
        """The rank for which this one is run, if only for what it says."""
        self.waiting: tuple[int, ...] = ()
        """The ranks that wait, each for the next one, for what this one says."""
        self.lent: LentState | None = None
        """What the step of a running program refers to."""
        self.disk = Disk(self)
        self.before_operators: Guard = lambda needed_bytes: None
        self._entered = contextlib.ExitStack()

    def as_rank(self, rank: int) -> Session:
        """Return a session that runs the same step as another rank, until that has spoken to this one."""
        assert self.cluster is not None, "a step of one process has no other ranks"
        given = self.gpu.device if self.device == "cuda" else self.device
        other = Session(given, self.mode.oracle, self.settings, replace(self.cluster, rank=rank))
        other.values.know_everything = self.values.know_everything
        other.ledger.host_by_default = self.ledger.host_by_default
        other.messages, other.listener = self.messages, self.cluster.rank
        other.waiting = (*self.waiting, self.cluster.rank)
        return other

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run ordinary PyTorch code on hollow tensors."""
        on_gpu = self.device == "cuda"
        retargeted = retargeted_to(self.gpu, self.mode) if on_gpu else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            stack.enter_context(no_cycle_collection())
            stack.enter_context(libraries_on(self.device))
            stack.enter_context(patches.installed(self))
            stack.enter_context(self.saved_tensor_hooks.install())
            stack.enter_context(ordinary_paths(self.mode, self.device))
            stack.enter_context(self.mode)
            self._calibrate()
            stack.enter_context(retargeted)
            self._entered = stack
            yield

    @property
    def names_no_device(self) -> bool:
        """Whether a step for a GPU has put nothing there itself, and is meant to be there as a whole."""
        return self.ledger.host_by_default and not self.gpu.named

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self.stepped.update(id(p) for group in optimizer.param_groups for p in group["params"][:1])
        self.optimizers[id(optimizer)] = optimizer

    def leave(self) -> None:
        """Put everything back for good, in a process that the step has forked."""
        self._entered.close()

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Capture what another thread of the step computes as well."""
        looks = LooksLikeCuda(self.mode, self.gpu) if self.device == "cuda" else contextlib.nullcontext()
        with self.saved_tensor_hooks.install(), self.mode, looks:
            yield

    def _calibrate(self) -> None:
        """Let the mode see one gradient buffer that nothing shares, to learn its reference counts."""
        leaf = torch.ones(8, 8, requires_grad=True)
        hub = leaf * 2.0
        ((hub * 3.0) + hub.exp()).sum().backward()
        assert self.recorder.unshared_counts is not None, "the engine must add to a buffer here"
        self.recorder.restart()

    def correct_outputs(self, limits: Limits) -> bool:
        """Run each distinct operator of the recording alone, and take over what it really returned.

        Says whether anything was different from the metadata that the recording is based on.
        """
        rows = self.recorder.rows
        self.before_operators(max((row.live_bytes for row in rows), default=0))
        calls = {id(row.call): row.call for row in rows if row.reads and not row.call.operator.is_view}
        random_state = RandomState()  # running random operators must not change what the step draws next
        with torch.utils._python_dispatch._disable_current_modes():
            measured = measure_operators([signature_of(call) for call in calls.values()], limits)
        random_state.restore()
        pairs = [(call, found) for call, found in zip(calls.values(), measured) if found is not None]
        corrected = [self.mode.oracle.correct(call, found.results) for call, found in pairs]
        return any(corrected)

    def record_step(self, step: Step) -> Any:
        """Record one run of the step; what it returns is the caller's to keep until the end."""
        self.recorder.restart()
        self.recorder.is_step = True
        self.values.answers = []
        self.recorder.parameter_module = self.modules.owners()
        self.categories_at_start = categories_now(self, step)
        return step.run()


def capture(
    build: Build,
    *,
    device: str | Device = "cpu",
    target: str = "step",
    settings: Settings = UNKNOWN_SETTINGS,
    limits: Limits = QUICK,
    steps: int | None = None,
    guard: Guard | None = None,
    cluster: Cluster | None = None,
    lent_state: LentState | None = None,
    oracle: MetadataOracle | None = None,
) -> Trace:
    """Build the step on hollow tensors, run it until it is steady, and return the trace of the worst run.

    `device` is what the step is captured for: a device, whose architecture decides about kernels and which
    `torch.cuda` answers for, or only its kind. `settings` is what the target says about its step; the rest is
    read from the step. `steps` is how many runs are looked at when it is steady; without it, as many as
    it takes where runs may differ (`steps.py`).

    For the CPU, operators within `limits` are run alone once, to see how much memory their kernels use;
    `guard` may refuse that, for a step that is too large anyway.

    With a `cluster`, the step is that of one of its ranks: process groups of any size can be made, and
    `torch.distributed` answers as it does on that rank (`distributed/`).
    With a `lent_state` the step is one of a program that goes on training; all of it is then as it was.
    An `oracle` knows what operators return from captures before, for the same device.
    """
    global _captures_now
    if cluster is not None:
        cluster.check()
    kind = device.kind if isinstance(device, Device) else device
    know_everything, host_by_default = False, kind == "cuda"
    _refuse_nesting()
    # Captures replace functions of torch for a while: other threads wait.
    with _lock, interrupts_held(), eager_only():
        _captures_now = threading.get_ident()
        oracle, messages = oracle or MetadataOracle(kind), Messages()
        found, corrections = FoundState(lent_state is not None), 0
        while corrections < _MOST_CORRECTIONS:
            session = Session(device, oracle, settings, cluster)
            session.messages, session.lent = messages, lent_state
            session.gpu.architecture_mattered = oracle.architecture_mattered
            session.values.know_everything = know_everything
            session.ledger.host_by_default = host_by_default
            session.before_operators = guard or session.before_operators
            traces = _attempt(build, session, target, limits, found, steps)
            corrections += not messages.asked_meanwhile()
            oracle.architecture_mattered = session.gpu.architecture_mattered
            if traces is None:
                host_by_default = host_by_default and not session.names_no_device
                continue
            lacked = session.values.kernel_lacked_values or session.values.optimizer_lacked_values
            if not lacked or know_everything or not affordable(traces[0], limits):
                break
            # Memory depends on values, and a step this small is cheap to run for real.
            know_everything = True
        assert traces is not None, "the layouts of results do not settle"
        trace = heard(functools.partial(_finished, traces, session.gpu.device, kind, limits))
    return _checked(trace)


def _checked(trace: Trace) -> Trace:
    refusals.refuse_uncountable(trace)
    trace.check()
    refusals.refuse_nothing_counted(trace)
    return trace


def _finished(traces: list[Trace], gpu: Device, kind: str, limits: Limits) -> Trace:
    finish = functools.partial(with_measured_workspaces, limits=limits)
    finished = [finish(trace) if kind == "cpu" else with_gpu_workspaces(trace, gpu) for trace in traces]
    # With workspaces, another run may have the largest peak.
    return counted(max(finished, key=_badness) if len(finished) > 1 else finished[0])


def _badness(trace: Trace) -> tuple[int, int]:
    """What the runs of a step are compared by: the peak, and, of runs with the same, what they do."""
    return simulate(trace).peak_bytes, len(trace.ops)


def _attempt(
    build: Build, session: Session, target: str, limits: Limits, found: FoundState, steps: int | None = None
) -> list[Trace] | None:
    """Build the step, run it, and return the traces of the runs with the largest peaks; largest first.

    None if it has to be done again from the start: running its operators alone shows that some results lie
    differently in memory, which may change what follows; or the step names no device.
    """
    session.disk.begin = found.file_time
    try:
        where, running = session.cluster, session.lent
        as_rank = rank_of(where, running=running is not None)
        with seeded(), as_rank, gpu_of(where), session.active(), found.watching(), lent(running, session):
            return heard(functools.partial(_runs_of, build, session, target, limits, found, steps))
    except TrainfitError:
        if not session.names_no_device:
            raise
        return None  # it may ask to be on a GPU
    except NeedsRank as needed:
        other = needed.rank
    finally:
        found.put_back()  # also for the next attempt, whose tensors are others
    _hear(build, session, other, target, limits, found)
    return None


def _hear(build: Build, session: Session, rank: int, target: str, limits: Limits, found: FoundState) -> None:
    """Run the step as another rank until it has said what this one needs to know."""
    assert session.cluster is not None
    if session.lent is not None:
        raise CaptureError(
            f"the step waits for a Python object that rank {rank} sends, which a capture beside a running "
            "training does not get. Send it before the step, or make the plan beforehand, with trainfit plan."
        )
    if rank in (session.cluster.rank, *session.waiting):
        raise CaptureError(f"rank {rank} of the step waits for what another rank says, which waits for it.")
    session.messages.ask(rank)
    doing(f"asking rank {rank}")
    try:
        while _attempt(build, session.as_rank(rank), target, limits, found) is None:
            pass  # it had to ask another rank itself
    except RankHasSpoken:
        return
    raise CaptureError(f"rank {rank} of the step does not send what the rank that is captured waits for.")


def _runs_of(
    build: Build, session: Session, target: str, limits: Limits, found: FoundState, steps: int | None
) -> list[Trace] | None:
    def settled() -> bool:
        return session.device != "cpu" or not session.correct_outputs(limits)

    doing("building the model")
    with while_set(session.values, "building", True):
        step = user_code(session, build, "building the step")
    refusals.refuse_unusable(step, found)
    session.modules.begin_with(step.model)
    runs = Runs(session, step, target, lambda run: user_code(session, run, "the step"), settled)
    doing("running the first step")
    runs.warm_up(steps)
    if session.names_no_device:
        return None
    refusals.refuse_without_backward(runs)
    if not settled():
        return None
    doing("recording a step")
    try:
        runs.look(steps)
    except NotSettled:
        return None
    refusals.refuse_without_counted_backward(runs)
    return runs.traces()


_lock = threading.Lock()
_captures_now = 0
"""The thread that has the lock, while somebody has it."""


def _refuse_nesting() -> None:
    if _lock.locked() and _captures_now == threading.get_ident():
        raise CaptureError("a capture is running already: a step that is captured cannot capture another.")
