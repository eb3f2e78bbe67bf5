"""A training step of your own: an ordinary PyTorch function that trainfit calls without allocating anything.

trainfit estimate examples/train_step.py:build --device rtx-4090
trainfit verify examples/train_step.py:build --batch 8
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfit


class Classifier(nn.Module):
    """A small transformer encoder that sorts sequences into classes."""

    def __init__(self, vocabulary: int = 8192, width: int = 256, layers: int = 4, classes: int = 10) -> None:
        """Make the embedding, the encoder and the head."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return one score per class, from the mean over the sequence."""
        features = self.encoder(self.embedding(tokens))
        scores: torch.Tensor = self.head(features.mean(dim=1))
        return scores


def build(batch: int = 32, seq: int = 128, device: str = "cpu") -> trainfit.Step:
    """Build the step. `--batch`, `--seq` and `--device` on the command line fill the parameters."""
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 8192, (batch, seq), device=device)
    labels = torch.randint(0, 10, (batch,), device=device)

    def run() -> torch.Tensor:
        """Do what one iteration of the training loop does."""
        loss = functional.cross_entropy(model(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


if __name__ == "__main__":
    print(f"loss of one real step: {build(batch=2).run().item():.3f}")
