"""`fit`: what to change so that a step fits on a device, and runs as fast as it can there."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.api.model_depth import model_depth
from trainfit.api.ranks_compared import check_cluster
from trainfit.api.request import Build, Request
from trainfit.api.stage_notes import stage_notes
from trainfit.basics.doing import Progress, doing, heard_by
from trainfit.basics.units import format_bytes
from trainfit.capturing.metadata import MetadataOracle
from trainfit.changes.change import NotPossible, StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.kinds.over_a_mesh import refuse_mesh
from trainfit.changes.step_with_changes import made_to, options_with
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.errors import BudgetTooSmall, OptionError, TrainfitError
from trainfit.fitting.fit_results import FitResult
from trainfit.fitting.shallow_steps import ShallowSteps
from trainfit.fitting.way_candidates import Candidates
from trainfit.fitting.way_search import WaySearch
from trainfit.models.recipe import StepOptions
from trainfit.planning.requests import budget_notes, bytes_of_budget
from trainfit.plans.ways import OTHER_NUMERICS
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace


def fit(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    budget: int | str | None = None,
    options: StepOptions | None = None,
    task: str | None = None,
    keep_numerics: bool = False,
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    seconds_limit: float = 30.0,
    progress: Progress | None = None,
) -> FitResult:
    """Return ways to run a step within a budget, the fastest first.

    Each is a combination of changes (a checkpointing plan, smaller batches, loss in chunks, optimizer, dtype,
    the allocator's setting) that was captured together, with the lines of code that make them. None of them
    is beaten by another that changes results no more, does no more things differently and is no slower.
    `keep_numerics` leaves out what makes the results different numbers than rounding does.

    The samples of a step stay the same: smaller batches are accumulated, and divided among the devices of a
    `cluster` with a mesh, where built-in and `hf:` models may be sharded. `budget` is as in `trainfit.plan`.
    """
    with heard_by(progress):
        asked = Ask(target, device, options or StepOptions(), task, allocator, cluster)
        return fit_step(asked, budget, keep_numerics, seconds_limit)


def refuse_nothing_fits(result: FitResult) -> None:
    """Raise `BudgetTooSmall` if no way fits."""
    if result.ways:
        return
    least = min((result.as_it_is, *result.nearest), key=lambda way: way.memory_bytes)
    raise BudgetTooSmall(
        f"nothing that was tried fits into {format_bytes(result.budget_bytes)}. The least without a plan is "
        f"{format_bytes(least.memory_bytes)}, with {least.words}.",
        least.memory_bytes,
    )


@dataclass
class Ask:
    """A step that is captured again and again, with one change or another."""

    target: str | Build
    device: str | Device
    options: StepOptions
    task: str | None
    allocator: str | AllocatorOptions | None
    cluster: Cluster | None = None
    """The devices that the step may be divided among, as a mesh."""
    impossible: dict[str, str] = field(default_factory=dict)
    """What could not be made, and why."""
    _known_calls: MetadataOracle | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be captured again."""
        if isinstance(self.target, Trace):
            raise OptionError("fit captures the step with every change, and a trace is captured already.")
        if self.cluster is None:
            return
        check_cluster(self.target, self.cluster, worst_rank=False)
        refuse_mesh(self.cluster)
        if self.request().found().kind not in ("built-in", "hf"):
            raise OptionError(
                "--mesh: fit divides built-in and hf: models. What your own function does on a mesh, "
                "estimate and plan tell."
            )

    def request(self, changes: Sequence[StepChange] = (), more: Mapping[str, Any] | None = None) -> Request:
        """Return the question about the step with these changes, and further settings of its model."""
        options = options_with(self.options, changes)
        return Request(
            self.target,
            self.device,
            replace(options, set={**options.set, **more}) if more else options,
            self.task,
            allocator=self.allocator,
            cluster=next((change.cluster for change in changes if change.cluster is not None), None),
            changed=made_to(changes),
        )

    def trace(self, request: Request) -> Trace:
        """Capture a step, with what is known of its operators from captures before."""
        if self._known_calls is None:
            self._known_calls = MetadataOracle(request.device.kind)
        return request.trace(oracle=self._known_calls)

    def captured(self, changes: Sequence[StepChange]) -> tuple[Trace, CostTable] | None:
        """Capture and price the step with changes; None if they cannot be made, and why is remembered."""
        request = self.request(changes)
        try:
            trace = self.trace(request)
        except TrainfitError as error:
            self.impossible[_names(changes)] = _reason(error)
            return None
        for change in changes:
            reason = change.refused_by(trace)
            if reason is not None:
                self.impossible[_names(changes)] = reason
                return None
        return trace, request.price(trace)

    def captured_with(
        self, setting: str, changes: Sequence[StepChange], value: int
    ) -> tuple[Trace, CostTable] | None:
        """Capture and price the step with changes of a model with another setting; None if that fails."""
        request = self.request(changes, {setting: value})
        try:
            trace = self.trace(request)
        except TrainfitError:
            return None
        return None if any(change.refused_by(trace) for change in changes) else (trace, request.price(trace))

    def takes(self, more: dict[str, object]) -> bool:
        """Whether the target can be built with such options."""
        return self.request().takes(more)


def _names(changes: Sequence[StepChange]) -> str:
    return ", ".join(change.name for change in changes)


def _reason(error: BaseException) -> str:
    """Return why a change cannot be made: what it says itself, or the first line of what went wrong."""
    found: BaseException | None = error
    seen: set[int] = set()  # what was raised in turn may lead back to itself
    while found is not None and id(found) not in seen:
        if isinstance(found, NotPossible):
            return str(found)
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return str(error).splitlines()[0]


def _shallow_steps(asked: Ask, request: Request, trace: Trace, candidates: Candidates) -> ShallowSteps | None:
    """Return what works steps out from a model with few layers; None if this model is not of that sort."""
    depth, base = model_depth(request.resolved), candidates.known_outlook(())
    if depth is None or base is None:
        return None
    doing("capturing a model with fewer layers")
    setting, layers = depth
    return ShallowSteps.of(partial(asked.captured_with, setting), layers, trace, base)


def fit_step(asked: Ask, budget: int | str | None, keep_numerics: bool, seconds_limit: float) -> FitResult:
    """Capture the step, then look for what to change."""
    if not 0 < seconds_limit < math.inf:
        raise OptionError(f"--seconds must be above zero, got {seconds_limit}.")
    begin = time.monotonic()
    request = asked.request()
    bytes_of_budget(budget, request.device)  # refused before anything is captured
    trace = asked.trace(request)
    device = request.device
    table = request.price(trace)
    candidates = Candidates(asked.captured, bytes_of_budget(budget, device), request.allocator)
    candidates.budget_for = partial(bytes_of_budget, budget)
    candidates.know((), trace, table)
    doing("judging the step as it is")
    base = candidates.unplanned(())
    assert base is not None, "it has just been captured"
    candidates.shallow = _shallow_steps(asked, request, trace, candidates)
    changes = changes_of(UnchangedStep(trace, device, request.resolved.kind, asked.takes, asked.cluster))
    if keep_numerics:
        changes = [change for change in changes if change.made.exactness != OTHER_NUMERICS]
    left = seconds_limit - (time.monotonic() - begin)
    search = WaySearch(candidates, changes, base, left, candidates.least_seconds(changes))
    ways = search.run()
    request.watch.lap("search")
    return FitResult(
        target=trace.target,
        device=device,
        trace=trace,
        budget_bytes=candidates.budget_bytes,
        as_it_is=base,
        fits=candidates.fits(base),
        ways=tuple(ways),
        nearest=() if ways else tuple(search.not_fitting),
        impossible=tuple(asked.impossible.items()),
        looked_at=search.looked_at,
        complete=search.complete,
        warnings=(
            *budget_notes(budget, device),
            *(trace.warnings + table.warnings + stage_notes(request, trace)),
        ),
        seconds=request.watch.seconds,
    )
