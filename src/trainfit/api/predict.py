"""`capture`, `price` and `estimate`: what a step needs, predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trainfit import capturing
from trainfit.architectures import same_kernels
from trainfit.costs.pricing import CostSource, Measuring, check_source, price_trace
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import summarise
from trainfit.costs.table import CostTable
from trainfit.devices import Device, find_device
from trainfit.errors import OptionError, StepError
from trainfit.estimates import Estimate, peak_of
from trainfit.models.recipe import StepOptions
from trainfit.module_stats import module_stats
from trainfit.simulate import simulate
from trainfit.step import Step
from trainfit.targets import Target, load
from trainfit.trace import Trace

Build = Callable[..., Step]
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


def capture(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Capture one steady step of `target` for a device.

    `target` is a name as on the command line, or the function that builds the `Step`. It and the step's `run`
    are executed a few times on tensors without memory. What they do besides computing (files, sockets,
    logging) happens, except that no tensors are written to disk and older files stay as they are.

    `steps` is how many runs of the step are looked at once it is steady; the one with the largest peak is
    recorded. Without it there are as many as it takes: one, or more where something in Python changes from
    run to run.
    """
    check_steps(steps)
    found = device if isinstance(device, Device) else find_device(device)
    resolved = resolve(target, found, options, task)
    return capturing.capture(
        resolved.build,
        device=found,
        target=resolved.name,
        settings=resolved.settings,
        steps=steps,
        progress=progress,
    )


_MOST_STEPS = 10_000


def check_steps(steps: int | None) -> None:
    """Refuse a number of runs that makes no sense."""
    if steps is not None and (type(steps) is not int or not 1 <= steps <= _MOST_STEPS):
        raise OptionError(f"--steps must be a whole number from 1 to {_MOST_STEPS:,}, got {steps!r}.")


def price(
    trace: Trace,
    device: str | Device = "cpu",
    *,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Measuring | None = None,
) -> CostTable:
    """Return what every distinct operator of a trace costs on a device.

    `roofline` prices by formulas, on any device. `measured` runs each operator on this machine, which has to
    be the device, and remembers the result on disk; `refresh` measures again.
    """
    found = device if isinstance(device, Device) else find_device(device)
    _refuse_other_kind(trace, found)
    return price_trace(trace, found, costs=costs, refresh=refresh, progress=progress)


def estimate(
    target: str | Build | Trace,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Estimate:
    """Predict the peak memory of a step on a device and its time, what they consist of and where they go."""
    begin = time.perf_counter()
    found = device if isinstance(device, Device) else find_device(device)
    check_source(costs, found)
    trace = traced(target, found, options, task, steps, progress)
    captured = time.perf_counter()
    timeline = simulate(trace)
    stats = module_stats(timeline)
    simulated = time.perf_counter()
    table = None
    step_time = None
    if found.has_speed or costs == "measured":
        table = price_trace(trace, found, costs=costs, refresh=refresh, progress=measuring)
        step_time = summarise(schedule(trace, table))
        stats = tuple(
            replace(module, forward_seconds=forward, backward_seconds=backward)
            for module, (forward, backward) in zip(stats, step_time.module_seconds)
        )
    end = time.perf_counter()
    return Estimate(
        target=trace.target,
        device=found,
        trace=trace,
        timeline=timeline,
        peak=peak_of(timeline),
        modules=stats,
        costs=table,
        time=step_time,
        seconds={
            "capture": captured - begin,
            "simulate": simulated - captured,
            "price": end - simulated,
            "total": end - begin,
        },
    )


def traced(
    target: str | Build | Trace,
    device: Device,
    options: StepOptions | None,
    task: str | None,
    steps: int | None,
    progress: Progress | None,
) -> Trace:
    """Return the trace of a target, captured now unless it is one already, which has to fit the device."""
    if not isinstance(target, Trace):
        return capture(target, device=device, options=options, task=task, steps=steps, progress=progress)
    _refuse_other_kind(target, device)
    return target


def _refuse_other_kind(trace: Trace, device: Device) -> None:
    if trace.device != device.kind:
        raise StepError(
            f"the trace was captured for {trace.device}, but {device.name} is a {device.kind} device; "
            "capture again for this device."
        )
    if trace.architecture and not same_kernels(trace.architecture, device.architecture):
        raise StepError(
            f"the trace was captured for {trace.architecture}, and the step chooses other kernels on "
            f"{device.name} ({device.architecture or 'unknown architecture'}); capture again for this device."
        )


def resolve(target: str | Build, device: Device, options: StepOptions | None, task: str | None) -> Target:
    """Find what a target names, with the options that it gets on this device."""
    if options is not None and not isinstance(options, StepOptions):
        raise OptionError(
            "options is a trainfit.StepOptions, as in options=trainfit.StepOptions(batch=8), "
            f"got {type(options).__name__}."
        )
    return load(target, replace(options or StepOptions(), device=device.kind), task)
