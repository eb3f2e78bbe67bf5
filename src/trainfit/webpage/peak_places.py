"""What holds most of the peak: which category, and of that which layers, or which operators made it.

The whole model is never the answer: what its layers do not have is named by the operators that made it, such
as those of the loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.memory.peak_owners import OUTSIDE, PeakPart, peak_parts
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace

_TELLING = 0.5
"""What is inside a module is named instead of it if it has more than this share of it."""
_MOST_OPERATORS = 2
_NAMED = 0.1
"""An operator that made less of it than this share is not named."""


@dataclass(frozen=True)
class LargestPart:
    """What holds most of the category that most of the peak is."""

    category: str
    category_bytes: int
    place: str
    """A module, or layers that are alike as one: `blocks.0-11`; empty for what is outside of modules."""
    place_bytes: int
    modules: int
    """How many modules those are; 0 for what a module has itself, besides those inside of it."""
    operators: tuple[str, ...] = ()
    """If so, the operators that made it, the most bytes first."""


@dataclass(frozen=True)
class _Places:
    """Bytes of one category at the peak, by module; above all modules is `OUTSIDE`."""

    trace: Trace
    own: Counter[int]
    whole: Counter[int]
    """With everything below."""
    children: dict[int, list[int]]

    def is_model(self, module: int) -> bool:
        """Whether it is the one that all others are in, which says nothing."""
        return module == OUTSIDE or self.children[OUTSIDE] == [module]

    def alike(self, module: int) -> list[int]:
        """Return what is directly inside and holds the most: one module, or numbered ones of one class."""
        groups: dict[object, list[int]] = {}
        for child in self.children[module]:
            one = self.trace.modules[child]
            is_numbered = one.name.rpartition(".")[2].isdecimal()
            groups.setdefault(one.class_name if is_numbered else child, []).append(child)
        return max(groups.values(), key=self.together, default=[])

    def together(self, modules: Sequence[int]) -> int:
        """Return what these hold."""
        return sum(self.whole[module] for module in modules)


def largest_part(timeline: Timeline) -> LargestPart | None:
    """Return which category most of the peak is, and what holds most of that."""
    parts = list(peak_parts(timeline))
    categories: Counter[str] = Counter()
    for part in parts:
        categories[part.category] += part.bytes
    if not categories.total():
        return None
    category, total = categories.most_common(1)[0]
    members = [part for part in parts if part.category == category]
    places = _places(timeline.trace, members)
    modules = timeline.trace.modules
    at = OUTSIDE
    while (inside := places.together(group := places.alike(at))) > places.own[at]:
        if not places.is_model(at) and inside <= _TELLING * places.whole[at]:
            return LargestPart(category, total, modules[at].name, places.whole[at], 1)
        if len(group) > 1:
            return LargestPart(category, total, joined_name(timeline.trace, group), inside, len(group))
        at = group[0]
    name = "" if at == OUTSIDE else modules[at].name
    if not places.is_model(at) and not places.children[at]:
        return LargestPart(category, total, name, places.own[at], 1)
    makers = _makers(timeline.trace, [part for part in members if part.module == at])
    return LargestPart(category, total, name, places.own[at], 0, makers)


def _places(trace: Trace, parts: Sequence[PeakPart]) -> _Places:
    own: Counter[int] = Counter()
    for part in parts:
        own[part.module] += part.bytes
    whole = Counter(own)
    children: dict[int, list[int]] = defaultdict(list)
    # Children come after their parents: from the end, every module is whole when it is added to its parent.
    for number in reversed(range(len(trace.modules))):
        parent = trace.modules[number].parent
        whole[parent if parent >= 0 else OUTSIDE] += whole[number]
    for number, module in enumerate(trace.modules):
        children[module.parent if module.parent >= 0 else OUTSIDE].append(number)
    return _Places(trace, own, whole, children)


def _makers(trace: Trace, parts: Sequence[PeakPart]) -> tuple[str, ...]:
    """Return which operators made most of it; none if it was there before the step."""
    made: Counter[str] = Counter()
    for part in parts:
        if part.producer >= 0:
            made[trace.op_name(part.producer)] += part.bytes
    worth = _NAMED * made.total()
    return tuple(name for name, size in made.most_common(_MOST_OPERATORS) if size >= worth)


def joined_name(trace: Trace, group: Sequence[int]) -> str:
    """Name modules that are alike, whose numbers are the last part of their names, as one."""
    before = trace.modules[group[0]].name.rpartition(".")[0]
    numbers = sorted(int(trace.modules[module].name.rpartition(".")[2]) for module in group)
    return numbered(f"{before}." if before else "", numbers, "")


def numbered(head: str, numbers: Sequence[int], tail: str) -> str:
    """Write `blocks.0-11.mlp` for numbers in sequence, else `blocks.{0-3, 7}.mlp`; they are ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"{head}{text if len(runs) == 1 else f'{{{text}}}'}{tail}"
