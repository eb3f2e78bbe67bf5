"""The best mesh of one world size, without a look at all of them.

What cannot fit is left out first: parameters, gradients and optimizer state, divided among the ranks that
share them, are a lower bound that one capture gives for all meshes. Micro-batches grow until they do not fit
or are slower. Copies of groups (HSDP) are looked at where collectives of FSDP over all ranks are exposed,
whole copies (DDP) where they may fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainfit.basics.doing import as_part_of
from trainfit.scaling.mesh_candidates import MeshSizes, divisions, meshes
from trainfit.scaling.mesh_judge import Judged, MeshJudge
from trainfit.scaling.scale_question import refusal
from trainfit.scaling.shape_captures import Shape

_EXPOSED = 0.01
"""Of a step: what is exposed less is no reason to look for groups of copies."""
_MOST_SPLITS = 4


@dataclass(frozen=True)
class SizesOfModel:
    """The sizes that a model can be divided by, along each dimension."""

    tensor: tuple[int, ...]
    context: tuple[int, ...]
    stages: tuple[int, ...]
    experts: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class LeftOut:
    """A mesh that is known not to fit without being worked out."""

    sizes: MeshSizes
    least_bytes: int
    """Parameters, gradients and optimizer state of each rank."""
    budget_bytes: int


@dataclass
class MeshSearch:
    """Meshes of several world sizes."""

    judge: MeshJudge
    dimensions: tuple[str, ...]
    model: SizesOfModel
    global_batch: int | None
    state_bytes: float = 0.0
    """Parameters, gradients and optimizer state of all ranks together; 0 as long as nothing is captured."""
    _refused: dict[MeshSizes, bool] = field(default_factory=dict)

    def candidates(self, ranks: int) -> list[MeshSizes]:
        """Return the meshes of a world size whose state may fit, those that divide least first."""
        model = self.model
        found = meshes(ranks, self.dimensions, model.tensor, model.context, model.stages, model.experts)
        return sorted(found, key=lambda one: (*_inner(one), one.replicate))

    def announce(self, world_sizes: Sequence[int]) -> None:
        """Say which meshes will be looked at, so that the ends of each shape's range are captured."""
        for sizes in self._alone(world_sizes):
            self.judge.captures.look_at(sizes)

    def expect(self, world_sizes: Sequence[int]) -> None:
        """Say which shapes are left, now that it is known what cannot fit."""
        left = dict.fromkeys(Shape.of(sizes) for sizes in self._alone(world_sizes))
        self.judge.captures.expect(list(left))

    def _alone(self, world_sizes: Sequence[int]) -> Iterator[MeshSizes]:
        """Yield the meshes that may fit, as their stages are captured: without the others."""
        for ranks in world_sizes:
            for sizes in self.candidates(ranks):
                if self.left_out(sizes) is None:
                    yield replace(sizes, pp=1, replicate=1 if sizes.pp > 1 else sizes.replicate)

    def left_out(self, sizes: MeshSizes) -> LeftOut | None:
        """Return a mesh whose state alone is more than the device has; None if it may fit."""
        budget = self.judge.captures.question.device.default_budget_bytes
        budget = budget if self.judge.budget is None else self.judge.budget
        least = int(self.state_bytes / (sizes.shards * sizes.tp * sizes.pp))
        return LeftOut(sizes, least, budget) if least > budget else None

    def of_size(self, ranks: int) -> tuple[list[Judged], list[LeftOut]]:
        """Return what was found out about the meshes of a world size, in no order."""
        found: list[Judged] = []
        left_out: list[LeftOut] = []
        plain: dict[tuple[int, ...], Judged] = {}
        for sizes in self.candidates(ranks):
            missing = self.left_out(sizes)
            if missing is not None:
                left_out.append(missing)
                continue
            if self._refuses_stages(sizes):
                continue
            inner = _inner(sizes)
            if sizes.replicate > 1 and not self._worth_splitting(sizes, plain.get(inner), found):
                continue
            with as_part_of(sizes.words):
                judged = list(self._micro_batches(sizes, found))
            found += judged
            fitting = [one for one in judged if one.fits]
            if sizes.replicate == 1 and fitting:
                plain[inner] = min(fitting, key=lambda one: one.seconds_per_sample)
        return found, left_out

    def _refuses_stages(self, sizes: MeshSizes) -> bool:
        """Whether the model says that its stages cannot be divided so; what has no stages is captured."""
        if sizes.pp == 1:
            return False
        few = replace(sizes, replicate=min(sizes.replicate, 2), fsdp=min(sizes.fsdp, 2))
        if few not in self._refused:
            question = self.judge.captures.question
            self._refused[few] = refusal(question, few, 2 * sizes.pp) is not None
        return self._refused[few]

    def _worth_splitting(self, sizes: MeshSizes, plain: Judged | None, found: Sequence[Judged]) -> bool:
        """Whether groups of copies may be faster than FSDP over all ranks, by what that exposes."""
        if sizes.shards == 1:
            return sizes.pp == 1  # whole copies gather nothing: another step, and not only another group
        if plain is None:
            return False  # where FSDP over all ranks does not fit, more copies of parameters fit even less
        others = (one.sizes for one in found if one.sizes.replicate > 1)
        splits = {one for one in others if _inner(one) == _inner(sizes)}
        if len(splits) >= _MOST_SPLITS:
            return False
        best = min((one.seconds_per_sample for one in found if one.fits), default=0.0)
        without = (plain.seconds - plain.parts["fsdp"]) / plain.samples
        return plain.parts["fsdp"] > _EXPOSED * plain.seconds and without < best

    def _micro_batches(self, sizes: MeshSizes, others: Sequence[Judged]) -> Iterator[Judged]:
        """Yield a mesh with growing micro-batches, until they do not fit or cannot win."""
        fastest: float | None = None
        best = min((one.seconds_per_sample for one in others if one.fits), default=math.inf)
        for division in divisions(sizes, self.global_batch):
            judged = self.judge.judge(sizes, division)
            if judged is None:
                return
            yield judged
            slower = fastest is not None and judged.seconds_per_sample > fastest
            if not judged.fits or slower or self.judge.loses_if_doubled(judged, best):
                return
            fastest = judged.seconds_per_sample


def _inner(sizes: MeshSizes) -> tuple[int, ...]:
    """Return what is divided besides the copies of the model."""
    return (sizes.pp, sizes.cp, sizes.ep, sizes.tp)
