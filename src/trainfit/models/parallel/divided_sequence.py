"""Sequences of which each rank has a part (context parallel), divided as torch's own trainers do it.

torch's `context_parallel` is around forward and backward: it leaves each rank its part of the tokens, of
their labels and positions, and lets keys and values go around between the ranks. Where attention is causal, a
rank gets a piece from the front and one from the back, so that all have as much to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional as F

from trainfit.models.losses import IGNORED_LABEL, of_next_tokens

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_options: Any = _attention._cp_options


@dataclass(frozen=True)
class SequenceInputs:
    """What a model calls its inputs, and whether a token sees only those before it."""

    tokens: str
    positions: str
    causal: bool
    mask: str = ""
    """A mask of ones, if the model makes others without it; positions then have rows for the samples, too."""


def refuse_sequences(name: str, seq: int, ranks: int, *, causal: bool, device: str) -> str | None:
    """Say why sequences of so many `name` cannot be divided; None if they can."""
    if device == "cpu" and _CPU_ATTENTION not in _attention.custom_ops:
        return "torch divides attention along the sequence on GPUs only; name one, as in --device h100"
    pieces = 2 * ranks if causal else ranks
    if seq % pieces:
        each = "two for each of the" if causal else "one for each of the"
        return f"its {seq} {name} cannot be divided into {pieces} equal pieces, {each} {ranks} ranks"
    return None


class DividedSequence:
    """The inputs of a step whose sequences are divided: whole between steps, and a rank's part within."""

    def __init__(
        self, mesh: DeviceMesh, inputs: Mapping[str, Tensor], names: SequenceInputs, *, one_by_one: bool
    ) -> None:
        """Take a step's inputs. With `one_by_one` the model gets single samples, as in a pipeline."""
        self.mesh, self.names = mesh, names
        self.tokens, labels = inputs[names.tokens], inputs["labels"]
        # Shifted before they are divided: a part does not have the label of the token behind it.
        self.labels = of_next_tokens(labels) if names.causal else labels
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        self.positions = positions[None].clone() if names.mask else positions
        rows = self.tokens[:1] if one_by_one else self.tokens
        self.mask = torch.ones_like(rows) if names.mask else None
        counted = (self.labels != IGNORED_LABEL).sum()
        self._per_sample = counted / (len(labels) * mesh.size())

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model."""
        return {self.names.tokens: self.tokens, **self.places}

    @property
    def places(self) -> dict[str, Tensor]:
        """Those that say which tokens a rank has."""
        mask = {} if self.mask is None else {self.names.mask: self.mask}
        return {self.names.positions: self.positions, **mask}

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Have only this rank's part of every sequence inside of the block."""
        buffers = [self.tokens, self.labels, *self.places.values()]
        along = [buffer.dim() - 1 for buffer in buffers]
        balanced, _options.enable_load_balance = _options.enable_load_balance, self.names.causal
        try:
            with warnings.catch_warnings():
                # The logits are a view at times, and nothing writes to them.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
                with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=along):
                    yield
        finally:
            _options.enable_load_balance = balanced

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return this rank's share of the loss; the mean over the ranks is that of the whole sequences."""
        classes = logits.shape[-1]
        total = F.cross_entropy(logits.float().view(-1, classes), labels.reshape(-1), reduction="sum")
        return total / (self._per_sample * len(labels))
