"""Units of FSDP that stay whole after forward (`reshard_after_forward=False`), as an edit of the trace.

The step is captured with every unit resharded. What a unit does differently if it is kept (torch 2.13):

- Its parameters keep their memory from forward until its own backward is over.
- Backward does not gather and fill it; whatever asks for that, also ahead of time, finds it whole. The buffer
  that it would have been gathered into is not there, nor what its gather would have waited for.
- Everything else runs as before, at the same place: what it gathers ahead for others, and its reduction.

So the result is the trace that a capture with this setting has. A unit whose gathers are not of this kind (it
is gathered by a checkpoint's recomputation, or more often than it is called) is left alone: nobody knows here
what torch would do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from trainfit.planning.unit_gathers import ExchangeRun, exchange_runs, gather_of
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Interval, Op, Storage, Trace


@dataclass(frozen=True, slots=True)
class UnitKeep:
    """What is not there if a unit stays whole after forward."""

    module: int
    ops: tuple[int, ...]
    """By which backward gathers and fills it."""
    buffers: tuple[int, ...]
    """Storages that these make."""
    whole: tuple[tuple[int, int, int, int], ...]
    """Storages that are not emptied and filled again, between two times, and their bytes meanwhile."""


def unit_keeps(trace: Trace) -> dict[int, UnitKeep]:
    """Return the units that can be kept, in the order of their first forward; others have nothing to keep."""
    found = {}
    for module in dict.fromkeys(call.module for call in trace.calls if trace.modules[call.module].unit):
        one = _keep(trace, module)
        if one is not None:
            found[module] = one
    return found


def _keep(trace: Trace, module: int) -> UnitKeep | None:
    runs = exchange_runs(trace, module)
    fills = [run for run in runs if run.exchange == "fill"]
    again = [run for run in fills if trace.ops[run.first].phase == "backward"]
    # In a recomputation that calls it a unit is gathered as in forward, with its buffer held longer.
    if not again or any(call.recompute and call.module == module for call in trace.calls):
        return None
    ops: list[int] = []
    whole: list[tuple[int, int, int, int]] = []
    for fill in again:
        before = fills[: fills.index(fill)]
        if not before or trace.ops[before[-1].first].phase != "forward":
            return None
        emptied = _emptied(trace, before[-1], fill)
        gather = gather_of(runs, fill)
        if not emptied or (gather is not None and gather.first < before[-1].end):
            return None
        whole += emptied
        ops += [*(gather.ops if gather is not None else ()), *fill.ops]
    buffers = tuple(storage for op in ops for storage in trace.ops[op].creates)
    if not _alone(trace, ops, buffers):
        return None
    return UnitKeep(module, tuple(ops), buffers, tuple(whole))


def _emptied(trace: Trace, fill: ExchangeRun, again: ExchangeRun) -> list[tuple[int, int, int, int]]:
    """Return what is emptied after a fill and gets its memory for the next one; nothing if it is another."""
    found = []
    for number in dict.fromkeys(storage for op in again.ops for storage in trace.ops[op].writes):
        resizes = trace.storages[number].resizes
        places = [n for n, (time, size) in enumerate(resizes) if size and again.first <= time <= again.end]
        if len(places) != 1 or places[0] < 2:
            return []
        (first, size), (emptied, nothing), (filled, same) = resizes[places[0] - 2 : places[0] + 1]
        if nothing or size != same or first > fill.end:
            return []
        found.append((number, emptied, filled, size))
    return found


def _alone(trace: Trace, ops: Collection[int], buffers: Iterable[int]) -> bool:
    """Whether nothing else uses what a unit's gathers make, so that nothing misses it."""
    gone = set(ops)
    return all(
        not trace.storages[storage].persistent and gone.issuperset(trace.readers[storage])
        for storage in buffers
    )


def keep_units(trace: Trace, keeps: Collection[UnitKeep]) -> Trace:
    """Return the trace of the step in which these units stay whole after forward."""
    if not keeps:
        return trace
    new = _Fewer(trace, keeps)
    storages = tuple(new.storage(n) for n in range(len(trace.storages)) if n not in new.buffers)
    ops = tuple(new.surviving_ops())
    used = dict.fromkeys(op.signature for op in ops)
    signature = {old: number for number, old in enumerate(used)}
    found = replace(
        trace,
        signatures=tuple(trace.signatures[old] for old in used),
        ops=tuple(replace(op, signature=signature[op.signature]) for op in ops),
        storages=storages,
        modules=tuple(
            replace(
                one,
                parameters=new.numbers(one.parameters),
                buffers=new.numbers(one.buffers),
                gathered=new.numbers(one.gathered),
            )
            for one in trace.modules
        ),
        calls=tuple(
            replace(
                call,
                forward_start=new.time(call.forward_start),
                forward_end=new.time(call.forward_end),
                backward_start=new.time(call.backward_start),
                backward_end=new.time(call.backward_end),
                body_start=new.time(call.body_start),
                body_end=new.time(call.body_end),
            )
            for call in trace.calls
        ),
        releases=tuple(new.releases()),
    )
    # Of the runs that were not recorded only that they did the same is known.
    found = replace(found, steps=replace(found.steps, peaks=()))
    if trace.observed_peak_bytes is None:
        return found
    # What the recorder would have seen: the bytes that are asked for, without workspaces.
    alive = simulate(
        replace(found, signatures=tuple(replace(s, workspace_bytes=0) for s in found.signatures))
    )
    return replace(found, observed_peak_bytes=alive.peak_bytes)


