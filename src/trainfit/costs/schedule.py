"""When each op runs: the host issues it, and its queue executes it. Queues are simulated, not summed up.

On a GPU a kernel starts when the host has issued it, the kernel before it on its queue is done, and so is
what the trace says that it waits for on other queues. Where kernels are shorter than the host needs to issue
them, the device waits: the step is launch-bound. Where the trace says that the host waits for an op
(`.item()`, `nonzero`), it does. What runs at once and wants the same takes longer (`contention.py`). A step
without communication has two queues: the host's and `compute`. On a CPU the host runs everything itself, one
op after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainfit.costs.contention import computing_delays, link_delays
from trainfit.costs.table import CostTable, Host
from trainfit.operators.recorded_calls import filled_shares, tensors_of
from trainfit.traces.trace import COMPUTE, PHASES, Trace

Seconds = NDArray[np.float64]

LAUNCH_BOUND_SHARE = 0.1
"""A step in which the device waits longer than this share for the host is called launch-bound."""


@dataclass(frozen=True)
class Schedule:
    """Seconds of one step in steady state, op by op. Everything is predicted."""

    trace: Trace
    costs: CostTable
    op_seconds: Seconds
    """By how much the step grows with each op: the device's time, or the host's where the device waits."""
    device_seconds: Seconds
    """What each op keeps the device busy."""
    host_seconds: Seconds
    """What each op keeps the host busy, issuing it."""
    undelayed_seconds: Seconds | None = None
    """What each op would keep the device busy if nothing ran beside it; None if that makes no difference."""

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return float(self.op_seconds.sum())

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase; recomputation in backward counts as backward."""
        phase = np.array([PHASES.index(op.phase) for op in self.trace.ops], dtype=np.int64)
        sums = np.bincount(phase, weights=self.op_seconds, minlength=len(PHASES)) if len(phase) else [0.0] * 3
        return {name: float(seconds) for name, seconds in zip(PHASES, sums)}

    @property
    def busy_seconds(self) -> float:
        """How long the device computes; what other queues do runs beside that."""
        return float(self.device_seconds[self._computes].sum())

    @property
    def _computes(self) -> NDArray[np.bool_]:
        return np.array([op.queue == COMPUTE for op in self.trace.ops], dtype=np.bool_)

    @property
    def computing_seconds(self) -> float:
        """How long the device would compute if nothing else ran beside it."""
        alone = self.device_seconds if self.undelayed_seconds is None else self.undelayed_seconds
        return float(alone[self._computes].sum())

    @property
    def marginal_seconds(self) -> Seconds:
        """By how much the step would grow if each op ran once more: what the busier queue needs for it."""
        if self.costs.host.runs_kernels:
            return self.host_seconds + self.device_seconds
        launch_bound = self.waiting_share > LAUNCH_BOUND_SHARE
        own = np.maximum(self.host_seconds, self.device_seconds) if launch_bound else self.device_seconds
        # Where the host waits for the device, nothing overlaps: its kernel is issued, launched and awaited.
        in_turn = self.host_seconds + self.costs.host.launch + self.device_seconds
        return np.where(_waits(self.trace), in_turn, own)

    @property
    def occupied_seconds(self) -> Seconds:
        """How long each op keeps the host from anything else: to issue it, and to wait for it if it must."""
        awaited = np.where(_waits(self.trace), self.costs.host.launch + self.device_seconds, 0.0)
        return self.host_seconds + awaited

    @property
    def spare_seconds(self) -> float:
        """How much more the host could do at most, before the step takes longer."""
        return max(self.step_seconds - float(self.occupied_seconds.sum()), 0.0)

    @property
    def waiting_share(self) -> float:
        """The share of the step in which the device waits for the host."""
        step = self.step_seconds
        busy = self.busy_seconds + self.exposed_communication_seconds
        return max(0.0, 1.0 - busy / step) if step else 0.0

    @property
    def communication_seconds(self) -> float:
        """How long the collectives of the step take, beside whatever they run."""
        return float(self.device_seconds[_communicates(self.trace)].sum())

    @cached_property
    def exposed_communication_seconds(self) -> float:
        """By how much the step would be shorter if its collectives took no time."""
        communicates = _communicates(self.trace)
        if not communicates.any():
            return 0.0
        alone = self.device_seconds if self.undelayed_seconds is None else self.undelayed_seconds
        free = np.where(communicates, 0.0, alone)
        without = float(_op_seconds(self.trace, self.costs, self.host_seconds, free).sum())
        return max(self.step_seconds - without, 0.0)


