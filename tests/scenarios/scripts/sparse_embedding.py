"""word2vec with negative sampling: sparse gradients, SparseAdam."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class SkipGram(nn.Module):
    def __init__(self, vocabulary: int = 2000, width: int = 32) -> None:
        super().__init__()
        self.centre = nn.Embedding(vocabulary, width, sparse=True)
        self.context = nn.Embedding(vocabulary, width, sparse=True)

    def forward(self, words: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        word = self.centre(words)
        positive = F.logsigmoid((word * self.context(near)).sum(1))
        negative = F.logsigmoid(-torch.bmm(self.context(far), word.unsqueeze(2)).squeeze(2)).sum(1)
        return -(positive + negative).mean()


def build(batch: int = 32, device: str = "cpu") -> trainfit.Step:
    model = SkipGram().to(device)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)

    def run() -> torch.Tensor:
        words, near = torch.randint(0, 2000, (2, batch), device=device)
        far = torch.randint(0, 2000, (batch, 5), device=device)
        optimizer.zero_grad()
        loss = model(words, near, far)
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
