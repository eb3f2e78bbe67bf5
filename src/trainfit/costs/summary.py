"""Where the time of a step goes: phases, modules, operators, FLOP/s, and what the estimate rests on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from trainfit.costs.collective_costs import COMMUNICATION
from trainfit.costs.overlap import UnitCommunication, unit_communication
from trainfit.costs.pipeline_times import PipelineTimes
from trainfit.costs.schedule import LAUNCH_BOUND_SHARE, Schedule, Seconds
from trainfit.operators.fused_attention import attention_of
from trainfit.operators.matrix_products import products_of
from trainfit.traces.trace import COMPUTE, Trace


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator: seconds on the device, and how they were found."""

    name: str
    calls: int
    seconds: float
    share: float
    """Of what all queues together are busy for: communication may take longer than what it runs beside."""
    flops: int
    bound: str
    """What limits it for most of its time: `compute`, `memory`, `latency` or `nothing`."""
    source: str


@dataclass(frozen=True)
class StepTime:
    """What a step is predicted to take."""

    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    lower_seconds: float
    upper_seconds: float
    """Four of five steps are expected between the two."""
    recompute_seconds: float
    """The part of backward that recomputes forward results."""
    busy_seconds: float
    """How long the device computes; the rest of the step it waits for the host."""
    waiting_share: float
    communication_seconds: float
    """How long collectives take, beside whatever they run."""
    exposed_communication_seconds: float
    """By how much the step would be shorter without them."""
    flops: int
    """Floating-point operations of the step, recomputation included."""
    model_flops: int
    """Those of the matrix products and attention of forward and backward, without recomputation."""
    peak_flops_per_second: float | None
    """The device's peak for the dtype that most of the products are in."""
    samples: int | None
    tokens: int | None
    operators: tuple[OperatorTime, ...]
    """Longest first."""
    sources: dict[str, float]
    """The share of the device's time by source of the figure."""
    uncalibrated: dict[str, float]
    """The share of the step that rests on figures which were never compared with the device, by kind."""
    module_seconds: tuple[tuple[float, float], ...]
    """For each module of the trace, with everything below it: forward and backward seconds."""
    units: tuple[UnitCommunication, ...] = ()
    """The communication of each unit, what is waited for longest first."""
    world_size: int = 1
    copies: int = 1
    """How many copies of the model train at once, each on samples of its own."""
    bubble_seconds: float = 0.0
    """How long this stage of a pipeline stands still for the others."""
    bubble_share: float = 0.0
    """The same of all stages together, as a share of their time."""

    @property
    def uncalibrated_share(self) -> float:
        """The share of the step that rests on figures which were never compared with the device."""
        return sum(self.uncalibrated.values())

    @property
    def launch_bound(self) -> bool:
        """Whether the host cannot issue kernels fast enough."""
        return self.waiting_share > LAUNCH_BOUND_SHARE

    @property
    def flops_per_second(self) -> float:
        """Achieved FLOP/s, recomputation included."""
        return self.flops / self.step_seconds if self.step_seconds else 0.0

    @property
    def model_flops_utilisation(self) -> float | None:
        """The share of the device's peak that goes into the model: MFU."""
        if not self.peak_flops_per_second or not self.step_seconds:
            return None
        return self.model_flops / self.step_seconds / self.peak_flops_per_second

    @property
    def samples_per_second(self) -> float | None:
        """Throughput, where the step says how many samples it trains on."""
        return self.samples / self.step_seconds if self.samples and self.step_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput, where the step says how many tokens it trains on."""
        return self.tokens / self.step_seconds if self.tokens and self.step_seconds else None

    @property
    def total_tokens_per_second(self) -> float | None:
        """Tokens of all copies of the model together."""
        rate = self.tokens_per_second
        return None if rate is None else rate * self.copies

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Tokens of all copies of the model, for each of the devices."""
        rate = self.total_tokens_per_second
        return None if rate is None else rate / self.world_size

    @property
    def total_samples_per_second(self) -> float | None:
        """Samples of all copies of the model together."""
        rate = self.samples_per_second
        return None if rate is None else rate * self.copies

    @property
    def unpriced(self) -> tuple[OperatorTime, ...]:
        """Operators without a formula, priced by their traffic."""
        return tuple(operator for operator in self.operators if operator.source == "bandwidth")


def summarise(schedule: Schedule, stages: PipelineTimes | None = None, stage: int = 0) -> StepTime:
    """Sum a schedule up; of a stage of a pipeline with the time in which it waits for the others."""
    trace = schedule.trace
    phases = schedule.phase_seconds
    step = schedule.step_seconds if stages is None else stages.step_seconds
    cluster = trace.cluster
    uncalibrated = _uncalibrated(schedule)
    width = _width(schedule, uncalibrated)
    recompute = np.array([op.recompute for op in trace.ops], dtype=bool)
    flops = [signature.flops for signature in trace.signatures]
    is_product = [_is_product(trace, number) for number in range(len(trace.signatures))]
    model_flops = sum(
        flops[op.signature] for op in trace.ops if is_product[op.signature] and not op.recompute
    )
    return StepTime(
        step_seconds=step,
        forward_seconds=phases["forward"],
        backward_seconds=phases["backward"],
        optimizer_seconds=phases["optimizer"],
        lower_seconds=step / width,
        upper_seconds=step * width,
        recompute_seconds=float(schedule.op_seconds[recompute].sum()),
        busy_seconds=schedule.busy_seconds,
        waiting_share=_waiting_share(schedule),
        communication_seconds=schedule.communication_seconds,
        exposed_communication_seconds=schedule.exposed_communication_seconds,
        flops=sum(flops[op.signature] for op in trace.ops),
        model_flops=model_flops,
        peak_flops_per_second=_peak(trace, schedule),
        samples=trace.samples,
        tokens=trace.tokens,
        operators=_operators(schedule),
        sources=_sources(schedule),
        uncalibrated=uncalibrated,
        module_seconds=_module_seconds(trace, schedule.op_seconds),
        units=unit_communication(schedule),
        world_size=1 if cluster is None else cluster.world_size,
        copies=1 if cluster is None else cluster.copies,
        bubble_seconds=0.0 if stages is None else stages.bubble_seconds(stage),
        bubble_share=0.0 if stages is None else stages.bubble_share,
    )


