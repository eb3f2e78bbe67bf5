"""`SizeJudge`: what a step needs with a batch or a sequence of some size, captured, or worked out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.allocator.device_memory import StepMemory
from trainfit.api.choose import plan_step
from trainfit.api.predict import estimate_step
from trainfit.api.request import Request
from trainfit.basics.doing import as_part_of, unheard
from trainfit.costs.estimates import Estimate
from trainfit.costs.pipeline_times import is_pipeline
from trainfit.costs.pricing import price_trace
from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.devices.distinct_ranks import RankPeak
from trainfit.errors import OptionError, TrainfitError
from trainfit.planning.certify import reserve_bytes
from trainfit.planning.plan_results import PlanResult
from trainfit.planning.planner import Planner
from trainfit.planning.requests import bytes_of_budget
from trainfit.plans.plan import Plan
from trainfit.sizing.size_results import SizeName, SizeRow
from trainfit.sizing.size_search import Needed
from trainfit.sizing.trace_growth import TraceGrowth
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.traces.trace_check import LARGEST_TOTAL_BYTES, largest_total_bytes
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces

NOTHING = Needed(False)


@dataclass(frozen=True)
class SizeQuestion:
    """Which size is looked for, and when it counts as one that fits."""

    name: SizeName
    with_plan: bool = False
    budget: int | str | None = None
    multiple_of: int = 1
    seconds_limit: float = 30.0
    """How long to look for one plan."""


class SizeJudge:
    """One step with many sizes. What is captured is captured once."""

    def __init__(self, request: Request, question: SizeQuestion) -> None:
        """Refuse a budget that makes no sense; nothing is captured yet."""
        self.request, self.question = request, question
        self.watch = request.watch
        self.device: Device = request.device
        bytes_of_budget(question.budget, self.device)
        self.growth = TraceGrowth(question.name)
        self.results: dict[int, Estimate | PlanResult] = {}
        self.refused: dict[int, TrainfitError] = {}
        """Sizes that the step does not take, and what it says about them."""
        self.traces: dict[int, Trace] = {}
        self._ranks: dict[int, tuple[RankPeak, ...]] = {}

    @property
    def budget_bytes(self) -> int:
        """What a size has to run in: the budget, or what the device has less its margin."""
        return bytes_of_budget(self.question.budget, self.device)

    def capture(self, size: int) -> Trace:
        """Capture the step with this size, if it was not yet."""
        if size not in self.traces:
            request = self.request.at(**{self.question.name: size})
            with as_part_of(f"{self.question.name} {size:,}"):
                trace = request.trace()
            # What communicates leaves less of the device for tensors.
            self.device = request.device
            self.traces[size], self._ranks[size] = trace, request.ranks
            self.growth.learn(size, trace)
            self.watch.lap("capture")
        return self.traces[size]

    def ask(self, size: int) -> Needed:
        """Return what a size needs, captured and judged as `estimate` or `plan` does."""
        if size in self.refused:
            return NOTHING
        try:
            self.capture(size)
        except TrainfitError as error:
            self._refuse_gaps(size, error)
            self.refused[size] = error
            return NOTHING
        row = self.captured_row(size)
        # A plan uses the budget up: what it needs says nothing about the least that would do.
        return (
            Needed(row.fits)
            if self.question.with_plan and row.fits
            else Needed(row.fits, row.smallest_memory_bytes)
        )

    def _refuse_gaps(self, size: int, error: TrainfitError) -> None:
        """A step that takes larger sizes, but not this one, takes only some: which ones, its author knows."""
        larger = min((taken for taken in self.traces if taken > size), default=None)
        if larger is None:
            return
        name = self.question.name
        raise OptionError(
            f"the step takes {name} {larger:,}, but not {size:,}: {error} If it takes only multiples of a "
            "number, say so: --multiple-of N."
        ) from error

    def result(self, size: int) -> Estimate | PlanResult:
        """Return what `estimate` or `plan` says about a captured size."""
        if size not in self.results:
            asked = self.request
            trace = self.traces[size]
            again = Request(trace, asked.device, costs=asked.costs, allocator=asked.allocator)
            with as_part_of(f"{self.question.name} {size:,}"):
                if self.question.with_plan:
                    limit = self.question.seconds_limit
                    self.results[size] = plan_step(again, self.question.budget, limit)
                else:
                    self.results[size] = replace(estimate_step(again), ranks=self._ranks[size])
            self.watch.lap("solve" if self.question.with_plan else "simulate")
        return self.results[size]

    def captured_row(self, size: int) -> SizeRow:
        """Return a captured size as a row."""
        result = self.result(size)
        if isinstance(result, PlanResult):
            return self._row_of_plan(size, result.trace, result.plan, fits=result.feasible, captured=True)
        memory = result.smallest_memory_bytes
        seconds = None if result.time is None else result.time.step_seconds
        fits = memory <= self.budget_bytes
        return self._row(size, result.trace, fits, True, result.peak_bytes, memory, seconds)

    def _row_of_plan(self, size: int, trace: Trace, plan: Plan, *, fits: bool, captured: bool) -> SizeRow:
        base = plan.baseline_step_seconds
        added = plan.added_seconds / base if base else 0.0
        seconds, memory = plan.step_seconds, plan.memory_bytes
        return self._row(size, trace, fits, captured, plan.peak_bytes, memory, seconds, added)

    def _row(
        self,
        size: int,
        trace: Trace,
        fits: bool,
        captured: bool,
        peak: int,
        memory: int,
        seconds: float | None,
        added: float | None = None,
    ) -> SizeRow:
        # What stages of a pipeline wait for each other, no stage of its own says: better no rate than that.
        seconds = None if is_pipeline(trace) else seconds
        # A function of the user's own may not say how many samples its step has: the batch is what it is.
        samples = trace.samples or (size if self.question.name == "batch" else trace.settings.batch)
        rates = [count / seconds if count and seconds else None for count in (samples, trace.tokens)]
        return SizeRow(size, fits, captured, peak, memory, seconds, rates[0], rates[1], added)

    # What follows is worked out, without a capture.

    def guess(self, size: int) -> Needed | None:
        """Return what a size needs as far as the captured ones say; None if they do not."""
        trace = self.guessed_trace(size)
        if trace is None:
            return None
        total = largest_total_bytes(trace)
        if total > LARGEST_TOTAL_BYTES:
            return Needed(False, float(total))
        if self.question.with_plan:
            planner = Planner(trace, self._roofline(trace), self.request.allocator)
            with unheard():
                smallest = planner.smallest(self.budget_bytes)
            self.watch.lap("solve")
            return Needed(smallest.fits, smallest.memory_bytes)
        memory = self._memory(trace).smallest_bytes
        self.watch.lap("simulate")
        return Needed(memory <= self.budget_bytes, memory)

    def guessed_peak(self, size: int) -> Needed | None:
        """Return the most bytes that a size has alive at once, which it needs in any case."""
        trace = self.guessed_trace(size)
        if trace is None or largest_total_bytes(trace) > LARGEST_TOTAL_BYTES:
            return None if trace is None else Needed(False)
        peak = simulate(trace).peak_bytes
        return Needed(peak <= self.budget_bytes, peak)

    def guessed_row(self, size: int) -> SizeRow | None:
        """Return a size that is worked out as a row; None if it cannot be."""
        trace = self.guessed_trace(size)
        if trace is None:
            return None
        memory = self._memory(trace)
        timed = self.question.with_plan or self.device.has_speed
        table = self._roofline(trace) if timed else None
        seconds = None if table is None else schedule(trace, table).step_seconds
        peak, least = memory.timeline.peak_bytes, memory.smallest_bytes
        set_aside = reserve_bytes(trace, memory.timeline) if self.question.with_plan else 0
        fits = least + set_aside <= self.budget_bytes
        self.watch.lap("simulate")
        if not self.question.with_plan or fits or table is None:
            added = 0.0 if self.question.with_plan else None
            return self._row(size, trace, fits, size in self.traces, peak, least, seconds, added)
        planner = Planner(trace, table, self.request.allocator)
        found = planner.plan(self.budget_bytes, seconds_limit=self.question.seconds_limit)
        self.watch.lap("solve")
        return self._row_of_plan(size, trace, found.promised(), fits=found.fits, captured=size in self.traces)

    def guessed_trace(self, size: int) -> Trace | None:
        """Return the trace of a size, captured or worked out, with the workspaces of the device's kernels."""
        trace = self.growth.at(size)
        if trace is None or size in self.traces or trace.device != "cuda":
            return trace
        # Kernels choose by size: workspaces lie on no line.
        return with_gpu_workspaces(trace, self.device)

    def _memory(self, trace: Trace) -> StepMemory:
        return StepMemory(simulate(trace), self.device, self.request.allocator)

    def _roofline(self, trace: Trace) -> CostTable:
        # What would be measured for a size that is only looked at takes long, and decides nothing.
        return price_trace(trace, self.device)
