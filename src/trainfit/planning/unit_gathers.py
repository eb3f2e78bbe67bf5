"""What units of FSDP inside a region gather when it is recomputed, instead of when autograd comes to them.

A unit's hooks run with the region, also when that is recomputed in backward (torch 2.13):

- A unit that autograd has come to is whole; its hooks leave it alone.
- Any other unit is gathered, if it is not whole, before it computes again. It stays whole, so that nothing is
  left to gather when autograd comes to it. If another unit had begun to gather it, it only has to be filled.
- As in forward, and unlike in backward, the buffer that was gathered into is held until the next unit has
  been filled, or until the outermost unit around it is done.

So the ops are those that the step without a plan runs in backward, at another place. What torch does besides
in less usual arrangements (a unit that is called twice, or gathered by a module outside of the region, or not
needed in backward at all) is not known here: there is no such region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainfit.traces.trace import ModuleCall, Trace

Place = tuple[int, int]
"""A place in the recomputation: before which op of forward, and, there, before which op that has moved."""
BEFORE_ALL = -1


@dataclass(frozen=True, slots=True)
class Gathers:
    """What moves from a region's backward into its recomputation."""

    ops: tuple[Place, ...] = ()
    """Where the ops run that move, in order; the second number of a place is the op itself."""
    starts: dict[int, int] = field(default_factory=dict)
    """Storages that they make, with the op that makes each."""
    ends: dict[int, Place] = field(default_factory=dict)
    """Storages that end in the recomputation: buffers, and parts that are whole now."""
    filled: dict[tuple[int, int], Place] = field(default_factory=dict)
    """Storages that get their memory there, with the time at which they would have got it."""


NOTHING = Gathers()


class _NotKnown(Exception):
    """Torch may do something else than what is known here."""


@dataclass(frozen=True, slots=True)
class ExchangeRun:
    """Ops in a row by which a unit gathers, or is filled."""

    exchange: str
    first: int
    end: int

    @property
    def ops(self) -> range:
        return range(self.first, self.end)


@dataclass(frozen=True, slots=True)
class _GatheredAgain:
    """A unit that the recomputation fills: where, with what it was in backward and in forward."""

    call: ModuleCall
    fill: ExchangeRun
    gather: ExchangeRun | None
    """None: nothing has to be gathered, as among one rank."""
    fill_time: int
    gather_time: int
    holds_buffer: bool = True
    """Whether what was gathered into is held longer than it takes to fill."""


def has_units_inside(trace: Trace, calls: Sequence[int]) -> bool:
    """Whether units of FSDP are called inside of these calls."""
    return any(True for _ in _unit_calls(trace, calls))


def gathers_again(trace: Trace, calls: Sequence[int], insert: int, stop: int) -> Gathers | None:
    """Return what moves if calls are recomputed before the op `insert`, up to the op `stop` of forward.

    None if that is not known.
    """
    inside = list(_unit_calls(trace, calls))
    if not inside:
        return NOTHING
    if len(calls) > 1:
        return None
    try:
        return _Recomputation(trace, trace.calls[calls[0]], inside, insert, stop).gathers()
    except _NotKnown:
        return None


def _unit_calls(trace: Trace, calls: Sequence[int]) -> Iterator[ModuleCall]:
    around = set(calls)
    end = trace.calls[calls[-1]].body.stop
    for number in range(min(calls) + 1, len(trace.calls)):
        call = trace.calls[number]
        if call.forward_start > end:
            return
        if call.parent in around:
            around.add(number)
            if trace.modules[call.module].unit and not call.recompute and number not in calls:
                yield call


