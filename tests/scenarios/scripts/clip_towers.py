"""CLIP-like: an image tower and a text tower, a learned temperature, a symmetric contrastive loss."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class TwoTowers(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 24, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(24 * 16, width))
        self.tokens = nn.Embedding(300, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.text = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.project = nn.Linear(32, width, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = F.normalize(self.image(images), dim=-1)
        hidden = self.text(self.tokens(tokens))
        # The representation of the end-of-text token, the highest number in each sequence.
        ends = hidden[torch.arange(len(tokens), device=tokens.device), tokens.argmax(dim=-1)]
        text = F.normalize(self.project(ends), dim=-1)
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def build(device: str = "cpu") -> trainfit.Step:
    model = TwoTowers().to(device)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.2}, {"params": no_decay, "weight_decay": 0.0}], lr=5e-4
    )
    images = torch.randn(12, 3, 16, 16, device=device)
    tokens = torch.randint(0, 300, (12, 10), device=device)

    def run() -> torch.Tensor:
        loss = model(images, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss

    return trainfit.Step(model, optimizer, run)
