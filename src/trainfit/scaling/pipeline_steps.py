"""Memory and time of a pipeline's stages, worked out from a step without stages, with the bubble.

Stages run one forward and one backward in turn on micro-batches of one sample (`one_forward_one_backward`).
A stage holds as many micro-batches as there are stages from it to the last, of one of them all that a
block (or, in the last stage, the head) needs beside, and a buffer for everything that it receives.

In a pipeline FSDP keeps parameters gathered, and gradients whole, from the first micro-batch to the last: a
stage has both, and gathers and reduces once in a step. Gathering runs beside the first forward but for the
first unit; gradients are reduced when the last backward is done, and what follows waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.costs.collective_costs import Links, Reach, collective_seconds
from trainfit.costs.constants import constants_of
from trainfit.costs.roofline import Roofline
from trainfit.devices.device_table import Device
from trainfit.scaling.depth_figures import DepthFigures
from trainfit.scaling.mesh_candidates import MeshSizes
from trainfit.scaling.one_forward_one_backward import StageSeconds, step_seconds
from trainfit.traces.trace import Signature, TensorSpec

_GATHERS = 2 / 3
"""Without stages FSDP copies what it gathers for forward and for backward, and what it reduces: thrice."""


@dataclass(frozen=True)
class StageFigures:
    """A layer, and what there is besides layers, with the activations of one sample."""

    layer: DepthFigures
    besides: DepthFigures
    depth: int

    @staticmethod
    def of(first: DepthFigures, second: DepthFigures, depths: tuple[int, int], depth: int) -> StageFigures:
        """Take two depths apart."""
        none, one = first.at(second, depths, 0), first.at(second, depths, 1)
        return StageFigures(one.less(none), none, depth)


@dataclass(frozen=True)
class PipelinePlace:
    """Where a pipeline runs, and in which precision."""

    device: Device
    links: Links
    gpus_per_node: int
    sent_bytes: float
    """What one stage hands to the next."""
    gathered_share: float = 1.0
    """Of what parameters take where they are kept: what they take where they are computed with."""


@dataclass(frozen=True)
class PipelineStep:
    """A step of all stages."""

    stage_bytes: tuple[float, ...]
    compute_seconds: float
    exposed_inside: dict[str, float] = field(hash=False)
    """What collectives within a stage expose, along `cp` and `tp`."""
    bubble_seconds: float
    exposed_seconds: float
    sent_seconds: float
    optimizer_seconds: float
    model_flops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        parts = (self.compute_seconds, self.bubble_seconds, self.exposed_seconds, self.sent_seconds)
        return sum(parts) + sum(self.exposed_inside.values()) + self.optimizer_seconds

    @property
    def bytes(self) -> float:
        """The most that a stage needs."""
        return max(self.stage_bytes)


@dataclass(frozen=True)
class _StagePlace:
    """One stage: how many layers it has, and whether it has an end of the model."""

    number: int
    count: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def ends(self) -> float:
        """Which share it has of what there is besides layers: embedding and head are on one stage each."""
        return 0.5 if self.is_first or self.is_last else 0.0

    def of(self, figures: StageFigures, name: str) -> float:
        """Return its part of a figure."""
        layer, besides = float(getattr(figures.layer, name)), float(getattr(figures.besides, name))
        return self.layers * layer + self.ends * besides


def pipeline_of(
    kept: StageFigures, sizes: MeshSizes, micro_batches: int, place: PipelinePlace
) -> PipelineStep:
    """Return the step; `kept` has the activations that checkpoints leave."""
    stages = [
        _StagePlace(number, sizes.pp, kept.depth * (number + 1) // sizes.pp - kept.depth * number // sizes.pp)
        for number in range(sizes.pp)
    ]
    hop = _hop(sizes, place)
    seconds = [_seconds(kept, stage, sizes, place) for stage in stages]
    whole = step_seconds(seconds, micro_batches, hop)
    without_hops = step_seconds(seconds, micro_batches, 0.0)
    layer, besides = kept.layer, kept.besides
    busy = sum(
        micro_batches * (one.forward + one.backward) + (micro_batches - 1) * one.later_backward
        for one in seconds
    )
    inside = {
        name: micro_batches * max(kept.depth * getattr(layer, key) + getattr(besides, key), 0.0) / sizes.pp
        for name, key in (("cp", "exposed_cp"), ("tp", "exposed_tp"))
    }
    optimizer = max(stage.of(kept, "optimizer_seconds") for stage in stages)
    exposed = max(one.before + one.after for one in seconds) - optimizer
    compute = max(busy / sizes.pp - sum(inside.values()), 0.0)
    bubble = without_hops - busy / sizes.pp - max(exposed, 0.0) - optimizer
    return PipelineStep(
        stage_bytes=tuple(_bytes(kept, stage, sizes, micro_batches, place) for stage in stages),
        compute_seconds=compute,
        exposed_inside=inside,
        bubble_seconds=max(bubble, 0.0),
        exposed_seconds=max(exposed, 0.0),
        sent_seconds=max(whole - without_hops, 0.0),
        optimizer_seconds=optimizer,
        model_flops=micro_batches * (kept.depth * layer.model_flops + besides.model_flops) / sizes.pp,
    )


def _seconds(kept: StageFigures, stage: _StagePlace, sizes: MeshSizes, place: PipelinePlace) -> StageSeconds:
    """Return what a stage takes for each micro-batch, and once in a step."""
    layer, besides = kept.layer.stage, kept.besides.stage
    forward, backward = stage.layers * layer.forward_seconds, stage.layers * layer.backward_seconds
    if stage.is_first:
        forward += besides.first_forward_seconds
        backward += besides.first_backward_seconds
    if stage.is_last:
        forward += besides.last_forward_seconds
        backward += besides.last_backward_seconds
    whole = stage.of(kept, "whole_parameter_bytes") / sizes.tp
    copies = stage.layers * layer.copy_seconds + stage.ends * besides.copy_seconds
    first_unit = max(kept.layer.whole_parameter_bytes, stage.ends * kept.besides.whole_parameter_bytes)
    gather, reduce = _shared_seconds(first_unit / sizes.tp, whole, sizes, place)
    return StageSeconds(
        forward=max(forward, 0.0),
        backward=max(backward, 0.0),
        before=gather,
        after=reduce + _GATHERS * copies + stage.of(kept, "optimizer_seconds"),
        later_backward=_adding_seconds(place.device, whole),
    )


def _bytes(
    kept: StageFigures, stage: _StagePlace, sizes: MeshSizes, micro_batches: int, place: PipelinePlace
) -> float:
    """Return what a stage needs."""
    layer, besides = kept.layer.stage, kept.besides.stage
    held = stage.of(kept, "persistent_bytes")
    whole = stage.of(kept, "whole_parameter_bytes") / sizes.tp
    if sizes.shards > 1 or sizes.replicate > 1:
        # Parameters as they are computed with, and gradients, both whole beside what the rank keeps.
        waiting = whole * place.gathered_share + whole
    else:
        waiting = whole
    if stage.is_first and sizes.tp > 1:
        # Where the vocabulary is divided, torch keeps an embedding's gradient whole until it is reduced.
        own = stage.ends * kept.besides.whole_parameter_bytes / sizes.tp
        waiting += max(besides.first_gradient_bytes - own, 0.0)
    # Torch makes the buffers for what is received before the first step, one for each micro-batch.
    neighbours = 1 if stage.is_first or stage.is_last else 2
    buffers = neighbours * micro_batches * place.sent_bytes
    in_flight = min(micro_batches, stage.count - stage.number)
    each = max(stage.layers * layer.inside_bytes, 0.0)
    inside = each + besides.inside_bytes
    if stage.is_first:
        # What is kept before the blocks; their input is among what they keep.
        each += max(besides.begin_bytes - place.sent_bytes, 0.0)
    if stage.is_last:
        inside = max(inside, stage.layers * layer.outside_bytes + besides.outside_bytes)
        inside += besides.output_bytes
    # The optimizer's own temporaries come when the activations are gone.
    optimizer = stage.of(kept, "optimizer_bytes") + buffers
    return max(held + waiting + buffers + (in_flight - 1) * each + inside, optimizer)


def _hop(sizes: MeshSizes, place: PipelinePlace) -> float:
    """Return how long a micro-batch takes from stage to stage, in one direction."""
    apart = sizes.ranks // sizes.pp
    reach = Reach(2, 2 if apart >= place.gpus_per_node else 1)
    return collective_seconds("send", int(place.sent_bytes), reach, place.links)


def _shared_seconds(
    first_unit: float, whole: float, sizes: MeshSizes, place: PipelinePlace
) -> tuple[float, float]:
    """Return what a stage waits for once in a step: the gathering of its first unit, and all reducing."""
    near = max(place.gpus_per_node // sizes.tp, 1)
    gather = reduce = 0.0
    if sizes.shards > 1:
        reach = Reach(sizes.shards, -(-sizes.shards // near))
        gathered = int(first_unit * place.gathered_share)
        gather = collective_seconds("all_gather", gathered, reach, place.links)
        reduce = collective_seconds("reduce_scatter", int(whole), reach, place.links)
    if sizes.replicate > 1:
        near = max(place.gpus_per_node // (sizes.shards * sizes.tp), 1)
        reach = Reach(sizes.replicate, -(-sizes.replicate // near))
        reduce += collective_seconds("all_reduce", int(whole) // sizes.shards, reach, place.links)
    return gather, reduce


def _adding_seconds(device: Device, size: float) -> float:
    """Return how long it takes to add gradients to those that are there."""
    count = int(size) // 2
    tensor = TensorSpec("bfloat16", (count,), (1,))
    # Both are read and one is written.
    adding = Signature(
        *("aten.add_.Tensor", (tensor, tensor), (tensor,), "[[],{}]", False, True, False),
        moved_bytes=3 * int(size),
        work_source="traffic",
    )
    return Roofline(device, constants_of(device)).price(adding).seconds if count else 0.0
