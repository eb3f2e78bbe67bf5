"""`Layout`: what has to be known of an architecture to divide it over a mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainfit.errors import OptionError
from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.divided_sequence import SequenceInputs
from trainfit.models.parallel.pipeline import Handover, PairLoss
from trainfit.models.recipe import StepOptions


class Layout(ABC):
    """An architecture as those see it who divide it."""

    name: str
    """As the user calls it."""
    loss_in_parts: bool
    """Whether tensor parallelism leaves the logits divided, so that the loss is computed in parts."""
    sequence: SequenceInputs
    """Its inputs, as far as they are sequences."""
    loss: PairLoss
    """Takes logits and labels, as the model itself does."""

    def check(self, dimensions: MeshDimensions, options: StepOptions) -> None:
        """Raise `OptionError` if the architecture cannot be divided so; says which dimension, and why."""
        refusals: dict[str, Callable[[int, StepOptions], str | None]] = {
            "ep": partial(self._no_expert_parallel, dimensions),
            "cp": self.no_context_parallel,
            "tp": self.no_tensor_parallel,
            "pp": self.no_pipeline,
        }
        for name, refusal in refusals.items():
            size = dimensions.size(name)
            reason = refusal(size, options) if size > 1 else None
            if name == "cp" and options.seq:
                options = replace(options, seq=options.seq // size)  # what the ranks of the others have
            if reason:
                raise OptionError(f"{self.name} cannot be divided by --mesh {name}={size}: {reason}.")

    def _no_expert_parallel(self, dimensions: MeshDimensions, size: int, options: StepOptions) -> str | None:
        """Say why experts cannot be divided among so many ranks; None if they can."""
        if dimensions.size("tp") > 1:
            return "experts are divided either by ep, whole, or by tp, in parts; use one of the two"
        if not self.experts:
            return "it has no experts; use fsdp"
        return not_a_multiple("experts", self.experts, size)

    @property
    @abstractmethod
    def experts(self) -> int:
        """How many experts each mixture has; 0 if there are none."""

    @abstractmethod
    def no_tensor_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the layers cannot be divided among so many ranks; None if they can."""

    @abstractmethod
    def no_context_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the sequence cannot be divided among so many ranks; None if it can."""

    @abstractmethod
    def no_pipeline(self, size: int, options: StepOptions) -> str | None:
        """Say why the model cannot be cut into so many stages; None if it can."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return what FSDP gathers as a unit: the model's repeated layers."""

    @abstractmethod
    def divide_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply the standard tensor-parallel plan, in place."""

    @abstractmethod
    def stage(
        self, model: nn.Module, number: int, stages: int, seq: int, places: dict[str, Tensor]
    ) -> nn.Module:
        """Return what one stage of a pipeline runs, for sequences of that length.

        `places` are inputs of the model that say which part of each sequence a rank has, if not all.

        The first takes the model's input, each further one what the one before returns; the last returns
        logits.
        """

    @abstractmethod
    def tied_end(self, stage: nn.Module) -> nn.Module | None:
        """Return the module of a stage whose weight the other end of the pipeline has, too; None if none."""

    @abstractmethod
    def handover(self, tensor: DeviceMesh | None, options: StepOptions, loss: PairLoss) -> Handover:
        """Return what the stages of a pipeline hand to each other; `tensor` divides their layers.

        `loss` takes logits and labels, and the logits may be distributed.
        """


def not_a_multiple(what: str, count: int, size: int) -> str | None:
    """Say that a count cannot be divided evenly; None if it can."""
    return f"its {count} {what} cannot be divided evenly among {size} ranks" if count % size else None
