"""`TraceGrowth`: the trace of a step with another batch or sequence, worked out from captured ones.

With another size a step mostly does the same: the same ops, storages with the same lives, and each number in
it (bytes, shapes, FLOPs) lies on a straight line over the batch, or on a parabola over the sequence, because
attention looks at pairs of tokens. Two or three captured traces then say what all others are. Numbers are
rounded up where a division leaves a rest, as kernels do.

Where traces do not take the same course (one that has fewer ops, a loop over chunks), there is nothing to be
worked out between them, and the answer is None. It is a prediction of a capture, and no replacement for one:
what is decided by it is confirmed by a capture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from trainfit.traces.ranks import Collective
from trainfit.traces.settings import Settings
from trainfit.traces.trace import Op, Signature, Storage, TensorSpec, Trace

_MOST_POINTS = 3
"""A parabola; what grows faster than that is not known among training steps."""

Numbers = Callable[[Sequence[int]], int]
"""Makes one number of those that the captured traces have in the same place."""


class NotTheSame(Exception):
    """Two traces differ in something that is not a number."""


class TraceGrowth:
    """Captured traces of one step by size, and what lies between and beyond them."""

    def __init__(self, name: str) -> None:
        """Begin without any; `name` is what grows, `batch` or `seq`."""
        self.name = name
        self._known: dict[int, Trace] = {}
        self._families: dict[tuple[int, ...], TraceFamily] = {}
        self._alike: dict[tuple[int, int], bool] = {}

    def learn(self, size: int, trace: Trace) -> None:
        """Remember a captured trace."""
        self._known[size] = trace

    @property
    def is_flat(self) -> bool:
        """Whether all traces are the same, whatever the size."""
        sizes = sorted(self._known)
        return len(sizes) > 1 and all(
            self._are_alike(sizes[0], size) and self._family((sizes[0], size)).is_flat for size in sizes[1:]
        )

    def at(self, size: int) -> Trace | None:
        """Return the trace of a size; None where too few traces take the same course to say."""
        if size in self._known:
            return self._known[size]
        near = sorted(self._known, key=lambda known: abs(known - size))
        alike = [known for known in near if self._are_alike(near[0], known)][:_MOST_POINTS]
        if len(alike) < 2:
            return None
        try:
            return self._family(tuple(sorted(alike))).at(size, self.name)
        except NotTheSame:
            return None

    def _family(self, sizes: tuple[int, ...]) -> TraceFamily:
        if sizes not in self._families:
            self._families[sizes] = TraceFamily(sizes, [self._known[size] for size in sizes])
        return self._families[sizes]

    def _are_alike(self, one: int, other: int) -> bool:
        pair = (min(one, other), max(one, other))
        if pair not in self._alike:
            self._alike[pair] = one == other or take_the_same_course(self._known[one], self._known[other])
        return self._alike[pair]


def take_the_same_course(one: Trace, other: Trace, besides: Sequence[str] = ()) -> bool:
    """Whether two traces differ in numbers of bytes and elements alone; `besides` are fields that may."""
    same = all(getattr(one, name) == getattr(other, name) for name in _SAME if name not in besides)
    lengths = len(one.ops) == len(other.ops) and len(one.storages) == len(other.storages)
    # What is freed at one time has no order of its own: autocast's cache lets go in that of addresses.
    if not same or not lengths or sorted(one.releases) != sorted(other.releases):
        return False
    if any(map(_differ_in_life, one.storages, other.storages)):
        return False
    return not any(_differ_in_course(one, first, other, second) for first, second in zip(one.ops, other.ops))


_SAME = (
    *("device", "torch", "architecture", "tf32", "cluster", "modules", "calls", "model"),
    *("forward_post_order", "backward_pre_order", "backward_post_order"),
)


def _differ_in_life(one: Storage, other: Storage) -> bool:
    """Whether two storages are not the same but for their sizes."""
    times = [time for time, _ in one.resizes] != [time for time, _ in other.resizes]
    return times or any(getattr(one, name) != getattr(other, name) for name in _LIFE)


_LIFE = ("category", "producer", "start", "end", "holders", "born", "gathered", "stream", "also_used_on")


def _differ_in_course(one: Trace, first: Op, other: Trace, second: Op) -> bool:
    if replace(first, signature=0) != replace(second, signature=0):
        return True
    return one.signatures[first.signature].name != other.signatures[second.signature].name


class TraceFamily:
    """Traces that take the same course, and the line or parabola that each of their numbers lies on."""

    def __init__(self, sizes: tuple[int, ...], traces: list[Trace]) -> None:
        self.sizes, self.traces = sizes, traces

    @cached_property
    def _signatures(self) -> dict[tuple[int, ...], int]:
        """The combinations of signatures that ops have in the traces, each with a number."""
        found: dict[tuple[int, ...], int] = {}
        for ops in zip(*(trace.ops for trace in self.traces)):
            found.setdefault(tuple(op.signature for op in ops), len(found))
        return found

    @cached_property
    def _growing(self) -> list[int]:
        """The storages that are not of the same size in all traces."""
        columns = zip(*(trace.storages for trace in self.traces))
        return [
            number
            for number, same in enumerate(columns)
            if any((one.bytes, one.resizes) != (same[0].bytes, same[0].resizes) for one in same[1:])
        ]

    @property
    def is_flat(self) -> bool:
        """Whether nothing grows."""
        return not self._growing and all(
            len({trace.signatures[number] for trace, number in zip(self.traces, numbers)}) == 1
            for numbers in self._signatures
        )

    def at(self, size: int, name: str) -> Trace:
        """Return the trace of another size."""
        nearest = min(range(len(self.sizes)), key=lambda n: abs(self.sizes[n] - size))
        grown = self.carried(lagrange(self.sizes, size), nearest)
        return replace(grown, settings=_settings(grown.settings, name, size))

    def carried(self, number: Numbers, nearest: int) -> Trace:
        """Return the trace whose numbers are made of those of all; the rest is that of the nearest."""
        like = self.traces[nearest]
        table: dict[Signature, int] = {}
        places = []
        for numbers in self._signatures:
            columns = [trace.signatures[n] for trace, n in zip(self.traces, numbers)]
            places.append(table.setdefault(_signature(columns, nearest, number), len(table)))
        ops = []
        for position, op in enumerate(like.ops):
            combination = tuple(trace.ops[position].signature for trace in self.traces)
            ops.append(replace(op, signature=places[self._signatures[combination]]))
        storages = list(like.storages)
        for place in self._growing:
            storages[place] = _storage([trace.storages[place] for trace in self.traces], number)
        return replace(
            like,
            signatures=tuple(table),
            ops=tuple(ops),
            storages=tuple(storages),
            observed_peak_bytes=None,
            samples=_count([trace.samples for trace in self.traces], number),
            tokens=_count([trace.tokens for trace in self.traces], number),
        )


def lagrange(sizes: Sequence[int], size: int) -> Numbers:
    """Return the function that carries numbers, known at some sizes, on to another one.

    It is the polynomial through them, in whole numbers: nothing is rounded but the result, upwards.
    """
    above, below = [], []
    for one in sizes:
        others = [other for other in sizes if other != one]
        above.append(math.prod(size - other for other in others))
        below.append(math.prod(one - other for other in others))
    common = math.lcm(*(abs(number) for number in below))
    weights = [a * (common // b) for a, b in zip(above, below)]

    def carried(values: Sequence[int]) -> int:
        if all(value == values[0] for value in values):
            return values[0]
        return -(-sum(weight * value for weight, value in zip(weights, values)) // common)

    return carried


def _storage(columns: Sequence[Storage], number: Numbers) -> Storage:
    resizes = tuple(
        (same[0][0], max(number([size for _, size in same]), 0))
        for same in zip(*(one.resizes for one in columns))
    )
    return replace(columns[0], bytes=max(number([one.bytes for one in columns]), 0), resizes=resizes)


def _signature(columns: Sequence[Signature], nearest: int, number: Numbers) -> Signature:
    like = columns[nearest]
    if all(one == like for one in columns):
        return like
    grown = {
        name: max(number([getattr(one, name) for one in columns]), 0)
        for name in ("workspace_bytes", "flops", "moved_bytes")
    }
    return replace(
        like,
        inputs=_specs([one.inputs for one in columns], number),
        outputs=_specs([one.outputs for one in columns], number),
        arguments=_arguments([one.arguments for one in columns], nearest, number),
        collective=_collective([one.collective for one in columns], nearest, number),
        **grown,  # type: ignore[arg-type]
    )


def _collective(columns: Sequence[Collective | None], nearest: int, number: Numbers) -> Collective | None:
    """Return what is exchanged, among the ranks of the nearest: with more tokens, `tp` sends more."""
    like, known = columns[nearest], [one for one in columns if one is not None]
    if like is None or len(known) < len(columns) or len({one.kind for one in known}) > 1:
        if like is not None or known:
            raise NotTheSame
        return None
    return replace(like, bytes=max(number([one.bytes for one in known]), 0))


def _specs(columns: Sequence[tuple[TensorSpec, ...]], number: Numbers) -> tuple[TensorSpec, ...]:
    if len({len(specs) for specs in columns}) > 1:
        raise NotTheSame
    return tuple(_spec(same, number) for same in zip(*columns))


def _spec(columns: Sequence[TensorSpec], number: Numbers) -> TensorSpec:
    if len({(one.dtype, len(one.shape)) for one in columns}) > 1:
        raise NotTheSame
    shape = tuple(max(number(same), 0) for same in zip(*(one.shape for one in columns)))
    stride = tuple(max(number(same), 0) for same in zip(*(one.stride for one in columns)))
    return TensorSpec(columns[0].dtype, shape, stride)


def _arguments(columns: Sequence[str], nearest: int, number: Numbers) -> str:
    """Return arguments as text, with whole numbers carried on; fractions are those of the nearest."""
    if all(text == columns[0] for text in columns):
        return columns[0]
    values = _value([json.loads(text) for text in columns], nearest, number)
    return json.dumps(values, separators=(",", ":"))


def _value(columns: Sequence[Any], nearest: int, number: Numbers) -> Any:
    like = columns[nearest]
    if any(type(one) is not type(like) for one in columns):
        raise NotTheSame
    if isinstance(like, list):
        if len({len(one) for one in columns}) > 1:
            raise NotTheSame
        return [_value(same, nearest, number) for same in zip(*columns)]
    if isinstance(like, dict):
        if any(one.keys() != like.keys() for one in columns):
            raise NotTheSame
        return {name: _value([one[name] for one in columns], nearest, number) for name in like}
    return number(columns) if type(like) is int else like


def _count(columns: Sequence[int | None], number: Numbers) -> int | None:
    known = [count for count in columns if count is not None]
    return max(number(known), 1) if len(known) == len(columns) else None


def _settings(settings: Settings, name: str, size: int) -> Settings:
    arguments = tuple((key, str(size) if key == name else text) for key, text in settings.arguments)
    return replace(settings, arguments=arguments, **{name: size})  # type: ignore[arg-type]
