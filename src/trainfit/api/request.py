"""What every question about a step begins with: its device, a trace that fits it, its prices, a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from trainfit import capturing
from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import named_options
from trainfit.api.ranks_compared import check_cluster, worst_of
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import as_part_of
from trainfit.capturing.importing import imported_for
from trainfit.capturing.random_stream import followed_if
from trainfit.costs.pricing import CostSource, check_source, price_trace
from trainfit.costs.table import CostTable
from trainfit.devices.architectures import same_kernels
from trainfit.devices.communicator_buffers import with_communicators
from trainfit.devices.device_table import Device, find_device
from trainfit.devices.distinct_ranks import MOST_CAPTURES, RankPeak, pipeline_ranks
from trainfit.errors import OptionError, StepError, TrainfitError
from trainfit.models.recipe import Dtype, StepOptions
from trainfit.steps.step import Step
from trainfit.targets import Target, load
from trainfit.targets.executed_code import executed_for
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces

Build = Callable[..., Step]

_MOST_STEPS = 10_000


def default_device() -> str:
    """Return the device of this machine: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Request:
    """A step on a device. What makes no sense about it is refused before the step is captured."""

    def __init__(
        self,
        target: str | Build | Trace,
        device: str | Device = "cpu",
        options: StepOptions | None = None,
        task: str | None = None,
        steps: int | None = None,
        costs: CostSource = "roofline",
        refresh: bool = False,
        allocator: str | AllocatorOptions | None = "default",
        cluster: Cluster | None = None,
        worst_rank: bool = False,
        changed: Callable[[Step], Step] | None = None,
    ) -> None:
        """Find the device and start the stopwatch; `trainfit.estimate` says what the rest means.

        `changed` makes another step of the one that the target builds, before it is captured.
        """
        self.watch = Stopwatch()
        self.target = target
        self._named = device
        self.device = device if isinstance(device, Device) else find_device(device)
        self.allocator = named_options(allocator)
        self.costs = costs
        check_source(costs, self.device)
        if steps is not None and (type(steps) is not int or not 1 <= steps <= _MOST_STEPS):
            raise OptionError(f"--steps must be a whole number from 1 to {_MOST_STEPS:,}, got {steps!r}.")
        self._options, self._task, self._steps, self._refresh = options, task, steps, refresh
        self.cluster, self._worst_rank = cluster, worst_rank
        self._changed = changed
        self.ranks: tuple[RankPeak, ...] = ()
        """Where the worst rank is asked for: those that were looked at."""
        check_cluster(target, cluster, worst_rank)

    @cached_property
    def resolved(self) -> Target:
        """What the target names, with the options that it gets on this device."""
        assert not isinstance(self.target, Trace), "a trace is captured already"
        options = replace(self.options, device=self.device.kind, cluster=self.cluster)
        return load(self.target, options, self._task)

    @property
    def options(self) -> StepOptions:
        """What was asked of the step."""
        options = self._options
        if options is not None and not isinstance(options, StepOptions):
            raise OptionError(
                "options is a trainfit.StepOptions, as in options=trainfit.StepOptions(batch=8), "
                f"got {type(options).__name__}."
            )
        return options or StepOptions()

    def at(self, **sizes: int) -> Request:
        """Return the same request for another batch or sequence."""
        return Request(
            self.target,
            self._named,
            replace(self.options, **sizes),  # type: ignore[arg-type]
            self._task,
            self._steps,
            self.costs,
            self._refresh,
            self.allocator,
            self.cluster,
            self._worst_rank,
        )

    def changed_by(self, options: StepOptions, changed: Callable[[Step], Step] | None) -> Request:
        """Return the same request for another step, made of this one."""
        rest = self._task, self._steps, self.costs, self._refresh, self.allocator, self.cluster
        return Request(self.target, self._named, options, *rest, changed=changed)

    def on_processor(self) -> Request:
        """Return the same step for this machine's processor, which has to be able to build it."""
        if self.device.kind == "cpu":
            return self
        return Request(self.target, "cpu", self.options, self._task)

    @property
    def build(self) -> Build:
        """What builds the step, changed if it is to be."""
        build, change = self.resolved.build, self._changed
        return build if change is None else lambda: change(build())

    def takes(self, more: dict[str, object]) -> bool:
        """Whether the target can be built with such options beside its own."""
        options = replace(self.options, device=self.device.kind, **more)  # type: ignore[arg-type]
        try:
            load(self.target, options, self._task)  # type: ignore[arg-type]
        except TrainfitError:
            return False
        return True

    def found(self) -> Target:
        """Return what the target names, loaded as for a capture."""
        with executed_for(self.device.kind), imported_for(self.device, self.cluster):
            return self.resolved

    def trace(self, cluster: Cluster | None = None, **how: Any) -> Trace:
        """Return the trace of the step: captured now, unless it is one already, which has to fit the device.

        From then on the device has less for tensors, if the step communicates: NCCL takes some of it.
        `cluster` says more exactly which rank it is, in a process that knows. `how` are further arguments of
        `capturing.capture`.
        """
        if isinstance(self.target, Trace):
            _refuse_other_device(self.target, self.device)
            on_gpu = self.device.kind == "cuda"  # where kernels differ from device to device
            trace = with_gpu_workspaces(self.target, self.device) if on_gpu else self.target
        elif self._worst_rank and self.cluster is not None:
            trace, self.ranks = worst_of(self.cluster, partial(self._captured, **how))
        else:
            mesh = self.cluster.mesh if self.cluster is not None else ()
            trace = self._captured(self.cluster if cluster is None else replace(cluster, mesh=mesh), **how)
        self.device = with_communicators(self.device, trace)
        self.watch.lap("capture")
        return trace

    def stages(self, trace: Trace) -> tuple[Trace, ...]:
        """Return the steps of all stages of the pipeline that a captured rank is in, its own among them.

        Empty if it is in none, or is a trace of which no other ranks can be captured.
        """
        if isinstance(self.target, Trace) or self.cluster is None or not (ranks := pipeline_ranks(trace)):
            return ()
        own = trace.cluster.rank if trace.cluster is not None else 0
        found: list[Trace] = []
        for rank in ranks[:MOST_CAPTURES]:
            with as_part_of(f"the stage of rank {rank}"):
                found.append(trace if rank == own else self._captured(replace(self.cluster, rank=rank)))
        self.watch.lap("capture")
        return tuple(found)

    def _captured(self, cluster: Cluster | None, **how: Any) -> Trace:
        with executed_for(self.device.kind):
            # A file may read RANK, ask for a GPU, or make the process group, when it is imported.
            with imported_for(self.device, cluster):
                target = self.resolved
            with followed_if(target.decides_by_draws):
                return capturing.capture(
                    self.build,
                    device=self.device,
                    target=target.name,
                    settings=target.settings,
                    steps=self._steps,
                    cluster=cluster,
                    **how,
                )

    def with_dtype(self, dtype: Dtype) -> Request | None:
        """Return the same question about the step in another dtype; None if a flag cannot change it."""
        if isinstance(self.target, Trace) or self.cluster is not None:
            return None
        if self.resolved.kind not in ("built-in", "hf"):
            return None
        options = replace(self._options or StepOptions(), dtype=dtype)
        return Request(
            *(self.target, self.device, options, self._task, self._steps, self.costs, self._refresh),
            self.allocator,
        )

    def price(self, trace: Trace) -> CostTable:
        """Return what every distinct operator of the trace costs on the device."""
        table = price_trace(trace, self.device, costs=self.costs, refresh=self._refresh)
        self.watch.lap("price")
        return table


def _refuse_other_device(trace: Trace, device: Device) -> None:
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
