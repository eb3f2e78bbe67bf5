"""What `scale` asks about, and how a capture of it is requested: a mesh, a micro-batch, so many layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from trainfit.api.model_depth import model_depth
from trainfit.api.request import Build, Request
from trainfit.capturing.metadata import MetadataOracle
from trainfit.devices.device_table import Device
from trainfit.errors import TrainfitError
from trainfit.models.recipe import StepOptions
from trainfit.scaling.mesh_candidates import MeshSizes
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

_DEPTHS = (2, 3)
"""Layers of the models that are captured: one says what there is besides layers, two what a layer adds."""
_LEAST_LAYERS = 5
"""A model with fewer is captured whole."""


@dataclass(frozen=True)
class Depth:
    """How many layers a captured model has; None: all of them."""

    setting: str = ""
    layers: int | None = None


@dataclass(frozen=True)
class WantedCapture:
    """Rank 0 of a mesh, with so many samples and layers; or, of a pipeline, the rank that needs the most."""

    sizes: MeshSizes
    batch: int
    depth: Depth = Depth()
    worst: bool = False


@dataclass(frozen=True)
class ScaleQuestion:
    """Which step is asked about, and on which cluster; its mesh is what is looked for."""

    target: str | Build
    device: Device
    options: StepOptions
    task: str | None = None
    cluster: Cluster = field(default_factory=Cluster)
    """The GPUs per node and the network; its sizes mean nothing."""

    def request(self, wanted: WantedCapture) -> Request:
        """Return the request for a capture."""
        options, depth = replace(self.options, batch=wanted.batch), wanted.depth
        if depth.layers is not None:
            options = replace(options, set={**options.set, depth.setting: depth.layers})
        cluster = replace(self.cluster, world_size=wanted.sizes.ranks, mesh=wanted.sizes.mesh)
        return Request(self.target, self.device, options, self.task, cluster=cluster, worst_rank=wanted.worst)

    def captured(self, wanted: WantedCapture) -> Trace:
        """Capture here, with what is known of operators from captures before."""
        return self.request(wanted).trace(oracle=self._known_calls)

    @property
    def runs_own_code(self) -> bool:
        """Whether the model is built by code of the user's."""
        return not isinstance(self.target, str) or ":" in self.target.removeprefix("hf:")

    @cached_property
    def _known_calls(self) -> MetadataOracle:
        return MetadataOracle(self.device.kind)


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


def refusal(question: ScaleQuestion, sizes: MeshSizes, batch: int) -> str | None:
    """Say why a model cannot be divided over a mesh, as far as it says so without being built."""
    try:
        question.request(WantedCapture(sizes, batch)).found()
    except TrainfitError as error:
        return str(error)
    return None
