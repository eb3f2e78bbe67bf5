"""`compare`: one step on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.api.choose import plan_step
from trainfit.api.predict import estimate_step
from trainfit.api.request import Build
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import Measuring, Progress, as_part_of, heard_by
from trainfit.costs.estimates import Estimate
from trainfit.costs.summary import StepTime, summarise
from trainfit.devices.device_table import Device, find_device, known_devices
from trainfit.errors import OptionError
from trainfit.models.recipe import StepOptions
from trainfit.planning.plan_results import PlanResult
from trainfit.renting.compared_rows import comparison_data, device_row, trained_by
from trainfit.renting.found_comparison import DeviceComparison
from trainfit.renting.price_text import Prices, named_prices, read_prices, refuse_unused
from trainfit.renting.run_length import RunLength, read_length
from trainfit.renting.shared_captures import SharedCaptures
from trainfit.report.compared_data import DeviceRow
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

USUAL_DEVICES = (
    *("rtx-4090", "rtx-5090", "l40s", "a100-sxm-40gb", "a100-sxm-80gb"),
    *("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "mi300x-192gb"),
)
"""What is compared if nobody names devices or prices: what is rented most, from small to large."""
ALL = "all"


def compare(
    target: str | Build | Trace,
    devices: Sequence[str | Device] | str | None = None,
    *,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    prices: Mapping[str, float | str] | str | None = None,
    tokens: str | int | None = None,
    epochs: float | None = None,
    samples: str | int | None = None,
    seconds_limit: float = 30.0,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> DeviceComparison:
    """Say on which of several devices a step fits, how fast it is there, and what a whole run costs.

    `devices` are names, files or `Device` objects; a text may have several, with commas, or be `all`. Without
    them it is those with a price, or a usual set. Where the step does not fit, the fastest plan that makes it
    fit is looked for, for at most `seconds_limit` each, and times are those with it.

    `prices` are per hour and device, `{"h100": 2.99}`, or a TOML or JSON file with them. A run is `tokens`
    long, or `epochs` of `samples`; counts may be texts such as `10B`. What costs least and what is fastest is
    named in the result. The step is captured once for all devices on which it does the same.

    With a `cluster` the step is that of one of its ranks (see `trainfit.estimate`), and a price is paid for
    each of them.
    """
    asked = read_prices(prices) if isinstance(prices, str) else named_prices(prices or {}, "prices")
    captures = SharedCaptures(
        target,
        {
            "options": options,
            "task": task,
            "steps": steps,
            "cluster": cluster,
            "worst_rank": worst_rank,
        },
    )
    compared, run = read_devices(devices, asked), read_length(tokens, epochs, samples)
    if not isinstance(prices, str):
        refuse_unused(asked, compared, "prices")
    with heard_by(progress, measuring):
        return compare_devices(captures, compared, asked, run, allocator, seconds_limit)


def compare_devices(
    captures: SharedCaptures,
    devices: Sequence[Device],
    prices: Prices,
    run: RunLength | None = None,
    allocator: str | AllocatorOptions | None = "default",
    seconds_limit: float = 30.0,
) -> DeviceComparison:
    """Ask about each device in turn."""
    watch = Stopwatch()
    rows: list[DeviceRow] = []
    found: list[Estimate | PlanResult] = []
    for number, device in enumerate(devices, start=1):
        with as_part_of(f"{device.name} ({number} of {len(devices)})"):
            request = captures.request(device, allocator=allocator)
            watch.lap("capture")
            answer = estimate_step(request)
            watch.lap("estimate")
            if run is not None:
                run.steps(trained_by(answer.trace))  # refused before anything is planned
            plan = None
            if not answer.fits and device.has_speed:
                plan = plan_step(captures.request(device, allocator=allocator), seconds_limit=seconds_limit)
                watch.lap("plan")
        found += [answer] if plan is None else [answer, plan]
        rows.append(device_row(answer, plan, _time(answer, plan), run, prices.get(device.name)))
    return DeviceComparison(comparison_data(captures.count, found, rows, run, watch.seconds))


def _time(answer: Estimate, plan: PlanResult | None) -> StepTime | None:
    """Return the time of the step as it runs: as it is, or with the plan; None if it does not run."""
    if answer.fits:
        return answer.time
    return summarise(plan.times) if plan is not None and plan.feasible else None


def read_devices(given: Sequence[str | Device] | str | None, prices: Prices) -> tuple[Device, ...]:
    """Return the devices that are meant, each once."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",")]
        if "" in given:
            raise OptionError("--devices: write names with commas between them, as in h100,a100-80gb,l40s.")
    if given is None:
        return tuple(map(find_device, prices or USUAL_DEVICES))
    if len(given) == 1 and isinstance(given[0], str) and given[0].lower() == ALL:
        return known_devices()
    if not given:
        raise OptionError("--devices: there is none to compare; name some, as in h100,a100-80gb,l40s.")
    found: dict[str, Device] = {}
    for name in given:
        device = name if isinstance(name, Device) else find_device(name)
        if device.name in found:
            raise OptionError(f"--devices: {device.name} is there twice; name each once.")
        found[device.name] = device
    return tuple(found.values())