@dataclass
class _Recomputation:
    """One region that is computed again in one backward."""

    trace: Trace
    region: ModuleCall
    units: list[ModuleCall]
    insert: int
    stop: int
    backward: range = field(init=False)

    def __post_init__(self) -> None:
        first = last = self.insert
        ops = self.trace.ops
        while first > 0 and ops[first - 1].phase == "backward":
            first -= 1
        while last < len(ops) and ops[last].phase == "backward":
            last += 1
        self.backward = range(first, last)

    def gathers(self) -> Gathers:
        modules = [unit.module for unit in self.units]
        _demand(len(set(modules)) == len(modules))
        self._check_prefetches(set(modules))
        moved = [one for unit in self.units if (one := self._moved(unit)) is not None]
        moved.sort(key=lambda one: one.fill_time)
        found = Gathers()
        for one, following in zip(moved, (*moved[1:], None)):
            self._add(found, one, following)
        return replace(found, ops=tuple(sorted(place for one in moved for place in self._places(one))))

    def _places(self, one: _GatheredAgain) -> Iterator[Place]:
        """Yield where the ops run by which a unit is gathered and filled."""
        if one.gather is not None and one.gather.first >= self.insert:
            yield from ((one.gather_time, op) for op in one.gather.ops)
        yield from ((one.fill_time, op) for op in one.fill.ops)

    def _reached(self, unit: ModuleCall) -> bool:
        """Whether autograd has come to a unit before the region is recomputed."""
        return 0 <= unit.backward_start <= self.insert

    def _check_prefetches(self, called: set[int]) -> None:
        """Refuse where a hook in the region gathers for a module outside: that would be done in vain."""
        for module, ops in self.trace.unit_ops.items():
            if module not in called:
                for op in ops:
                    if op in self.region.body:
                        issuer = self._issuer(op)
                        _demand(issuer is not None and self._reached(issuer))

    def _issuer(self, op: int) -> ModuleCall | None:
        """Return the unit in whose hooks before its forward an op runs."""
        around = [unit for unit in self.units if unit.forward_start <= op < unit.body.start]
        return around[-1] if around else None

    def _moved(self, unit: ModuleCall) -> _GatheredAgain | None:
        """Return what the recomputation does for a unit; None if that is nothing."""
        trace = self.trace
        blocks = exchange_runs(trace, unit.module)
        _demand(bool(blocks))
        others = [c for c in trace.calls if c.module == unit.module and c.backward_start in self.backward]
        _demand(len(others) <= 1)
        fills = [block for block in blocks if block.exchange == "fill"]
        now = [block for block in fills if block.first in self.backward]
        if not now:
            written = {s for block in fills for op in block.ops for s in trace.ops[op].writes}
            _demand(all(trace.occupied_at(storage, self.insert) for storage in written))
            return None
        _demand(len(now) == 1)
        fill = now[0]
        if fill.first < self.insert or unit.forward_start >= self.stop:
            return None
        # It would be left in the middle of its forward.
        _demand(not self._reached(unit) and unit.forward_end <= self.stop)
        then = next((block for block in fills if block.first in unit_range(unit)), None)
        time = unit.forward_start if then is None else then.first
        found = _GatheredAgain(unit, fill, gather_of(blocks, fill), time, time)
        before = None if then is None else gather_of(blocks, then)
        return found if then is None or before is None else self._as_in_forward(found, then, before)

    def _as_in_forward(self, found: _GatheredAgain, fill: ExchangeRun, gather: ExchangeRun) -> _GatheredAgain:
        """Return a unit with what is known of how it was gathered in forward."""
        trace = self.trace
        buffers = _buffers(trace, gather, fill)
        holds = any((trace.storages[s].end or len(trace.ops)) > fill.end for s in buffers)
        if gather.first not in self.region.body:
            # A unit before the region has begun. Nobody does so now, unless another would have, inside.
            _demand(found.call is self.units[0])
            return replace(found, holds_buffer=holds)
        issuer = self._issuer(gather.first)
        _demand(issuer is not None and not self._reached(issuer))
        return replace(found, gather_time=gather.first, holds_buffer=holds)

    def _add(self, found: Gathers, one: _GatheredAgain, following: _GatheredAgain | None) -> None:
        """Note which storages a unit makes, fills and lets go of."""
        trace, fill, gather = self.trace, one.fill, one.gather
        moves = gather is not None and gather.first >= self.insert
        for op in (*(gather.ops if gather is not None and moves else ()), *fill.ops):
            found.starts.update(dict.fromkeys(trace.ops[op].creates, op))
        for op in fill.ops:
            for storage in trace.ops[op].writes:
                for time, size in trace.storages[storage].resizes:
                    if size and fill.first <= time <= fill.end:
                        found.filled[storage, time] = (one.fill_time, time)
        for storage in _touched(trace, gather, fill):
            end = trace.storages[storage].end
            if gather is not None and storage in _buffers(trace, gather, fill):
                _demand(end is not None and fill.first < end <= fill.end)
                found.ends[storage] = self._buffer_end(one, following)
            elif end is not None and fill.first < end <= fill.end:
                found.ends[storage] = (one.fill_time, end)
            elif end is not None and gather is not None and moves and gather.first < end <= gather.end:
                found.ends[storage] = (one.gather_time, end)
            else:
                _demand(storage not in found.starts)

    def _buffer_end(self, one: _GatheredAgain, following: _GatheredAgain | None) -> Place:
        if not one.holds_buffer:
            return one.fill_time, one.fill.end
        around = [unit for unit in self.units if one.call.forward_start in unit_range(unit)]
        outermost = next(unit for unit in (*around, one.call) if not self._reached(unit))
        done = (outermost.forward_end, BEFORE_ALL)
        return done if following is None else min(done, (following.fill_time, following.fill.end))


def _demand(known: bool) -> None:
    if not known:
        raise _NotKnown


def unit_range(call: ModuleCall) -> range:
    """Return the ops of a unit's call with those of its hooks."""
    return range(call.forward_start, call.forward_end)


def exchange_runs(trace: Trace, module: int) -> list[ExchangeRun]:
    """Return what gathers or fills a unit, in the order of the step."""
    found: list[ExchangeRun] = []
    for op in trace.unit_ops.get(module, ()):
        exchange = trace.ops[op].exchange
        if found and found[-1].exchange == exchange and found[-1].end == op:
            found[-1] = replace(found[-1], end=op + 1)
        else:
            found.append(ExchangeRun(exchange, op, op + 1))
    return found


def gather_of(blocks: list[ExchangeRun], fill: ExchangeRun) -> ExchangeRun | None:
    """Return what was gathered to be filled in by a block."""
    before = blocks[: blocks.index(fill)]
    return before[-1] if before and before[-1].exchange == "gather" else None


def _buffers(trace: Trace, gather: ExchangeRun, fill: ExchangeRun) -> set[int]:
    """Return what was gathered into."""
    made = {storage for op in gather.ops for storage in trace.ops[op].creates}
    return made & {storage for op in fill.ops for storage in trace.ops[op].reads}


def _touched(trace: Trace, gather: ExchangeRun | None, fill: ExchangeRun) -> set[int]:
    ops = (*(gather.ops if gather is not None else ()), *fill.ops)
    used = {s for op in ops for s in (*trace.ops[op].reads, *trace.ops[op].creates)}
    return {storage for storage in used if not trace.storages[storage].persistent}
