"""What the calls of a region have done before, to tell quickly that the next one does the same.

Describing an op takes longer than running a small one, and a region does the same in every step. So its first
call is described, and the next ones are compared with that, op by op: the operator, the kinds of its
arguments, the storage that each tensor lies in, and what came out. Nothing is counted blindly: an op that
differs in any of these is described anew.

Nothing here holds a tensor, or knows which module was called: regions with the same decisions share it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainfit.applying.op_results import Argument, Constant, Created, TensorLayout
from trainfit.applying.records import VIEW, LastDraw, OpCall, OpRecord
from trainfit.capturing.schemas import aten
from trainfit.plans.decisions import Behaviour, Decision
from trainfit.plans.recomputation import NOBODY, Rerun

PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_COURSES = 16
"""Courses remembered of regions with the same decisions: training and evaluation, batches of a few sizes."""
_MOST_LEARNT = 64
"""After as many, no new ones are learnt: the model never does the same for long."""
_MOST_NEEDS = 16

KNOWN, ENTERS, ENTERS_AS_INPUT = range(3)


class TensorArgument(NamedTuple):
    """Which storage a tensor among the arguments of an op lies in."""

    place: int
    storage: int
    entry: int
    """Whether the op is the first to touch it, and whether it is an input of the region then."""


class MadeTensor(NamedTuple):
    """A tensor that an op made, in a storage of its own."""

    place: int
    """Which of the results it is."""
    storage: int
    layout: TensorLayout
    size: tuple[int, torch.device]


@dataclass(frozen=True, slots=True, eq=False)
class CourseStep:
    """One op of a course."""

    func: Any
    row: OpRecord
    position: int
    """How far the plan has been followed after it."""
    quick: bool = False
    """Whether an op like it needs no description of its own."""
    view: bool = False
    types: tuple[type, ...] = ()
    names: tuple[str, ...] = ()
    """Of its keyword arguments."""
    in_lists: bool = False
    """Whether there are tensors in lists. Then places are those among all tensors, not those of arguments."""
    tensors: tuple[TensorArgument, ...] = ()
    outside: tuple[int, ...] = ()
    """The places of those that were there before the region and are read."""
    made: tuple[MadeTensor, ...] = ()
    returned: int = NOBODY
    """The place of the argument that it returns."""
    uninitialised: bool = False
    """Whether what it makes has no values yet."""
    several: bool = False
    """Whether it returns more than one result."""
    decision: Decision = Decision.RECOMPUTE
    behaviour: Behaviour = Decision.RECOMPUTE.behaviour
    draw_before: LastDraw | None = None


END = CourseStep(func=None, row=OpRecord(), position=0)
"""What comes after the last op."""


@dataclass(eq=False)
class Course:
    """The ops of one call, and what was decided at its end."""

    steps: tuple[CourseStep, ...]
    """With an end."""
    has_subclasses: bool
    """Whether there were tensors in it that are not plain ones."""
    reruns: dict[Hashable, Rerun] = field(default_factory=dict)

    def learn(self, needs: Hashable, rerun: Rerun) -> None:
        """Remember what runs again, if these are the needs of backward."""
        if len(self.reruns) < _MOST_NEEDS:
            self.reruns[needs] = rerun


class Courses:
    """The courses that calls with the same decisions have taken. Any thread may use and extend them."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: tuple[Course, ...] = ()
        self._last: dict[Hashable, Course] = {}
        self._learnt = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies begin anew."""
        return Courses, ()

    @property
    def learns(self) -> bool:
        """Whether there is room for more."""
        return self._learnt < _MOST_LEARNT

    def last(self, inputs: Hashable) -> Course | None:
        """Return the course that was learnt last, of a call with such inputs if there was one."""
        return self._last.get(inputs) or (self._known[-1] if self._known else None)

    def branches(self, course: Course, steps: int) -> list[Course]:
        """Return other courses that begin with the same steps as this one."""
        last = course.steps[steps - 1] if steps else None
        return [
            other
            for other in self._known
            if other is not course
            and len(other.steps) > steps
            and (last is None or other.steps[steps - 1] is last)
        ]

    def learn(self, inputs: Hashable, steps: Sequence[CourseStep], *, has_subclasses: bool) -> Course:
        """Remember the course of a call with such inputs."""
        course = Course((*steps, END), has_subclasses)
        self._learnt += 1
        self._known = (*self._known[1 - _MOST_COURSES :], course)
        self._last = {key: each for key, each in self._last.items() if each in self._known}
        self._last[inputs] = course
        return course


def step_of(
    row: OpRecord, position: int, call: OpCall | None, arguments: Sequence[TensorArgument] | None
) -> CourseStep:
    """Return the step that an op was; without its arguments, ops like it are always described."""
    if row.kind is VIEW and row.func is not aten.lift_fresh.default and not has_lists(row.func):
        return CourseStep(row.func, row, position, quick=True, view=True)
    made = None if call is None or arguments is None else _made_tensors(row, call)
    if call is None or arguments is None or made is None:
        return CourseStep(row.func, row, position)
    result = row.result
    return CourseStep(
        row.func,
        row,
        position,
        quick=True,
        types=tuple(map(type, call.args)),
        names=tuple(call.kwargs),
        in_lists=has_lists(row.func),
        tensors=tuple(arguments),
        outside=tuple(arguments[outside.argument].place for outside in row.outside),
        made=made,
        returned=arguments[result.number].place if isinstance(result, Argument) else NOBODY,
        uninitialised=call.facts.operator.uninitialised,
        several=type(result) in (tuple, list),
        decision=call.decision,
        behaviour=call.decision.behaviour,
        draw_before=call.draw_before,
    )


@functools.cache
def has_lists(func: Any) -> bool:
    """Whether an operator takes lists of tensors."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return any("Tensor" in kind and "List" in kind for kind in kinds)


def _made_tensors(row: OpRecord, call: OpCall) -> tuple[MadeTensor, ...] | None:
    """Return what an op made, each in a storage of its own; None if its results are of another kind."""
    result: Any = row.result
    if isinstance(result, Argument):
        return () if row.writes and not row.creates else None
    several = type(result) in (tuple, list)
    results, out = (result, call.out) if several else ((result,), (call.out,))
    if row.writes or any(type(each) is not Created and each != Constant(None) for each in results):
        return None
    made = [
        MadeTensor(
            place, each.storage, each.layout, (out[place].untyped_storage().nbytes(), out[place].device)
        )
        for place, each in enumerate(results)
        if type(each) is Created
    ]
    # Complex ones may be conjugate views, of which the layout does not tell.
    is_complex = any(each.layout.dtype.is_complex for each in made)
    return None if is_complex or len({each.storage for each in made}) != len(made) else tuple(made)