def schedule(trace: Trace, costs: CostTable, besides: Seconds | None = None) -> Schedule:
    """Lay the ops of a step out in time; linear in ops. `besides` is more that the host does before each."""
    host = issue_seconds(trace, costs.host)
    if besides is not None:
        host += besides
    alone = _per_op(trace, [cost.seconds for cost in costs.costs])
    device = alone + _delays(trace, costs, host, alone)
    return Schedule(trace, costs, _op_seconds(trace, costs, host, device), device, host, alone)


def with_device_seconds(times: Schedule, device: Seconds) -> Schedule:
    """Return the same ops on a device that needs other times for them."""
    seconds = _op_seconds(times.trace, times.costs, times.host_seconds, device)
    return Schedule(times.trace, times.costs, seconds, device, times.host_seconds)


def queue_ends(times: Schedule) -> Seconds:
    """Return when each op is done on its queue, in seconds from the end of the step before.

    Of a device that is not the host; the last of them is the step's end.
    """
    return _steady_ends(times.trace, times.costs, times.host_seconds, times.device_seconds)


def _delays(trace: Trace, costs: CostTable, host: Seconds, device: Seconds) -> Seconds:
    """Return by how much each op takes longer because of what runs beside it."""
    communicates = _communicates(trace)
    delays = np.zeros(len(device))
    if costs.host.runs_kernels or not communicates.any():
        return delays
    ends = _steady_ends(trace, costs, host, device)
    begin, period = ends - device, float(ends.max(initial=0.0))
    names = [op.queue for op in trace.ops]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    queues = np.array([numbers[name] for name in names], dtype=np.int64)
    if len(set(queues[communicates].tolist())) > 1:
        longest = np.maximum(device[communicates], 1e-12)
        for used in ([cost.node_seconds for cost in costs.costs], [c.network_seconds for c in costs.costs]):
            use = np.minimum(_per_op(trace, used)[communicates] / longest, 1.0)
            found = link_delays(begin[communicates], device[communicates], queues[communicates], use)
            delays[communicates] = np.maximum(delays[communicates], found)
    if costs.taken_share:
        computes = (queues == numbers.get(COMPUTE, -1)) & ~communicates
        longer = device + delays
        delays += computing_delays(begin, longer, communicates, computes, costs.taken_share, period)
    return delays


def _op_seconds(trace: Trace, costs: CostTable, host: Seconds, device: Seconds) -> Seconds:
    """Return by how much the step grows with each op, if they keep the host and their queues busy so long."""
    if costs.host.runs_kernels:
        return np.diff(np.cumsum(host + device), prepend=0.0)
    ends: Seconds = np.maximum.accumulate(_steady_ends(trace, costs, host, device))
    return np.diff(np.maximum(ends, 0.0), prepend=0.0)


def _steady_ends(trace: Trace, costs: CostTable, host: Seconds, device: Seconds) -> Seconds:
    """In steady state the next step is issued while this one runs: simulate two, and take the second."""
    ops = len(trace.ops)
    issue = _Issue(np.tile(host, 2), np.tile(_waits(trace), 2), costs.host.launch)
    launched = np.tile(launches(trace, costs), 2)
    ends = _queue_ends(_Queues.of(trace), issue, np.tile(device, 2), launched)
    steady: Seconds = ends[ops:] - ends[:ops].max(initial=0.0)
    return steady


def launches(trace: Trace, costs: CostTable) -> NDArray[np.bool_]:
    """Return which ops launch a kernel; views and uninitialised memory do not."""
    return _per_op(trace, [cost.kernels > 0 for cost in costs.costs]) > 0


@dataclass(frozen=True)
class _Queues:
    """Two steps in a row, cut into runs of ops on one queue; a run ends where something waits."""

    starts: list[int]
    """The first op of each run."""
    names: list[str]
    """The queue of each run."""
    waits_for: dict[int, list[int]]
    """Ops of other queues that an op, the first of its run, waits for."""

    @classmethod
    def of(cls, trace: Trace) -> _Queues:
        ops = len(trace.ops)
        queues = [op.queue for op in trace.ops] * 2
        waits_for = {n: list(op.waits_for) for n, op in enumerate(trace.ops) if op.waits_for}
        later = {n + ops: [other + ops for other in others] for n, others in waits_for.items()}
        # Before the first of the two there was none.
        waits_for = {n: [other for other in others if other >= 0] for n, others in waits_for.items()} | later
        changes = (n for n in range(1, 2 * ops) if queues[n] != queues[n - 1])
        awaited = (n + 1 for n in np.flatnonzero(np.tile(_waits(trace), 2)).tolist())
        starts = sorted(n for n in {0, *changes, *waits_for, *awaited} if n < 2 * ops)
        return cls(starts, [queues[start] for start in starts], waits_for)


