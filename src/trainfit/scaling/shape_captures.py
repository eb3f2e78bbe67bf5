"""The few captures that all meshes are worked out from: a shallow model, two sizes, two depths.

Meshes that differ only in how many ranks share the parameters, or how many copies there are, have one shape:
their steps take the same course (`sizing/rank_growth.py`). Of a shape the smallest and the largest are
captured, with few layers; what lies between is worked out, and so are larger micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainfit.basics.doing import as_part_of
from trainfit.errors import OptionError
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.mesh_candidates import MeshSizes
from trainfit.scaling.scale_question import Depth, ScaleQuestion, WantedCapture
from trainfit.sizing.rank_growth import Corner, RankGrowth
from trainfit.traces.trace import Trace
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces

_BATCHES = (2, 4)
"""Micro-batches of which larger ones are worked out. One sample often takes another course than several."""


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

    source: CapturesAhead
    depths: tuple[Depth, ...]
    ranges: dict[Shape, tuple[int, int]] = field(default_factory=dict)
    """The least and the most ranks that FSDP divides a shape's parameters among, of those looked at."""
    count: int = 0
    """How often a step was captured."""
    refused: dict[Shape, str] = field(default_factory=dict)
    """Shapes that the model cannot have, and why."""
    on_capture: Callable[[], None] = lambda: None
    _corners: dict[WantedCapture, Trace] = field(default_factory=dict)
    _growths: dict[tuple[Shape, bool, Depth], RankGrowth] = field(default_factory=dict)

    @property
    def question(self) -> ScaleQuestion:
        """What is asked."""
        return self.source.question

    @property
    def first_traces(self) -> tuple[Trace, ...]:
        """Captured traces of the first mesh, one of each depth."""
        first, *_ = self._corners
        return tuple(self._corners[replace(first, depth=depth)] for depth in self.depths)

    def look_at(self, sizes: MeshSizes) -> None:
        """Say that a mesh will be asked about, so that the ends of its shape's range are known."""
        shape = Shape.of(sizes)
        low, high = self.ranges.get(shape, (sizes.fsdp, sizes.fsdp))
        self.ranges[shape] = (min(low, sizes.fsdp), max(high, sizes.fsdp))

    def expect(self, shapes: Sequence[Shape]) -> None:
        """Say that these will be asked about: each is known by the ends of its range, of one sample."""
        likeliest = sorted(shapes, key=lambda shape: shape.replicated)  # copies are rarely worth a look
        wanted = [
            WantedCapture(*corner, depth)
            for shape in likeliest
            for depth in self.depths
            for corner in self._corners_of(shape, 1)
        ]
        self.source.perhaps([one for one in wanted if one not in self._corners])

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
            corners = self._corners_of(shape, batch)
            soon = [WantedCapture(*corner, each) for each in self.depths for corner in corners]
            self.source.soon([one for one in soon if one not in self._corners])
            found = [Corner(one.fsdp, size, self._captured(one, size, depth)) for one, size in corners]
            self._growths[key] = RankGrowth(found[0], found[1:])
        return self._growths[key]

    def _corners_of(self, shape: Shape, batch: int) -> list[tuple[MeshSizes, int]]:
        """Return the meshes and micro-batches that such a micro-batch is worked out from."""
        low, high = self.ranges[shape]
        # The fewest copies that are copies: how many there are changes no number of a step.
        copies = 2 if shape.replicated else 1
        base = MeshSizes(replicate=copies, fsdp=low, cp=shape.cp, ep=shape.ep, tp=shape.tp)
        first, *larger = (1,) if batch == 1 else _BATCHES
        corners = [(base, first), *((base, size) for size in larger)]
        return corners if high == low else [*corners, (replace(base, fsdp=high), first)]

    def _captured(self, sizes: MeshSizes, batch: int, depth: Depth) -> Trace:
        wanted = WantedCapture(sizes, batch, depth)
        if wanted not in self._corners:
            layers = f", {depth.layers} layers" if depth.layers is not None else ""
            with as_part_of(f"{sizes.words}, micro-batch {batch}{layers}"):
                self._corners[wanted] = self.source.trace(wanted)
            self.count += 1
            self.on_capture()
        return self._corners[wanted]
