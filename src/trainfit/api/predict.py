"""`capture`, `price` and `estimate`: what a step needs, predicted."""

from __future__ import annotations

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.api.request import Build, Request
from trainfit.basics.doing import Measuring, Progress, doing, heard_by
from trainfit.costs.estimates import Estimate, peak_of
from trainfit.costs.late_frees import with_late_frees
from trainfit.costs.pipeline_times import pipeline_times
from trainfit.costs.pricing import CostSource
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import StepTime, summarise
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.errors import TrainfitError
from trainfit.memory.advice import ChangedStep
from trainfit.memory.module_stats import module_stats, with_seconds
from trainfit.models.recipe import StepOptions
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

_WIDE = ("fp32", "bf16-autocast", "fp16-autocast")
_MOST_OPS = 4000
"""Of a step that is captured again for advice: about two seconds."""


def capture(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Capture one steady step of `target` for a device.

    `target` is a name as on the command line, or the function that builds the `Step`. It and the step's `run`
    are executed a few times on tensors without memory. What they do besides computing (files, sockets,
    logging) happens, except that no tensors are written to disk and older files stay as they are.

    `steps` is how many runs of the step are looked at once it is steady; the one with the largest peak is
    recorded. Without it there are as many as it takes: one, or more where something in Python changes from
    run to run.

    With a `cluster`, the step is that of one of its ranks; a `build` with a parameter `mesh` gets the
    cluster's.
    """
    with heard_by(progress):
        return Request(target, device, options, task, steps, cluster=cluster).trace()


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
    with heard_by(None, progress):
        request = Request(trace, device, costs=costs, refresh=refresh)
        return request.price(request.trace())


def estimate(
    target: str | Build | Trace,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Estimate:
    """Predict the peak memory of a step on a device and its time, what they consist of and where they go.

    `allocator` is how torch's CUDA caching allocator is set: `default`, `expandable`, the text of
    `PYTORCH_ALLOC_CONF` or a file with it. With None or `none` only the bytes asked for count.

    With a `cluster`, as in `trainfit.Cluster(world_size=64, mesh=(("dp", 16), ("tp", 4)))`, the step is that
    of one of its ranks. With `worst_rank`, every rank that can differ from the others is captured, and the
    one with the largest peak is shown.
    """
    with heard_by(progress, measuring):
        request = Request(
            target, device, options, task, steps, costs, refresh, allocator, cluster, worst_rank
        )
        return estimate_step(request)


def estimate_step(request: Request) -> Estimate:
    """Predict what a step needs; its time only if something is known about the device's speed."""
    trace = request.trace()
    timeline = simulate(trace)
    stats = module_stats(timeline)
    request.watch.lap("simulate")
    table = step_time = None
    late = timeline
    if request.device.has_speed or request.costs == "measured":
        table = request.price(trace)
        with_late = with_late_frees(schedule(trace, table))
        late = timeline if with_late is trace else simulate(with_late)
        step_time = _time_of(request, trace, table)
        stats = with_seconds(timeline, step_time.module_seconds)
    request.watch.lap("price")
    doing("replaying the allocator")
    memory = StepMemory(late, request.device, request.allocator)
    expandable = memory.with_expandable_segments()
    figures, expandable_bytes = memory.figures, None if expandable is None else expandable.smallest_bytes
    request.watch.lap("simulate")
    fits = request.device.verdict(figures.smallest_memory_bytes) == "fits"
    sixteen_bits = None if fits else _in_sixteen_bits(request, trace)
    return Estimate(
        target=trace.target,
        device=request.device,
        trace=trace,
        timeline=timeline,
        memory=figures,
        allocator=request.allocator,
        expandable_bytes=expandable_bytes,
        peak=peak_of(timeline),
        modules=stats,
        costs=table,
        time=step_time,
        sixteen_bits=sixteen_bits,
        ranks=request.ranks,
        seconds=request.watch.seconds,
    )


def _time_of(request: Request, trace: Trace, table: CostTable) -> StepTime:
    """Return how long the step takes; the stages of a pipeline wait for each other, so all of them count."""
    own, others = schedule(trace, table), request.stages(trace)
    if not others:
        return summarise(own)
    schedules = [own if one is trace else schedule(one, request.price(one)) for one in others]
    number = next(number for number, one in enumerate(others) if one is trace)
    return summarise(own, pipeline_times(schedules), number)


def _in_sixteen_bits(request: Request, trace: Trace) -> ChangedStep | None:
    """Capture the step with 16-bit parameters, where it can be told to have them and that is quick.

    What a model casts to float32 is not in a trace of float32: nothing but a capture says what is saved.
    """
    if trace.settings.dtype not in _WIDE or len(trace.ops) > _MOST_OPS:
        return None
    try:
        changed = request.with_dtype("bf16")
        if changed is None:
            return None
        doing("capturing the step in bf16, for what that would save")
        other = changed.trace()
        table = changed.price(other) if request.device.has_speed and request.costs == "roofline" else None
    except TrainfitError:
        return None  # the step does not run so; the advice is then derived, and says so
    finally:
        request.watch.lap("advise")
    seconds = None if table is None else schedule(other, table).step_seconds
    return ChangedStep(simulate(other).peak_bytes, seconds)