def _is_product(trace: Trace, number: int) -> bool:
    signature = trace.signatures[number]
    return bool(products_of(signature)) or attention_of(signature) is not None


def _peak(trace: Trace, schedule: Schedule) -> float | None:
    """Return the peak FLOP/s of the rate at which most of the products run."""
    by_rate: Counter[str] = Counter()
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        if signature.flops and _is_product(trace, op.signature):
            rate = schedule.costs.device.rate_of(signature.inputs[0].dtype, trace.tf32)
            by_rate[rate] += signature.flops
    return schedule.costs.device.flops.get(by_rate.most_common(1)[0][0]) if by_rate else None


def _operators(schedule: Schedule) -> tuple[OperatorTime, ...]:
    trace = schedule.trace
    count = len(trace.signatures)
    numbers = np.fromiter((op.signature for op in trace.ops), dtype=np.int64, count=len(trace.ops))
    calls = np.bincount(numbers, minlength=count)
    seconds = np.bincount(numbers, weights=schedule.device_seconds, minlength=count)
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for number, signature in enumerate(trace.signatures):
        if not signature.view and calls[number]:
            by_name[signature.name].append(number)
    everything = float(seconds.sum()) or 1.0
    found: list[OperatorTime] = []
    for name, members in by_name.items():
        longest = max(members, key=lambda number: seconds[number])
        cost = schedule.costs.costs[longest]
        total = float(seconds[members].sum())
        found.append(
            OperatorTime(
                name=name,
                calls=int(calls[members].sum()),
                seconds=total,
                share=total / everything,
                flops=int(sum(trace.signatures[n].flops * int(calls[n]) for n in members)),
                bound=cost.bound,
                source=cost.source,
            )
        )
    return tuple(sorted(found, key=lambda operator: -operator.seconds))


def _sources(schedule: Schedule) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for op, seconds in zip(schedule.trace.ops, schedule.device_seconds.tolist()):
        if op.queue == COMPUTE:  # the rest runs beside it
            totals[schedule.costs.costs[op.signature].source] += seconds
    busy = schedule.busy_seconds or 1.0
    return {source: seconds / busy for source, seconds in totals.items() if seconds}


HOST = "the host"
"""What a launch-bound step rests on, among the kinds of operators."""


def _uncalibrated(schedule: Schedule) -> dict[str, float]:
    """Return the share of the step by kind of what is not calibrated, the largest first."""
    costs, waiting = schedule.costs, _waiting_share(schedule)
    totals: defaultdict[str, float] = defaultdict(float)
    if costs.uncalibrated:
        for op, seconds in zip(schedule.trace.ops, schedule.device_seconds.tolist()):
            kind = costs.costs[op.signature].kind
            if kind in costs.uncalibrated and op.queue == COMPUTE:
                totals[kind] += seconds
    exposed = schedule.exposed_communication_seconds / (schedule.step_seconds or 1.0)
    part = (1.0 - waiting - exposed) / (schedule.busy_seconds or 1.0)
    shares = {kind: seconds * part for kind, seconds in totals.items()}
    if COMMUNICATION in costs.uncalibrated and exposed:
        shares[COMMUNICATION] = exposed
    if costs.host_uncertainty is not None and waiting > LAUNCH_BOUND_SHARE:
        shares[HOST] = waiting
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _width(schedule: Schedule, uncalibrated: dict[str, float]) -> float:
    """Return the factor that four of five steps are within: each part of the step has its own.

    They are averaged by their share of the step, as logarithms: parts rarely err all in one direction, but
    what is wrong with one kernel is wrong with all calls of it.
    """
    costs = schedule.costs
    host = uncalibrated.get(HOST, 0.0)
    others = sum(uncalibrated.values()) - host
    logarithm = (
        (1.0 - host - others) * math.log1p(costs.uncertainty)
        + others * math.log1p(costs.uncalibrated_uncertainty)
        + host * math.log1p(costs.host_uncertainty or 0.0)
    )
    return math.exp(logarithm)


def _waiting_share(schedule: Schedule) -> float:
    return 0.0 if schedule.costs.host.runs_kernels else schedule.waiting_share


def _module_seconds(trace: Trace, op_seconds: Seconds) -> tuple[tuple[float, float], ...]:
    """Return forward and backward seconds of each module, those below it included."""
    count = len(trace.modules)
    module = np.fromiter((op.module for op in trace.ops), dtype=np.int64, count=len(trace.ops))
    columns: list[list[float]] = []
    for phase in ("forward", "backward"):
        inside = np.fromiter((op.phase == phase for op in trace.ops), dtype=bool, count=len(trace.ops))
        inside &= module >= 0
        sums = np.bincount(module[inside], weights=op_seconds[inside], minlength=count)
        columns.append(sums.tolist())
    # Children come after their parents, so one pass from the end adds every module to its ancestors.
    for number in reversed(range(count)):
        parent = trace.modules[number].parent
        if parent >= 0:
            for column in columns:
                column[parent] += column[number]
    return tuple(zip(columns[0], columns[1]))
