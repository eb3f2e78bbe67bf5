"""The few captures that all meshes are worked out from: a shallow model, two sizes, two depths.

Meshes that differ only in how many ranks share the parameters, or how many copies there are, have one shape:
their steps take the same course (`sizing/rank_growth.py`). Of a shape the smallest and the largest are
captured, with few layers; what lies between is worked out, and so are larger micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainfit.api.model_depth import model_depth
from trainfit.api.request import Build, Request
from trainfit.basics.doing import as_part_of
from trainfit.capturing.metadata import MetadataOracle
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError, TrainfitError
from trainfit.models.recipe import StepOptions
from trainfit.scaling.mesh_candidates import Mesh, MeshSizes
from trainfit.sizing.rank_growth import Corner, RankGrowth
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces

_DEPTHS = (2, 3)
"""Layers of the models that are captured: one says what there is besides layers, two what a layer adds."""
_LEAST_LAYERS = 5
"""A model with fewer is captured whole."""
_BATCHES = (2, 4)
"""Micro-batches of which larger ones are worked out. One sample often takes another course than several."""


@dataclass(frozen=True)
class ScaleQuestion:
    """Which step is asked about, and on which cluster; its mesh is what is looked for."""

    target: str | Build
    device: Device
    options: StepOptions
    task: str | None = None
    cluster: Cluster = field(default_factory=Cluster)
    """The GPUs per node and the network; its sizes mean nothing."""

    def request(self, mesh: Mesh, batch: int, depth: Depth | None = None, worst: bool = False) -> Request:
        """Return the request for rank 0 of a mesh, with so many layers."""
        options = replace(self.options, batch=batch)
        if depth is not None and depth.layers is not None:
            options = replace(options, set={**options.set, depth.setting: depth.layers})
        ranks = 1
        for _, size in mesh:
            ranks *= size
        cluster = replace(self.cluster, world_size=ranks, mesh=mesh)
        return Request(self.target, self.device, options, self.task, cluster=cluster, worst_rank=worst)

    def trace(self, request: Request) -> Trace:
        """Capture what was requested, with what is known of its operators from captures before."""
        return request.trace(oracle=self._known_calls)

    @cached_property
    def _known_calls(self) -> MetadataOracle:
        return MetadataOracle(self.device.kind)


@dataclass(frozen=True)
class Depth:
    """How many layers a captured model has; None: all of them."""

    setting: str = ""
    layers: int | None = None


def depths_of(question: ScaleQuestion) -> tuple[tuple[Depth, ...], int]:
    """Return the depths to capture, and that of the model; one depth where the model is not cut down.

    What names its depth is a setting of a built-in model or of a config. A function of the user's own is
    captured as it is.
    """
    if not isinstance(question.target, str):
        return (Depth(),), 1
    alone = replace(question, cluster=Cluster())
    request = Request(alone.target, alone.device, alone.options, alone.task)
    found = model_depth(request.found())
    if found is None or found[1] < _LEAST_LAYERS:
        return (Depth(),), 1
    name, deepest = found
    return tuple(Depth(name, layers) for layers in _DEPTHS), deepest


@dataclass(frozen=True)
class Shape:
    """What meshes have in common whose steps take the same course."""

    tp: int
    cp: int
    ep: int
    sharded: bool
    replicated: bool

    @staticmethod
    def of(sizes: MeshSizes) -> Shape:
        """Return the shape of a mesh; stages of a pipeline have that of a model without them."""
        return Shape(sizes.tp, sizes.cp, sizes.ep, sizes.fsdp > 1, sizes.replicate > 1)

    @property
    def words(self) -> str:
        """As it is said while it is captured."""
        parts = [name for name, used in (("replicate", self.replicated), ("fsdp", self.sharded)) if used]
        inner = (("cp", self.cp), ("ep", self.ep), ("tp", self.tp))
        parts += [f"{name}={size}" for name, size in inner if size > 1]
        return ", ".join(parts) or "one rank"


@dataclass
class ShapeCaptures:
    """Captured traces by shape, and what is worked out from them."""

    question: ScaleQuestion
    depths: tuple[Depth, ...]
    ranges: dict[Shape, tuple[int, int]] = field(default_factory=dict)
    """The least and the most ranks that FSDP divides a shape's parameters among, of those looked at."""
    count: int = 0
    """How often a step was captured."""
    refused: dict[Shape, str] = field(default_factory=dict)
    """Shapes that the model cannot have, and why."""
    on_capture: Callable[[], None] = lambda: None
    _corners: dict[tuple[MeshSizes, int, Depth], Trace] = field(default_factory=dict)
    _growths: dict[tuple[Shape, bool, Depth], RankGrowth] = field(default_factory=dict)

    @property
    def first_traces(self) -> tuple[Trace, ...]:
        """Captured traces of the first mesh, one of each depth."""
        (sizes, batch, _), *_ = self._corners
        return tuple(self._corners[sizes, batch, depth] for depth in self.depths)

    def look_at(self, sizes: MeshSizes) -> None:
        """Say that a mesh will be asked about, so that the ends of its shape's range are known."""
        shape = Shape.of(sizes)
        low, high = self.ranges.get(shape, (sizes.fsdp, sizes.fsdp))
        self.ranges[shape] = (min(low, sizes.fsdp), max(high, sizes.fsdp))

    def trace(self, sizes: MeshSizes, batch: int, depth: Depth) -> Trace | None:
        """Return the trace of rank 0 of a mesh without stages; None if the model cannot be divided so."""
        sizes, shape = replace(sizes, pp=1), Shape.of(sizes)
        if shape in self.refused:
            return None
        try:
            grown = self._growth(shape, batch, depth).at(sizes.fsdp, batch, sizes.mesh)
            # Where the lines do not say it, a capture does.
            found = self._captured(sizes, batch, depth) if grown is None else grown
        except OptionError as error:
            self.refused[shape] = str(error)
            return None
        on_gpu = self.question.device.kind == "cuda"
        # Kernels choose by size: workspaces lie on no line.
        return with_gpu_workspaces(found, self.question.device) if on_gpu else found

    def _growth(self, shape: Shape, batch: int, depth: Depth) -> RankGrowth:
        key = (shape, batch == 1, depth)
        if key not in self._growths:
            low, high = self.ranges[shape]
            # The fewest copies that are copies: how many there are changes no number of a step.
            copies = 2 if shape.replicated else 1
            base = MeshSizes(replicate=copies, fsdp=low, cp=shape.cp, ep=shape.ep, tp=shape.tp)
            first, *larger = (1,) if batch == 1 else _BATCHES
            corners = [(base, first), *((base, size) for size in larger)]
            if high != low:
                corners.append((replace(base, fsdp=high), first))
            found = [Corner(one.fsdp, size, self._captured(one, size, depth)) for one, size in corners]
            self._growths[key] = RankGrowth(found[0], found[1:])
        return self._growths[key]

    def _captured(self, sizes: MeshSizes, batch: int, depth: Depth) -> Trace:
        key = (sizes, batch, depth)
        if key not in self._corners:
            layers = f", {depth.layers} layers" if depth.layers is not None else ""
            with as_part_of(f"{sizes.words}, micro-batch {batch}{layers}"):
                self._corners[key] = self.question.trace(self.question.request(sizes.mesh, batch, depth))
            self.count += 1
            self.on_capture()
        return self._corners[key]


def refusal(question: ScaleQuestion, sizes: MeshSizes, batch: int) -> str | None:
    """Say why a model cannot be divided over a mesh, as far as it says so without being built."""
    try:
        question.request(sizes.mesh, batch).found()
    except TrainfitError as error:
        return str(error)
    return None
