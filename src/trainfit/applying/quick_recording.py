"""Forward of a region that does what it did before: compared with that, instead of being described anew.

What is noted is the same as without a course, op for op, so that any op may be described instead: the odd
ones always are, and all of those that differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from trainfit.applying.courses import (
    ENTERS,
    ENTERS_AS_INPUT,
    KNOWN,
    PLAIN,
    Courses,
    CourseStep,
    TensorArgument,
    has_lists,
    step_of,
)
from trainfit.applying.execution import execution
from trainfit.applying.following import Follower
from trainfit.applying.modes import Facts, facts_of, is_weight_cast
from trainfit.applying.op_results import has_storage, tensors_in
from trainfit.applying.randomness import generator_of
from trainfit.applying.recording import RegionRecorder
from trainfit.applying.records import OpCall, OpRecord, Record
from trainfit.capturing.schemas import aten
from trainfit.plans.recomputation import NOBODY, Rerun, rerun

_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]
_function_modes: Any = torch._C._len_torch_function_stack
_to_copy = aten._to_copy.default


class QuickRecorder(RegionRecorder):
    """Records a call of a region along the course that one before it took, and learns a new one."""

    def __init__(
        self,
        follower: Follower,
        inputs: Sequence[torch.Tensor],
        module: torch.nn.Module,
        courses: Courses,
        *,
        describes_all: bool,
    ) -> None:
        """Expect the course that was learnt last, unless all is to be described."""
        super().__init__(follower, inputs, module)
        self._courses = courses
        self._key = tuple(map(_kind, inputs))
        self._course = None if describes_all else courses.last(self._key)
        self._ahead = None if self._course is None else self._course.steps
        self._ops = self.record.ops
        self._steps: list[CourseStep] = []
        """Those of this call, once it has left all courses."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one operator call."""
        ahead, ops = self._ahead, self._ops
        if ahead is not None and not types and execution.level == self._level and not _function_modes():
            step = ahead[len(ops)]
            if step.func is func and step.quick:
                if not step.view:
                    if self._is_like(step, args, kwargs):
                        return self._follow(step, args, kwargs or {})
                elif not args[0].is_meta:
                    ops.append(step.row)
                    return func._op(*args, **kwargs) if kwargs else func._op(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def handle(self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is not as expected: one of another course, or one that is described."""
        course, count = self._course, len(self._ops)
        for other in () if course is None else self._courses.branches(course, count):
            step = other.steps[count]
            if step.func is func and (not step.quick or step.view or self._is_like(step, args, kwargs)):
                self._course, self._ahead = other, other.steps
                if step.quick and not step.view:
                    return self._follow(step, args, kwargs)
                break
        if course is not None and count:
            self.follower.position = course.steps[count - 1].position
        return super().handle(facts, func, args, kwargs)

    def _is_like(self, step: CourseStep, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether an operator is called with arguments of the same kinds, in the same storages."""
        if tuple(map(type, args)) != step.types or (tuple(kwargs) if kwargs else ()) != step.names:
            return False
        values: Any = args
        if step.in_lists:
            values = tensors_in(args, {})
            if len(values) != len(step.tensors) or any(type(value) not in PLAIN for value in values):
                return False
        numbers = self._number_of
        try:
            for place, storage, entry in step.tensors:
                number = numbers.get(_storage_id(values[place]))
                if (number != storage or entry) and (
                    entry is KNOWN or number is not None or not self._enters(storage, values[place], entry)
                ):
                    return False
        except NotImplementedError:  # a sparse tensor has no storage of its own
            return False
        if step.func is _to_copy and is_weight_cast(step.func, args, kwargs or {}) != step.row.cast:
            return False
        permanent, outside = self.record.flow.permanent, step.row.outside
        if permanent and any(storage in permanent for _, storage, _ in step.tensors):
            return False
        if outside and outside[0].place != len(self.record.counts):
            return False
        generator = step.row.generator
        return generator is None or (
            generator_of(args, kwargs or {}, tensors_in(args, {})) is generator
            and self._draws.get(generator) == step.draw_before
        )

    def _enters(self, storage: int, tensor: torch.Tensor, entry: int) -> bool:
        """Let a storage from outside be the next one, if it should be."""
        # What has a storage and is of torch's own class is strided.
        if storage != len(self.record.flow.makers) or tensor.is_meta:
            return False
        if (_storage_id(tensor) in self._inputs) is not (entry is ENTERS_AS_INPUT):
            return False
        self._enter(tensor, NOBODY)
        return True

    def _follow(self, step: CourseStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is like a step, and note what that did, if it does the same."""
        row, record, func = step.row, self.record, step.func
        values: Any = tensors_in(args, {}) if step.in_lists else args
        counts = [self._count(values[place]) for place in step.outside] if step.outside else ()
        if row.generator is not None:
            self._draw(row, step.decision)
        out = func._op(*args, **kwargs)
        record.counts += counts
        position, makers = len(record.ops), record.flow.makers
        for storage, _ in row.writes:
            makers[storage].append(position)
        if not self._makes_the_same(step, values, out):
            row = self._described(row, args, kwargs, out)
        else:
            results = out if step.several else (out,)
            for place, storage, _, size in step.made:
                self._number_of[_storage_id(results[place])] = storage
                makers.append([position])
                record.sizes.append(size)
            if step.uninitialised:
                self._uninitialised.update(row.creates)
        if step.behaviour.restored:
            written = [values[step.returned]] if row.writes else []
            self._save(row, out, written, step.behaviour.on_host)
        if row.cast:
            self._note_cast(row, args[0])
        self._ops.append(row)
        if row is not step.row and not row.does_the_same(step.row):
            self._leave(position)
            self.follower.position = step.position
            self._steps.append(CourseStep(func, row, step.position))
        return out

    def _makes_the_same(self, step: CourseStep, values: Any, out: Any) -> bool:
        """Whether results are in new storages, with the layouts of the step."""
        if step.returned != NOBODY:
            return out is values[step.returned]
        results = out if step.several else (out,)
        next_storage, numbers = len(self.record.flow.makers), self._number_of
        for place, storage, layout, size in step.made:
            tensor = results[place]
            if (
                storage != next_storage
                or tensor.shape != layout.size
                or tensor.dtype is not layout.dtype
                or tensor.stride() != layout.stride
                or tensor.storage_offset() != layout.offset
                or tensor.device != size[1]
            ):
                return False
            identity = _storage_id(tensor)
            # Of something that is gone, as a rule.
            if identity in numbers and any(
                identity == _storage_id(values[each.place]) for each in step.tensors
            ):
                return False
            next_storage += 1
        return True

    def _described(self, like: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpRecord:
        """Return the record of an op that does the same as another, but makes something else."""
        row = dataclasses.replace(like, creates=(), result=())
        row.result = self._describe(row, facts_of(row.func).operator, out, tensors_in(args, kwargs))
        return row

    @property
    def expects_subclasses(self) -> bool:
        """Whether there may be tensors that are not plain ones."""
        return self._course is None or self._course.has_subclasses

    # The course -----------------------------------------------------------------------------------------

    def _append(self, row: OpRecord, call: OpCall | None = None) -> None:
        super()._append(row, call)
        count = len(self._ops)
        if self._course is not None:
            if row.does_the_same(self._course.steps[count - 1].row):
                return
            self._leave(count - 1)
        if self._courses.learns:
            arguments = None if call is None else self._arguments(row, call)
            self._steps.append(step_of(row, self.follower.position, call, arguments))

    def _arguments(self, row: OpRecord, call: OpCall) -> list[TensorArgument] | None:
        """Return where the tensors of an op were, if that is all there is to know of them."""
        flow, tensors = self.record.flow, call.tensors
        written_outside = any(flow.makers[storage][0] == NOBODY for storage, _ in row.writes)
        unseen = any(storage in self._uninitialised and not version for storage, version in row.reads)
        if row.must_run or written_outside or unseen:
            return None
        if not tensors or not all(type(tensor) in PLAIN for tensor in tensors) or tensors_in((), call.kwargs):
            return None
        places: Any = range(len(tensors))
        if not has_lists(row.func):
            places = [place for place, value in enumerate(call.args) if isinstance(value, torch.Tensor)]
        found, seen = [], set(range(call.storages_before))
        for place, tensor in zip(places, tensors):
            number, is_input = self._storage(tensor), _storage_id(tensor) in self._inputs
            if number in flow.permanent:
                return None
            entry = KNOWN if number in seen else ENTERS_AS_INPUT if is_input else ENTERS
            seen.add(number)
            found.append(TensorArgument(place, number, entry))
        return found

    def _leave(self, steps: int) -> None:
        """From here on all is described."""
        assert self._course is not None
        self._steps = list(self._course.steps[:steps])
        if steps:
            self.follower.position = max(self.follower.position, self._steps[-1].position)
        self._course = self._ahead = None

    def finish(self, *, complete: bool = False) -> Record:
        """Let the plan be followed to the last op, too."""
        if self._course is not None and self._ops:
            self.follower.position = self._course.steps[len(self._ops) - 1].position
        return super().finish(complete=complete)

    def _rerun(self) -> Rerun:
        """Decide as in a call before, if the same ops were needed for the same."""
        record, course = self.record, self._course
        flow = record.flow
        if flow.unseen_writes or self.follower.lost is not None:
            return super()._rerun()
        if course is not None and len(course.steps) != len(record.ops) + 1:
            self._leave(len(record.ops))
            course = None
        if course is None and self._courses.learns:
            course = self._courses.learn(self._key, self._steps, has_subclasses=self.saw_subclasses)
        needs = (tuple(flow.needed), frozenset(record.kept), frozenset(flow.permanent))
        known = None if course is None else course.reruns.get(needs)
        if known is None:
            known = rerun(flow, record.kept)
            if course is not None:
                course.learn(needs, known)
        return known


def _kind(tensor: torch.Tensor) -> Hashable:
    """Return what the sizes of a region's results may depend on."""
    lies = tensor.stride() if has_storage(tensor) else tensor.layout
    return (tensor.shape, lies, tensor.dtype, tensor.device)
