"""One call of a region: its forward and its recomputation, under a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trainfit.applying.call_arguments import CallArguments
from trainfit.applying.chaining import pass_on
from trainfit.applying.courses import Courses
from trainfit.applying.execution import execution
from trainfit.applying.following import Follower
from trainfit.applying.offloaded_results import HostCopy
from trainfit.applying.op_results import can_be_absent, parts_of
from trainfit.applying.plain_checkpoint import OnFollowed
from trainfit.applying.planned_model import PlannedModel
from trainfit.applying.python_objects import LastAttributes, ModuleAttributes, has_hooks_inside
from trainfit.applying.quick_recording import QuickRecorder
from trainfit.applying.randomness import drawn_again
from trainfit.applying.recording import RegionRecorder
from trainfit.applying.records import CountedTensor, Record
from trainfit.applying.replaying import Replayer, RunAll
from trainfit.applying.saved_tensors import SavedTensors, nobody_watches, run_alone
from trainfit.applying.sharded_modules import is_unit
from trainfit.applying.torch_changes import ordinary_paths, quiet_distribution
from trainfit.capturing.random_stream import HostRandomState
from trainfit.plans.plan import NamedCall, OpDecision
from trainfit.plans.recomputation import rerun

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]
_UNIT_IN_A_ROW = "it is an FSDP unit, whose input is held and not computed again by the block before it"
_keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True)
class PlannedCall:
    """What the plan says about one call: its ops, and whether it belongs together with others."""

    number: int
    """Which call of its module in a step it is."""
    ops: tuple[OpDecision, ...]
    continues: bool = False
    """Whether its input is recomputed by the region before it, instead of being held."""
    continued: bool = False
    """Whether the next region does so."""
    whole: bool = False
    """Whether nothing is kept, so that it may be computed again without following it."""
    beside: NamedCall | None = None
    """The call beside which results are copied to the host; None if they are copied at once."""
    host_inputs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Inputs that are copied to the host: arguments of ops, by the op's number."""
    courses: Courses = field(default_factory=Courses, compare=False, repr=False)
    """What calls with the same decisions did before."""

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The operators that it calls."""
        return frozenset(op.name for op in self.ops)


def inside_checkpoint() -> bool:
    """Whether an outer `torch.utils.checkpoint` is running, in forward or again."""
    hooks = _top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None and not isinstance(value, int | float | str):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


@dataclass(eq=False, repr=False)
class RegionCall:
    """Runs a module's forward under a plan, and again when backward needs it."""

    _name: str
    _module: torch.nn.Module
    _forward: Callable[..., Any]
    _planned: PlannedCall
    _planned_model: PlannedModel
    _last_attributes: LastAttributes
    """Those of the module, from the call before."""
    _on_followed: OnFollowed | None = None
    """Called when forward is over, if it went as planned and drew nothing that torch does not know of."""
    _record: Record | None = None
    _recorder: QuickRecorder | None = None
    _distributed: bool = True
    """Whether there may be tensors that are not plain ones."""
    _used_up: bool = False
    _given: list[torch.Tensor] = field(default_factory=list)
    _holds_inputs: bool = False
    _arguments: CallArguments | None = None
    _attributes: ModuleAttributes | None = None
    _host_random: HostRandomState | None = None
    """Python's and NumPy's generators before forward, if it drew from them."""
    _absent: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward; the results are those of the module without a plan."""
        # Of a distributed tensor, operators see what this rank has of it.
        self._given = [part for leaf in _tensors_in(args, kwargs) for part in parts_of(leaf)]
        # Someone else may want to know what is kept for backward: an outer checkpoint, or offloading.
        # Then torch keeps the inputs. Else we do: torch would refuse one that the region itself writes to.
        self._holds_inputs = _top_hooks(False) is None
        arguments = CallArguments(args, kwargs, self._holds_inputs, self._planned.continues)
        self._arguments = arguments
        if self._planned.continues and arguments.linked is None:
            unit = is_unit(self._module)
            self._differs(_UNIT_IN_A_ROW if unit else "its input is not what the region before it returned")

        def forward(*tensors: Any) -> Any:
            result = arguments.call(self._forward, tensors)
            return pass_on(result) if self._planned.continued else result

        if nobody_watches():
            return run_alone(self._run_alone, forward)
        options: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (self._in_torchs(), _Again(self)),
        }
        return checkpoint(forward, *arguments.tensors, **options)

    def _run_alone(self, forward: Callable[[], Any]) -> Any:
        """Run forward where torch's own checkpoint is not needed."""
        saved = SavedTensors(functools.partial(self._run_again, forward))
        with self._in_forward(saved.pack, saved.unpack):
            return forward()

    def _run_again(self, forward: Callable[[], Any]) -> None:
        with self.again():
            forward()

    @contextlib.contextmanager
    def _in_torchs(self) -> Iterator[None]:
        """Run forward under torch's own checkpoint, whose hooks have just been set."""
        with self._in_forward(*_top_hooks(False)):
            yield

    @contextlib.contextmanager
    def _in_forward(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
        recorder = self._recorder = self._new_recorder()
        attributes, host_random = self._last_attributes.now(self._module), HostRandomState()
        hooks = saved_tensors_hooks(recorder.noting(pack), unpack)
        ordinary, reads = ordinary_paths(self._planned.names), self._planned_model.noticing_reads()
        quiet = quiet_distribution(expected=recorder.expects_subclasses)
        with execution.forward(recorder.value_read), ordinary, reads, quiet, hooks, recorder:
            yield
        self._distributed = recorder.saw_subclasses
        self._record = recorder.finish(complete=has_hooks_inside(attributes.modules))
        self._attributes = attributes
        if not host_random.is_present():
            self._host_random = host_random
        assert self._arguments is not None
        linked = self._arguments.linked
        self._arguments.forget_untouched(
            lambda tensor: any(recorder.number_of(part) >= 0 for part in parts_of(tensor))
        )
        moved = self._inputs_on_host(recorder, linked)
        if moved:
            self._arguments.leave_on_host(moved)
        self._arguments = None
        if self._holds_inputs:
            self._record.inputs = [
                CountedTensor(tensor, recorder.number_of(tensor), tensor._version)
                for tensor in self._given
                if recorder.number_of(tensor) >= 0 and not tensor.is_inference() and tensor is not linked
                if _storage_id(tensor) not in moved
            ]
        self._recorder, self._given = None, []
        self._offload(self._record, moved.values())
        self._tell(attributes, recorder)

    def _inputs_on_host(self, recorder: RegionRecorder, linked: torch.Tensor | None) -> dict[int, HostCopy]:
        """Copy inputs that the plan offloads; not if someone else holds them, or the region wrote to them."""
        wanted = recorder.record.inputs_for_host - recorder.record.flow.permanent
        found: dict[int, HostCopy] = {}
        for tensor in self._given if wanted and self._holds_inputs else ():
            if recorder.number_of(tensor) not in wanted or tensor is linked or not can_be_absent(tensor):
                continue
            if _storage_id(tensor) not in found:
                copy = HostCopy(self._planned_model.host_memory, tensor.untyped_storage())
                found[_storage_id(tensor)] = copy
        return found

    def _offload(self, record: Record, inputs: Iterable[HostCopy]) -> None:
        """Copy results that the plan offloads; their memory, and that of inputs, is free after the copies."""
        memory = self._planned_model.host_memory
        copies = [*record.offload(memory), *inputs]
        if copies and self._planned.beside is not None:
            memory.copied_beside(self._planned.beside, copies)
            return
        for copy in copies:
            copy.free()

    def _tell(self, attributes: ModuleAttributes, recorder: RegionRecorder) -> None:
        """Say how forward went."""
        follower = recorder.follower
        if self._module.training:
            larger = follower.larger if follower.lost is None else None
            self._planned_model.sizes_seen(self._name, self._planned.number, larger)
        if follower.lost is not None:
            self._differs(follower.lost)
        elif self._host_random is None and self._on_followed is not None:
            self._on_followed(attributes, recorder)
        # It knows the arguments, which are not to be held longer than backward needs them.
        self._on_followed = None

    def _differs(self, difference: str) -> None:
        self._planned_model.warn(self._name, self._module, difference)

    def _new_recorder(self) -> QuickRecorder:
        planned, follower = self._planned, Follower(self._planned.ops, self._planned.host_inputs)
        # Sizes are compared with the plan's, and inputs for the host are found, where an op is described.
        waits_for_sizes = self._planned_model.waits_for_sizes(self._name, planned.number)
        describes_all = waits_for_sizes or bool(planned.host_inputs)
        courses = planned.courses
        return QuickRecorder(follower, self._given, self._module, courses, describes_all=describes_all)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return the context in which the region is recomputed."""
        self._planned_model.step_ends()
        mode = self._replay_mode()
        as_in_forward = contextlib.nullcontext() if self._attributes is None else self._attributes.restored()
        with execution.recomputation():
            try:
                ordinary = ordinary_paths(self._planned.names)
                drawn = drawn_again(self._host_random)
                quiet = quiet_distribution(expected=self._distributed)
                with ordinary, quiet, as_in_forward, drawn, mode:
                    yield
            finally:
                mode.finish()
                self._absent = mode.absent
                self._let_go()

    def _let_go(self) -> None:
        """Drop what will not be needed again; what is on the host is fetched anew another time."""
        record = self._record
        if record is None:
            return
        if self._used_up:
            record.kept.clear()
            record.on_host.clear()
        for number in record.on_host:
            record.kept.pop(number, None)

    def _replay_mode(self) -> Any:
        record = self._record
        if record is None or record.rerun is None:
            # Backward inside of the region's own forward, which is not over yet.
            return RunAll(self._recorder.record if self._recorder is not None else Record())
        if not self._used_up:
            record.fetch()
        modified = any(kept.is_modified for kept in record.kept.values())
        if modified and not self._used_up:
            self._differs("a result that was kept has been modified in place after the region")
        again = rerun(record.flow, ()) if modified or self._used_up else record.rerun
        record.check_outside(again, self._name)
        self._used_up = not _keeps_graph()
        return Replayer(self._name, record, again, release=self._used_up)

    def __del__(self) -> None:
        """Look, when all is over, whether someone got hold of a result that has no values."""
        if any(reference() is not None for reference in self._absent):
            self._differs(
                "when it was recomputed in backward, some code kept a result beyond that (in a list "
                "or variable outside of it), and such results may have no values"
            )


class _Again:
    """A context that can be entered more than once: with `retain_graph` there is more than one backward."""

    def __init__(self, call: RegionCall) -> None:
        self._call = call
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        context = self._call.again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> Any:
        return self._entered.pop().__exit__(*exception)
