"""Random training inputs: tokens, labels, images."""

from __future__ import annotations

import torch
from torch import Tensor

from trainfit.models.losses import IGNORED_LABEL
from trainfit.models.recipe import StepOptions

# BERT's masking picks 15 % of the positions at random. Every seventh (14.3 %) has the same cost, and a batch
# always has some: a batch without any would have no loss.
_MASKED_EVERY = 7


def random_tokens(batch: int, seq: int, vocab_size: int, device: str) -> Tensor:
    """Token ids (batch, seq)."""
    return torch.randint(0, vocab_size, (batch, seq), device=device)


def masked_labels(tokens: Tensor) -> Tensor:
    """Keep the tokens that are to be guessed; all other positions get the label that the loss ignores."""
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[:, ::_MASKED_EVERY] = tokens[:, ::_MASKED_EVERY]
    return labels


def random_images(batch: int, channels: int, height: int, width: int, options: StepOptions) -> Tensor:
    """Images (batch, channels, height, width) in the dtype of the model's weights."""
    return torch.randn(batch, channels, height, width, device=options.device, dtype=options.parameter_dtype)


def random_classes(batch: int, classes: int, device: str) -> Tensor:
    """One class per example."""
    return torch.randint(0, classes, (batch,), device=device)