@dataclass(frozen=True)
class _Issue:
    """What the host does for each op: the seconds it takes, and whether it waits for the result."""

    seconds: Seconds
    waits: NDArray[np.bool_]
    launch: float


_SHORT = 24
"""Ops of a run that are added up one by one: below, numpy takes longer to begin than they take in Python."""


def _queue_ends(queues: _Queues, host: _Issue, device: Seconds, launched: NDArray[np.bool_]) -> Seconds:
    """Return when the queue of each op is done with it.

    Within a run, `end[i] = max(issued[i], end[i-1]) + device[i]`, which is a running maximum of `issued -
    work before` plus the work.
    """
    seconds, devices, kernels = host.seconds.tolist(), device.tolist(), launched.tolist()
    waits = host.waits.tolist()
    ends = [0.0] * len(devices)
    host_now = 0.0
    done: dict[str, float] = {}
    for begin, stop, queue in zip(queues.starts, [*queues.starts[1:], len(devices)], queues.names):
        ready = max([done.get(queue, 0.0), *(ends[other] for other in queues.waits_for.get(begin, ()))])
        part = slice(begin, stop)
        if stop - begin < _SHORT:
            columns = zip(seconds[part], devices[part], kernels[part])
            ends[part], host_now = _few_ends(columns, ready, host_now, host.launch)
        else:
            issued = host_now + np.cumsum(host.seconds[part])
            work = np.cumsum(device[part])
            # An op without a kernel never makes its queue wait for the host.
            arrives = np.where(launched[part], issued + host.launch, -np.inf)
            slack = np.maximum(np.maximum.accumulate(arrives - (work - device[part])), ready)
            ends[part], host_now = (work + slack).tolist(), float(issued[-1])
        done[queue] = ends[stop - 1]
        if waits[stop - 1]:
            host_now = max(host_now, done[queue])
    return np.array(ends)


def _few_ends(
    columns: Iterable[tuple[float, float, bool]], ready: float, begin: float, launch: float
) -> tuple[list[float], float]:
    """Return the ends of a run's ops, and when the host has issued them; in the order that numpy adds in."""
    ends, issued, work, slack = [], 0.0, 0.0, ready
    for seconds, device, launched in columns:
        issued += seconds
        work += device
        if launched:
            slack = max(slack, (begin + issued + launch) - (work - device))
        ends.append(work + slack)
    return ends, begin + issued


def issue_seconds(trace: Trace, host: Host) -> Seconds:
    """Return how long the host is busy with each op, besides what it waits for."""
    by_phase = {"forward": host.forward_op, "backward": host.backward_op, "optimizer": host.optimizer_op}
    views = [signature.view for signature in trace.signatures]
    # Recomputation runs Python again, although it happens in backward.
    own = (
        host.view_op if views[op.signature] else host.forward_op if op.recompute else by_phase[op.phase]
        for op in trace.ops
    )
    seconds = np.fromiter(own, dtype=np.float64, count=len(trace.ops))
    seconds += host.tensor * _per_op(trace, tensors_of(trace.signatures))
    filled = filled_shares(trace.signatures, host.cache_bytes) if host.reload or host.rank_reload else []
    if host.reload:
        seconds += host.reload * _per_op(trace, filled)
    if trace.cluster is not None:
        seconds += np.fromiter(
            (
                op.wrapped * host.wrapped_op
                + op.converted * host.conversion
                + (host.unit_op if op.exchange else 0.0)
                for op in trace.ops
            ),
            dtype=np.float64,
            count=len(trace.ops),
        )
        if host.rank_reload:
            calls = (op.wrapped + op.converted + bool(op.exchange) for op in trace.ops)
            of_ranks = np.fromiter(calls, dtype=np.float64, count=len(trace.ops))
            seconds += host.rank_reload * of_ranks * _per_op(trace, filled)
    for call in trace.calls:
        if call.forward_start < len(seconds):
            seconds[call.forward_start] += host.module_call
    return seconds


def _per_op(trace: Trace, per_signature: list[float] | list[int] | list[bool]) -> Seconds:
    numbers = np.fromiter((op.signature for op in trace.ops), dtype=np.int64, count=len(trace.ops))
    found: Seconds = np.asarray(per_signature, dtype=np.float64)[numbers] if len(numbers) else np.zeros(0)
    return found


def _communicates(trace: Trace) -> NDArray[np.bool_]:
    exchanges = [signature.collective is not None for signature in trace.signatures]
    return np.fromiter((exchanges[op.signature] for op in trace.ops), dtype=np.bool_, count=len(trace.ops))


def _waits(trace: Trace) -> NDArray[np.bool_]:
    return np.fromiter((op.host_waits for op in trace.ops), dtype=np.bool_, count=len(trace.ops))
