"""What a reader sees of a model on clusters of several sizes: its fields are the keys of its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["confirmed", "derived"]


@dataclass(frozen=True)
class MeshRow:
    """One mesh with a micro-batch. Times are those of one step of the whole batch."""

    mesh: dict[str, int]
    words: str
    """As `--mesh` takes it."""
    micro_batch: int
    """Samples that a copy of the model takes at once; in a pipeline, through a stage at once."""
    accumulation: int
    """How many of them before the optimizer's step."""
    copies: int
    """How many copies of the model train at once, each on data of its own."""
    global_batch: int
    """Samples of a step of all ranks."""
    fits: bool
    memory_bytes: int
    """What each rank runs in; of one that does not fit, with every block recomputed."""
    budget_bytes: int
    recompute: str
    """`none`, `full`, or `plan`: what of the activations is computed again."""
    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    samples_per_second: float | None
    model_flops_utilisation: float | None
    parts: dict[str, float]
    """What the step's seconds consist of, by name."""
    source: Source
    """`confirmed`: of a capture of this mesh, its plan certified; `derived`: worked out from smaller ones."""
    reason: str
    """Of one that is not the best: why."""

    @property
    def missing_bytes(self) -> int:
        """By how much it does not fit."""
        return max(self.memory_bytes - self.budget_bytes, 0)


@dataclass(frozen=True)
class SizeOfCluster:
    """The best mesh of one number of GPUs, and the others."""

    world_size: int
    winner: MeshRow | None
    """None if nothing fits."""
    others: tuple[MeshRow, ...]
    """The next best, the fastest first, and then those that do not fit."""
    looked_at: int
    """How many meshes with micro-batches there are figures of."""
    efficiency: float | None
    """Tokens (or samples) per second and GPU, as a share of the best of all sizes."""
    on_frontier: bool
    """Whether no smaller cluster is as fast."""
    derived_step_seconds: float | None = None
    """What had been worked out for the best mesh before it was confirmed."""
    derived_memory_bytes: int | None = None


@dataclass(frozen=True)
class ScaleData:
    """A model on clusters of several sizes."""

    target: str
    device: str
    torch: str
    settings: dict[str, Any]
    description: str
    seconds: dict[str, float]
    """Wall time of each stage."""
    captures: int
    """How often a step was captured."""
    layers_captured: tuple[int, ...]
    """The depths of the models that the figures are worked out from; none if they are whole."""
    gpus_per_node: int
    global_batch: int | None
    global_batch_words: str
    dimensions: tuple[str, ...]
    sizes: tuple[SizeOfCluster, ...]
    frontier: tuple[int, ...]
    """World sizes of which no smaller one is as fast."""
    most_efficient: int | None
    """The world size with the most tokens per second and GPU."""
    warnings: tuple[str, ...]

    def size(self, world_size: int | None) -> SizeOfCluster | None:
        """Return what is found for a world size."""
        return next((one for one in self.sizes if one.world_size == world_size), None)
