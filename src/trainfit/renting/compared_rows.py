"""Turn estimates and plans of one step on several devices into what a reader sees of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfit.costs.estimates import Estimate
from trainfit.costs.summary import StepTime
from trainfit.models.parallel.dimensions import MEANINGS
from trainfit.planning.plan_results import PlanResult
from trainfit.renting.run_length import MILLION, RunLength, StepRate
from trainfit.report.compared_data import ComparisonData, DeviceRow, PlanNeeded, RunData
from trainfit.traces.ranks import COPIES, Cluster
from trainfit.traces.settings import describe, settings_json
from trainfit.traces.trace import Trace


def device_row(
    answer: Estimate,
    plan: PlanResult | None,
    time: StepTime | None,
    run: RunLength | None,
    price: float | None,
) -> DeviceRow:
    """Return the row of one device; `time` is of the step as it runs there, None if it does not."""
    rate, run_steps = None, 0
    if time is not None:
        rate = trained_by(answer.trace, time.step_seconds)
        run_steps = run.steps(rate) if run is not None else 0
    needed: PlanNeeded = "not needed"
    if not answer.fits:
        needed = "not looked for" if plan is None else "needed" if plan.feasible else "none fits"
    added = plan.plan.added_seconds if plan is not None and plan.feasible else None
    seconds = (None,) * 3 if time is None else (time.step_seconds, time.lower_seconds, time.upper_seconds)
    whole = [one * run_steps if one is not None and run is not None else None for one in seconds]
    costs = [_cost(rate, one, price) for one in whole]
    return DeviceRow(
        name=answer.device.name,
        usable_bytes=answer.device.usable_bytes,
        verdict=answer.verdict,
        fits=answer.fits,
        peak_bytes=answer.peak_bytes,
        smallest_memory_bytes=answer.smallest_memory_bytes,
        spare_bytes=answer.spare_bytes,
        plan=needed,
        runs=answer.fits or needed == "needed",
        plan_memory_bytes=None if plan is None else plan.plan.memory_bytes,
        plan_regions=None if plan is None else len(plan.plan.regions),
        plan_added_seconds=added,
        plan_added_share=None if added is None or plan is None else _share(added, plan),
        step_seconds=seconds[0],
        lower_seconds=seconds[1],
        upper_seconds=seconds[2],
        launch_bound=time is not None and time.launch_bound,
        tokens_per_second=None if rate is None else rate.per_second(rate.tokens),
        samples_per_second=None if rate is None else rate.per_second(rate.samples),
        run_seconds=whole[0],
        run_lower_seconds=whole[1],
        run_upper_seconds=whole[2],
        price_per_hour=price,
        cost=costs[0],
        cost_lower=costs[1],
        cost_upper=costs[2],
        **_unit_costs(rate, run, price),
    )


def _share(added: float, plan: PlanResult) -> float:
    return added / max(plan.plan.baseline_step_seconds, 1e-12)


def _cost(rate: StepRate | None, seconds: float | None, price: float | None) -> float | None:
    return None if rate is None or seconds is None or price is None else rate.cost_of(seconds, price)


def _unit_costs(rate: StepRate | None, run: RunLength | None, price: float | None) -> dict[str, float | None]:
    names = ("cost_per_million_tokens", "cost_per_million_samples", "cost_per_epoch")
    if rate is None or price is None:
        return dict.fromkeys(names)
    epoch = run.samples if run is not None else None
    return {
        "cost_per_million_tokens": rate.cost_per(MILLION, rate.tokens, price),
        "cost_per_million_samples": rate.cost_per(MILLION, rate.samples, price),
        "cost_per_epoch": None if epoch is None else rate.cost_per(epoch, rate.samples, price),
    }


def trained_by(trace: Trace, seconds: float = 0.0) -> StepRate:
    """Return what a step of all ranks together trains on; the captured one is of one rank."""
    devices = 1 if trace.cluster is None else trace.cluster.world_size
    return StepRate(seconds, trace.samples, trace.tokens, devices, copies_of(trace.cluster))


def copies_of(cluster: Cluster | None) -> int:
    """Return how many copies of the model train at once, each on data of its own.

    Without a mesh every process is one.
    """
    return 1 if cluster is None else cluster.copies


def comparison_data(
    captures: int,
    found: Sequence[Estimate | PlanResult],
    rows: Sequence[DeviceRow],
    run: RunLength | None,
    seconds: dict[str, float],
) -> ComparisonData:
    """Put the rows together, and say which is cheapest and which fastest."""
    trace = found[0].trace
    cluster = trace.cluster
    running = [row for row in rows if row.step_seconds is not None]
    priced = [row for row in running if row.price_per_hour is not None]
    cheapest = min(priced, key=_price_of_a_step, default=None)
    fastest = min(running, key=lambda row: row.step_seconds or 0.0, default=None)
    mesh = () if cluster is None else cluster.mesh or cluster.own_mesh
    return ComparisonData(
        target=trace.target,
        torch=trace.torch,
        seconds=seconds,
        ops=len(trace.ops),
        settings=settings_json(trace.settings),
        warnings=(*_about_copies(cluster), *_about_hosts(rows), *_warnings(found)),
        captures=captures,
        world_size=1 if cluster is None else cluster.world_size,
        mesh=dict(mesh),
        copies=copies_of(cluster),
        run=None if run is None else _run_data(run, trace),
        devices=tuple(rows),
        cheapest=None if cheapest is None else cheapest.name,
        fastest=None if fastest is None else fastest.name,
        description=describe(trace.settings),
    )


def _price_of_a_step(row: DeviceRow) -> float:
    """Every device takes the same number of steps: what one costs decides."""
    assert row.price_per_hour is not None and row.step_seconds is not None
    return row.price_per_hour * row.step_seconds


def _run_data(run: RunLength, trace: Trace) -> RunData:
    epochs = run.epochs if run.samples is not None else None
    return RunData(run.tokens, run.samples, epochs, run.steps(trained_by(trace)), run.words)


def _about_copies(cluster: Cluster | None) -> Iterator[str]:
    """Say what is assumed about a cluster whose mesh does not say it."""
    if cluster is None:
        return
    mesh = cluster.mesh or cluster.own_mesh
    if not mesh and cluster.world_size > 1:
        yield f"each of the {cluster.world_size} processes is taken to train on data of its own"
    others = [name for name, _ in mesh if name not in COPIES | MEANINGS.keys()]
    if others:
        yield (
            f"along {', '.join(others)} the processes are taken to share their data; those that have other "
            f"data are called {', '.join(sorted(COPIES))}"
        )


def _about_hosts(rows: Sequence[DeviceRow]) -> Iterator[str]:
    """Say where a time is not the device's: a better one would wait as long."""
    names = [row.name for row in rows if row.launch_bound]
    if names:
        on = "all devices" if len(names) == len(rows) > 1 else ", ".join(names)
        yield (
            f"launch-bound on {on}: the host decides there how long a step takes, and differences between "
            "devices mean little; a larger batch would use them better"
        )


def _warnings(found: Sequence[Estimate | PlanResult]) -> Iterator[str]:
    """Yield what had to be assumed, each once; what is not said of all devices with their names."""
    said: dict[str, list[str]] = {}
    for one in found:
        for text in one.warnings:
            names = said.setdefault(text, [])
            if one.device.name not in names:
                names.append(one.device.name)
    everywhere = len({one.device.name for one in found})
    for text, names in said.items():
        yield text if len(names) == everywhere else f"{', '.join(names)}: {text}"
