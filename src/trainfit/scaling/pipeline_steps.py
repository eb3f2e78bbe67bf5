"""Memory and time of a pipeline's stages, worked out from a step without stages, with the bubble.

Stages run one forward and one backward in turn (1F1B, Narayanan et al. 2019) on micro-batches of one sample:

    time   = all stages once + (micro-batches - 1) * the slowest stage, and what is sent between them
    memory = of the first stage: as many micro-batches as there are stages behind it, and itself, in flight;
             of the last one: one of them, and what the head needs

In a pipeline FSDP keeps parameters gathered, and gradients whole, from the first micro-batch to the last: a
stage has both, and gathers and reduces once in a step. What of that does not fit beside the first forward and
the last backward of a stage is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.costs.collective_costs import Links, Reach, collective_seconds
from trainfit.scaling.depth_figures import DepthFigures
from trainfit.scaling.mesh_candidates import MeshSizes

_FORWARD_SHARE = 1 / 3
"""Of forward and backward together, without recomputation."""


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
        names = DepthFigures.__dataclass_fields__
        layer = DepthFigures(*(getattr(one, name) - getattr(none, name) for name in names))
        return StageFigures(layer, none, depth)

    def layers_of(self, stages: int) -> int:
        """Return how many layers the largest stage has."""
        return -(-self.depth // stages)


@dataclass(frozen=True)
class PipelineStep:
    """A step of all stages."""

    first_bytes: float
    last_bytes: float
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
        return max(self.first_bytes, self.last_bytes)


def pipeline_of(
    kept: StageFigures, sizes: MeshSizes, micro_batches: int, links: Links, gpus_per_node: int, sent: float
) -> PipelineStep:
    """Return the step; `kept` has the activations that checkpoints leave, `sent` is between two stages."""
    layers = kept.layers_of(sizes.pp)
    layer, besides = kept.layer, kept.besides
    own = layer.pass_seconds - layer.exposed_fsdp - layer.exposed_replicate
    ends = max(besides.pass_seconds - besides.exposed_fsdp - besides.exposed_replicate, 0.0)
    slowest, all_once = layers * own + ends, kept.depth * own + ends
    busy = micro_batches * all_once / sizes.pp
    inside = {
        name: micro_batches * max(kept.depth * getattr(layer, key) + getattr(besides, key), 0.0) / sizes.pp
        for name, key in (("cp", "exposed_cp"), ("tp", "exposed_tp"))
    }
    hop = _hop(sent, sizes, links, gpus_per_node)
    first, last = _stage_bytes(kept, sizes, micro_batches)
    return PipelineStep(
        first_bytes=first,
        last_bytes=last,
        compute_seconds=max(busy - sum(inside.values()), 0.0),
        exposed_inside=inside,
        bubble_seconds=all_once + (micro_batches - 1) * slowest - busy,
        exposed_seconds=_exposed(kept, sizes, links, gpus_per_node, layers * own),
        sent_seconds=2 * hop * (micro_batches + sizes.pp - 2),
        optimizer_seconds=layers * layer.optimizer_seconds + besides.optimizer_seconds / 2,
        model_flops=micro_batches * (kept.depth * layer.model_flops + besides.model_flops) / sizes.pp,
    )


def _stage_bytes(kept: StageFigures, sizes: MeshSizes, micro_batches: int) -> tuple[float, float]:
    """Return what the first stage and the last one need."""
    layers, layer, besides = kept.layers_of(sizes.pp), kept.layer, kept.besides
    # Embedding and head are on one stage each.
    held = layers * layer.persistent_bytes + besides.persistent_bytes / 2
    whole = (layers * layer.whole_parameter_bytes + besides.whole_parameter_bytes / 2) / sizes.tp
    gradients = layers * layer.gradient_bytes + besides.gradient_bytes / 2
    # Gathered parameters and whole gradients beside the shards; without FSDP the gradients are there alone.
    held += 2 * whole if sizes.shards > 1 else gradients
    activations = layers * (layer.pass_bytes - layer.persistent_bytes)
    working = besides.pass_bytes - besides.persistent_bytes
    in_flight = min(micro_batches, sizes.pp)
    # The optimizer's own temporaries come when the activations are gone.
    optimizer = layers * layer.optimizer_bytes + besides.optimizer_bytes / 2
    return max(held + in_flight * activations, optimizer), max(held + activations + working, optimizer)


def _hop(sent: float, sizes: MeshSizes, links: Links, gpus_per_node: int) -> float:
    """Return how long a micro-batch takes from stage to stage, in one direction."""
    apart = sizes.ranks // sizes.pp
    reach = Reach(2, 2 if apart >= gpus_per_node else 1)
    return collective_seconds("send", int(sent), reach, links)


def _exposed(
    kept: StageFigures, sizes: MeshSizes, links: Links, gpus_per_node: int, pass_seconds: float
) -> float:
    """Return what of gathering and reducing a stage does not fit beside its first and last micro-batch."""
    layers, layer, besides = kept.layers_of(sizes.pp), kept.layer, kept.besides
    whole = int((layers * layer.whole_parameter_bytes + besides.whole_parameter_bytes / 2) / sizes.tp)
    per_node = max(gpus_per_node // sizes.tp, 1)
    gather = reduce = 0.0
    if sizes.shards > 1:
        reach = Reach(sizes.shards, -(-sizes.shards // per_node))
        gather = collective_seconds("all_gather", whole, reach, links)
        reduce = collective_seconds("reduce_scatter", whole, reach, links)
    if sizes.replicate > 1:
        stride = sizes.shards * sizes.tp
        near = max(gpus_per_node // stride, 1)
        reach = Reach(sizes.replicate, -(-sizes.replicate // near))
        reduce += collective_seconds("all_reduce", whole // sizes.shards, reach, links)
    forward = pass_seconds * _FORWARD_SHARE
    return max(gather - forward, 0.0) + max(reduce - (pass_seconds - forward), 0.0)
