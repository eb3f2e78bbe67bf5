"""What one mesh needs and how fast it is, worked out from few captures of a shallow model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.costs.collective_costs import Links
from trainfit.costs.pricing import price_trace
from trainfit.costs.summary import summarise
from trainfit.devices.communicator_buffers import with_communicators
from trainfit.planning.replay import Replay, replayed
from trainfit.scaling.checkpoint_curve import CheckpointCurve, curve_of, recomputed
from trainfit.scaling.depth_figures import DepthFigures, figures_of
from trainfit.scaling.mesh_candidates import EXCHANGING, Division, MeshSizes
from trainfit.scaling.pipeline_steps import PipelinePlace, PipelineStep, StageFigures, pipeline_of
from trainfit.scaling.scale_question import Depth
from trainfit.scaling.shape_captures import Shape, ShapeCaptures

PARTS = ("compute", "recompute", *EXCHANGING, "bubble", "sent", "host", "optimizer")
"""What a step's time consists of; `fsdp` to `tp` is what collectives along these dimensions expose."""

_BETTER_KERNELS = 0.02
"""By how much less a kernel takes per sample, at most, if there are twice as many samples for it and the
device is busy: what is left of a last wave, and of latencies."""


@dataclass(frozen=True)
class Judged:
    """A mesh with a division of the batch. Seconds are those of one step of the whole batch."""

    sizes: MeshSizes
    division: Division
    memory_bytes: int
    """The least that it runs in; of one that does not fit, with every block recomputed."""
    budget_bytes: int
    recomputed_share: float
    """0: everything is kept; 1: every block is computed again; between: a plan."""
    parts: dict[str, float] = field(hash=False)
    model_flops: float
    """Of a rank."""
    stage_bytes: tuple[int, ...] | None = None
    """Of a pipeline: what each stage needs."""

    @property
    def fits(self) -> bool:
        """Whether it runs within the budget."""
        return self.memory_bytes <= self.budget_bytes

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def samples(self) -> int:
        """What the step of all ranks trains on."""
        return self.division.samples * self.sizes.copies

    @property
    def seconds_per_sample(self) -> float:
        """What meshes of one size are compared by."""
        return self.seconds / self.samples

    @property
    def kernel_seconds(self) -> float:
        """What every sample takes, however many there are at once."""
        return sum(self.parts[name] for name in ("compute", "tp", "cp", "ep"))

    @property
    def least_seconds_per_sample(self) -> float:
        """What no larger micro-batch gets below: kernels, which may use the device better then."""
        return (1 - _BETTER_KERNELS) * self.kernel_seconds / self.samples


@dataclass(frozen=True)
class _Asked:
    """A step without stages, at the model's whole depth."""

    kept: tuple[DepthFigures, ...]
    """With everything kept, at each captured depth."""
    overhead_bytes: int
    """What the allocator needs beyond the peak."""
    budget_bytes: int
    replays: tuple[Replay, ...] = field(repr=False)


