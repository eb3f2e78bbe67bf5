"""The one loss of the built-in models, mean cross-entropy, over next tokens, masked tokens or classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED_LABEL = -100  # what F.cross_entropy skips unless told otherwise


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` (..., classes) against `labels` (...); ignored labels do not count.

    The logits go to float32 first: a log-sum-exp over a large vocabulary loses too much in bfloat16.
    """
    classes = logits.shape[-1]
    return F.cross_entropy(logits.float().view(-1, classes), labels.reshape(-1))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each position's logits against the label one position later.

    The labels are shifted, not the logits: a slice of the logits would have to be copied to be flattened,
    and they are often the largest activation of the step.
    """
    return class_loss(logits, of_next_tokens(labels))


def of_next_tokens(labels: Tensor) -> Tensor:
    """Return labels (batch, sequence) such that each position has that of the next; the last has none."""
    last = torch.full_like(labels[:, :1], IGNORED_LABEL)
    return torch.cat((labels[:, 1:], last), dim=1)