class _Fewer:
    """Where ops and storages are in the trace without some of them."""

    def __init__(self, trace: Trace, keeps: Collection[UnitKeep]) -> None:
        self._trace = trace
        self._gone = sorted(op for keep in keeps for op in keep.ops)
        self._ops = set(self._gone)
        self.buffers = {storage for keep in keeps for storage in keep.buffers}
        self._fewer = sorted(self.buffers)
        self._whole: dict[int, list[tuple[int, int]]] = {}
        for keep in keeps:
            for number, emptied, filled, _ in keep.whole:
                self._whole.setdefault(number, []).append((emptied, filled))

    def time(self, time: int) -> int:
        """Return the new number of an op, or of the one that follows if it is gone; -1 stays -1."""
        return time - bisect_left(self._gone, time)

    def numbers(self, storages: Iterable[int]) -> tuple[int, ...]:
        """Return the new numbers of storages."""
        return tuple(one - bisect_left(self._fewer, one) for one in storages)

    def storage(self, number: int) -> Storage:
        """Return a storage at its new times; one of a kept unit is not emptied after forward."""
        one = self._trace.storages[number]
        dropped = {time for pair in self._whole.get(number, ()) for time in pair}
        return replace(
            one,
            producer=self.time(one.producer),
            start=self.time(one.start),
            end=None if one.end is None else self.time(one.end),
            holders=tuple(
                Interval(
                    hold.holder, self.time(hold.start), None if hold.end is None else self.time(hold.end)
                )
                for hold in one.holders
            ),
            resizes=tuple((self.time(time), size) for time, size in one.resizes if time not in dropped),
            born=self.time(one.born),
        )

    def surviving_ops(self) -> Iterator[Op]:
        """Yield the ops that are left, with what they wait for."""
        waits = _Waits(self._trace, self._ops)
        for number, op in enumerate(self._trace.ops):
            found = waits.of(number)
            if number not in self._ops:
                yield replace(
                    op,
                    forward_op=self.time(op.forward_op),
                    reads=self.numbers(op.reads),
                    writes=self.numbers(op.writes),
                    creates=self.numbers(op.creates),
                    waits_for=tuple(sorted(map(self._waited_for, found))),
                )

    def _waited_for(self, op: int) -> int:
        total = len(self._trace.ops)
        return self.time(op) if op >= 0 else self.time(op + total) - (total - len(self._gone))

    def releases(self) -> Iterator[int]:
        """Yield what is freed or made smaller, in order."""
        seen: Counter[int] = Counter()
        for storage in self._trace.releases:
            if storage in self.buffers:
                continue
            if storage in self._whole:
                smaller = _times_smaller(self._trace.storages[storage])
                place = seen[storage]
                seen[storage] += 1
                if place < len(smaller) and any(smaller[place] == e for e, _ in self._whole[storage]):
                    continue
            yield self.numbers((storage,))[0]


class _Waits:
    """What ops wait for if some are gone.

    A stream that was told to wait for an event does so with whatever comes next on it. What a queue has
    waited for before is not noted again, so that what was implied by an op that is gone has to be found.
    """

    def __init__(self, trace: Trace, gone: Collection[int]) -> None:
        self._trace, self._gone = trace, gone
        self._pending: dict[tuple[str, str], set[int]] = {}
        self._waited: dict[tuple[str, str], int] = {}

    def of(self, number: int) -> set[int]:
        """Return what an op waits for, to be asked for one after the other; of one that is gone, nothing."""
        trace, op = self._trace, self._trace.ops[number]
        waits = {other for other in op.waits_for if other % len(trace.ops) not in self._gone}
        collective = self._is_collective(op)
        # Collectives of one group are issued from several streams: one for gathers, one for reductions.
        stream = (op.queue, op.exchange if collective else "")
        if number in self._gone:
            self._pending.setdefault(stream, set()).update(waits)
            return set()
        waits |= self._pending.pop(stream, set())
        if op.exchange == "reduce" and not collective:
            waits |= {done for other in waits if (done := self._reduction(other, number)) is not None}
        latest: dict[str, int] = {}
        for other in sorted(waits):
            latest[trace.ops[other].queue] = other
        latest.pop(op.queue, None)
        nothing = -len(trace.ops) - 1
        found = {
            queue: other
            for queue, other in latest.items()
            if other > self._waited.get((op.queue, queue), nothing)
        }
        self._waited.update({(op.queue, queue): other for queue, other in found.items()})
        return set(found.values())

    def _reduction(self, waited: int, before: int) -> int | None:
        """Return the collective of the reduction that an op is a part of: its event comes after that."""
        trace = self._trace
        first = trace.ops[waited]
        if waited < 0 or first.exchange != "reduce" or self._is_collective(first):
            return None
        for number in range(waited + 1, before):
            op = trace.ops[number]
            if op.exchange == "reduce" and op.module == first.module and self._is_collective(op):
                return number
        return None

    def _is_collective(self, op: Op) -> bool:
        return self._trace.signatures[op.signature].collective is not None


def _times_smaller(storage: Storage) -> list[int]:
    """Return when a storage is made smaller."""
    sizes = [storage.bytes, *(size for _, size in storage.resizes)]
    return [time for (time, size), before in zip(storage.resizes, sizes) if size < before]