@dataclass
class MeshJudge:
    """One step over many meshes."""

    captures: ShapeCaptures
    depth: int
    allocator: AllocatorOptions | None
    budget: int | None = None
    """What was said to be the budget of each GPU; None: what the device has, less its margin."""
    peak_flops: float | None = None
    """The device's peak, of the rate that most products run at."""
    _asked: dict[tuple[MeshSizes, int], _Asked | None] = field(default_factory=dict)
    _full: dict[tuple[MeshSizes, int], tuple[DepthFigures, ...] | None] = field(default_factory=dict)
    _curves: dict[tuple[int, int, int], CheckpointCurve] = field(default_factory=dict)
    _overheads: dict[tuple[Shape, int], int] = field(default_factory=dict)
    _flops: dict[tuple[Shape, int, Depth], float] = field(default_factory=dict)

    @property
    def can_cut(self) -> bool:
        """Whether the model is known by the layer, so that stages of it are."""
        return len(self.captures.depths) > 1

    def state_bytes(self, sizes: MeshSizes) -> float:
        """Return parameters, gradients and optimizer state of all ranks together, from one capture."""
        asked = self._ask(sizes, 1)
        if asked is None:
            return 0.0
        figures = self._deep(asked.kept)
        return (figures.persistent_bytes + figures.gradient_bytes) * sizes.shards * sizes.tp

    def judge(self, sizes: MeshSizes, division: Division) -> Judged | None:
        """Return what a mesh needs; None if the model cannot be divided so."""
        if sizes.pp > 1:
            return self._pipeline(sizes, division)
        asked = self._ask(sizes, division.micro_batch)
        if asked is None:
            return None
        kept = self._deep(asked.kept)
        waiting = kept.gradient_bytes if division.accumulation > 1 else 0.0

        def needed(figures: DepthFigures) -> float:
            return max(figures.pass_bytes + waiting, figures.optimizer_bytes) + asked.overhead_bytes

        memory, share, again = needed(kept), 0.0, 0.0
        if memory > asked.budget_bytes:
            found = self._fully(sizes, division.micro_batch)
            if found is not None:
                full = self._deep(found)
                least = needed(full)
                share = min(max((memory - asked.budget_bytes) / max(memory - least, 1.0), 0.0), 1.0)
                memory = least if least > asked.budget_bytes else max(least, asked.budget_bytes)
                curve = self._curve(sizes, division.micro_batch)
                again = curve.cost_of(share) * max(full.pass_seconds - kept.pass_seconds, 0.0)
        parts = _parts(kept, again, division.accumulation)
        flops = kept.model_flops * division.accumulation
        return Judged(sizes, division, int(memory), asked.budget_bytes, share, parts, flops)

    def loses_if_doubled(self, found: Judged, best: float) -> bool:
        """Whether larger micro-batches are known to lose, without a capture of one.

        `best` is what the fastest mesh takes for a sample. A larger micro-batch has less per sample of what
        is exchanged or waited for once in each, and its kernels use the device better (`_BETTER_KERNELS`):
        what is left of the step without all that is a bound. And one that recomputes a share s of what its
        blocks keep has to recompute at least (1 + s) / 2 of twice as much, as the budget is the same.
        """
        parts, share = found.parts, found.recomputed_share
        if found.least_seconds_per_sample > best:
            return True
        key = (found.sizes, found.division.micro_batch)
        full, asked = self._full.get(key), self._asked.get(key)
        if share <= 0 or full is None or asked is None or found.sizes.pp > 1:
            return False
        curve = self._curve(found.sizes, found.division.micro_batch)
        more = curve.cost_of((1 + share) / 2) - curve.cost_of(share)
        dearest = self._deep(full).pass_seconds - self._deep(asked.kept).pass_seconds
        once = sum(parts[name] for name in ("fsdp", "replicate", "host"))
        once += parts["optimizer"] if found.division.accumulation == 1 else 0.0
        again = more * max(dearest, 0.0) * found.division.accumulation
        return again > once / 2 + _BETTER_KERNELS * found.kernel_seconds

    def _pipeline(self, sizes: MeshSizes, division: Division) -> Judged | None:
        """Judge a pipeline: everything kept or, if that does not fit, every block recomputed."""
        # Copies share once in a step, which is worked out: a micro-batch has nothing of it.
        one = replace(sizes, pp=1, replicate=1)
        asked = self._ask(one, 1) if self.can_cut else None
        if asked is None or sizes.pp > self.depth:
            return None
        full = self._fully(one, 1)
        kept, least = self._step_of(asked.kept, full, sizes, division), None
        found, share, again = kept, 0.0, 0.0
        if kept.bytes + asked.overhead_bytes > asked.budget_bytes and full is not None:
            least = found = self._step_of(full, full, sizes, division)
            low, high = least.bytes + asked.overhead_bytes, kept.bytes + asked.overhead_bytes
            share = min(max((high - asked.budget_bytes) / max(high - low, 1.0), 0.0), 1.0)
            cost = self._curve(one, 1).cost_of(share)
            again = cost * max(least.seconds - kept.seconds, 0.0)
        memory = int(found.bytes) + asked.overhead_bytes
        if least is not None:
            memory = max(memory, min(asked.budget_bytes, int(kept.bytes) + asked.overhead_bytes))
        parts = dict.fromkeys(PARTS, 0.0) | {
            "compute": kept.compute_seconds,
            "recompute": again,
            "fsdp": kept.exposed_seconds,
            **kept.exposed_inside,
            "bubble": kept.bubble_seconds,
            "sent": kept.sent_seconds,
            "optimizer": kept.optimizer_seconds,
        }
        stages = tuple(int(size) for size in found.stage_bytes)
        return Judged(sizes, division, memory, asked.budget_bytes, share, parts, kept.model_flops, stages)

    def _step_of(
        self,
        figures: tuple[DepthFigures, ...],
        full: tuple[DepthFigures, ...] | None,
        sizes: MeshSizes,
        by: Division,
    ) -> PipelineStep:
        first, second = (depth.layers or 0 for depth in self.captures.depths)
        stage = StageFigures.of(figures[0], figures[1], (first, second), self.depth)
        cluster, device = self.captures.question.cluster, self.captures.question.device
        sent = stage.layer.pass_bytes - stage.layer.persistent_bytes
        if full is not None:
            # With every block recomputed, what a layer keeps is what it was given.
            last = StageFigures.of(full[0], full[1], (first, second), self.depth).layer
            sent = last.pass_bytes - last.persistent_bytes
        mixed = self.captures.question.options.dtype == "bf16-autocast"
        place = PipelinePlace(
            device, Links.of(device, cluster), cluster.gpus_per_node, max(sent, 0.0), 0.5 if mixed else 1.0
        )
        return pipeline_of(stage, sizes, by.accumulation, place)

    def _deep(self, figures: tuple[DepthFigures, ...]) -> DepthFigures:
        if len(figures) == 1:
            return figures[0]
        first, second = (depth.layers or 0 for depth in self.captures.depths)
        return figures[0].at(figures[1], (first, second), self.depth)

    def _ask(self, sizes: MeshSizes, batch: int) -> _Asked | None:
        """Return a step without stages, with everything kept; None if the model cannot be divided so."""
        key = (sizes, batch)
        if key not in self._asked:
            self._asked[key] = self._replayed(sizes, batch)
        return self._asked[key]

    def _replayed(self, sizes: MeshSizes, batch: int) -> _Asked | None:
        device, shape = self.captures.question.device, Shape.of(sizes)
        replays, figures = [], []
        for depth in self.captures.depths:
            trace = self.captures.trace(sizes, batch, depth)
            if trace is None:
                return None
            own = with_communicators(device, trace)
            replay = replayed(trace, price_trace(trace, own), ())
            flops = self._flops_of(shape, batch, depth, replay)
            replays.append(replay)
            figures.append(figures_of(replay.timeline, replay.times, flops))
        if (shape, batch) not in self._overheads:
            # Of a GPU's allocator: about the same for all depths and sizes of a shape.
            needs = [StepMemory(r.timeline, own, self.allocator).smallest_bytes for r in replays]
            over = [need - r.timeline.peak_bytes for need, r in zip(needs, replays)]
            self._overheads[shape, batch] = max(over)
        budget = own.default_budget_bytes if self.budget is None else self.budget
        return _Asked(tuple(figures), self._overheads[shape, batch], budget, tuple(replays))

    def _flops_of(self, shape: Shape, batch: int, depth: Depth, replay: Replay) -> float:
        if (shape, batch, depth) not in self._flops:
            summary = summarise(replay.times)
            self.peak_flops = summary.peak_flops_per_second
            self._flops[shape, batch, depth] = float(summary.model_flops)
        return self._flops[shape, batch, depth]

    def _fully(self, sizes: MeshSizes, batch: int) -> tuple[DepthFigures, ...] | None:
        """Return the same with every block recomputed; None if the model has no blocks."""
        key = (sizes, batch)
        if key not in self._full:
            asked = self._ask(sizes, batch)
            assert asked is not None, "asked before"
            found = []
            for replay, kept in zip(asked.replays, asked.kept):
                times = replay.times
                again = recomputed(times.trace, times.costs, times.marginal_seconds.tolist())
                if again is not None:
                    found.append(figures_of(again.timeline, again.times, kept.model_flops))
            self._full[key] = tuple(found) if len(found) == len(asked.kept) else None
        return self._full[key]

    def _curve(self, sizes: MeshSizes, batch: int) -> CheckpointCurve:
        """Return the curve of layers that are divided so.

        It is in shares of what blocks keep and compute. Both grow alike with the micro-batch, and how many
        copies or shards of the parameters there are changes neither: so one is solved for all of these.
        """
        key = (sizes.tp, sizes.cp, sizes.ep)
        if key not in self._curves:
            asked = self._ask(sizes, batch)
            assert asked is not None, "asked before"
            times = asked.replays[-1].times
            full = recomputed(times.trace, times.costs, times.marginal_seconds.tolist())
            self._curves[key] = (
                CheckpointCurve() if full is None else curve_of(times.trace, times.costs, full)
            )
        return self._curves[key]


def _parts(kept: DepthFigures, again: float, accumulation: int) -> dict[str, float]:
    """Return what the time of a step without stages consists of."""
    exposed = kept.exposed
    host = min(kept.waiting_seconds, kept.pass_seconds)
    compute = max(kept.pass_seconds - kept.exposed_seconds - host, 0.0)
    # Collectives may hide behind one another: what they expose is shared out, so that the sum is the step.
    shown = kept.exposed_seconds
    over = compute + host + shown - kept.pass_seconds
    if over > 0 and shown:
        scale = max(1 - over / shown, 0.0)
        exposed = {name: seconds * scale for name, seconds in exposed.items()}
    found = {"compute": compute, "recompute": again, **exposed, "host": host}
    parts = dict.fromkeys(PARTS, 0.0) | {name: accumulation * seconds for name, seconds in found.items()}
    return parts | {"optimizer": kept.optimizer_seconds}
