"""What was measured of every rank beside what was predicted of it; and the real runs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trainfit.basics.doing import as_part_of, doing
from trainfit.basics.user_errors import raise_as_user_error
from trainfit.devices.device_table import Device
from trainfit.errors import StepError, TrainfitError
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.traces.settings import Difference
from trainfit.traces.step_runs import Steps
from trainfit.traces.trace import Trace
from trainfit.verifying.plan_comparison import SameResults, compare_results
from trainfit.verifying.rank_control import RankControl
from trainfit.verifying.rank_links import RankGone
from trainfit.verifying.rank_measuring import RankMemory, measure_rank

_TELLING_SECONDS = 5.0
"""How long the reason may take to arrive when another rank has gone."""


@dataclass(frozen=True)
class RankFound:
    """One rank: predicted and measured; with a plan also whether it changes the results there."""

    rank: int
    predicted: RankMemory
    measured: RankMemory
    runs: int
    """How often the step ran on real tensors."""
    baseline_peak_bytes: int
    """Measured without the plan; if there is none, of the measured step."""
    loss_equal: bool | None = None
    gradients_equal: bool | None = None
    state_equal: bool | None = None
    differences: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What the prediction had to assume."""

    @property
    def error(self) -> float:
        """Relative error of the predicted peak: (predicted - measured) / measured."""
        return (self.predicted.peak_bytes - self.measured.peak_bytes) / max(self.measured.peak_bytes, 1)

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        """Read what another rank has said."""
        lists = {name: tuple(data[name]) for name in ("differences", "not_compared", "warnings")}
        both = {name: RankMemory(**data[name]) for name in ("predicted", "measured")}
        return cls(**{**data, **lists, **both})


@dataclass(frozen=True)
class RankVerification:
    """Predicted against measured on every rank. `seconds` is the wall time of each stage."""

    target: str
    device: Device
    trace: Trace
    """Of the rank that this process is."""
    rank: int
    ranks: tuple[RankFound, ...]
    plan: Plan | None = None
    plan_differences: tuple[Difference, ...] = ()
    """In what the step is not the one that the plan was made for."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> RankFound:
        """The rank whose measured peak is the highest."""
        return max(self.ranks, key=lambda found: found.measured.peak_bytes)

    @property
    def largest_error(self) -> float:
        """The error of the rank whose peak was predicted worst."""
        return max((found.error for found in self.ranks), key=abs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What any rank says, each thing once."""
        return tuple(dict.fromkeys(text for found in self.ranks for text in found.warnings))


def run_rank(
    build: Callable[[], Step],
    predicted: RankMemory,
    steps: Steps,
    control: RankControl,
    *,
    plan: Plan | None,
    eager: bool,
    warnings: tuple[str, ...] = (),
) -> RankFound:
    """Measure this rank's step, with a plan also without it, and compare the results of both."""
    try:
        with as_part_of("the real step" if plan is None else "the real step with the plan"):
            measured, runs = measure_rank(build, steps, control, plan=plan, eager=eager)
        peak, results = measured.peak_bytes, None
        if plan is not None:
            with as_part_of("the real step without the plan"):
                baseline, more = measure_rank(build, steps, control, eager=eager)
            doing("comparing the results of both")
            results = compare_results(build, plan, control.any)
            peak, runs = baseline.peak_bytes, runs + more + results.runs
    except Exception as error:
        _raise_failure_elsewhere(error, control)
        raise_as_user_error(error, "the real step")
    rank = control.cluster.rank
    return RankFound(rank, predicted, measured, runs, peak, **_equalities(results), warnings=warnings)


def _equalities(results: SameResults | None) -> dict[str, Any]:
    if results is None:
        return {}
    return {
        "loss_equal": results.loss.equal,
        "gradients_equal": results.gradients.equal,
        "state_equal": results.state.equal,
        "differences": results.differences,
        "not_compared": results.not_compared,
    }


def _raise_failure_elsewhere(error: BaseException, control: RankControl) -> None:
    """Where this rank only waits for one that has failed, say what has failed there."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, RankGone):
        behind = behind.__cause__ or behind.__context__
    if behind is None or isinstance(error, TrainfitError):
        return
    raise StepError(control.failure(_TELLING_SECONDS) or str(behind)) from error
