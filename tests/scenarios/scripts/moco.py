"""MoCo: contrastive learning with a momentum encoder and a queue of keys in a buffer."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class MoCo(nn.Module):
    def __init__(self, width: int = 32, queue: int = 256) -> None:
        super().__init__()
        self.query = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, width)
        )
        self.key = copy.deepcopy(self.query)
        for parameter in self.key.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(width, queue), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update(self, keys: torch.Tensor) -> None:
        start = int(self.pointer)
        self.queue[:, start : start + len(keys)] = keys.T
        self.pointer[0] = (start + len(keys)) % self.queue.shape[1]

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                slow.data = slow.data * 0.999 + fast.data * 0.001
            k = F.normalize(self.key(second), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        self.update(k)
        return F.cross_entropy(logits, labels)


def build(device: str = "cpu") -> trainfit.Step:
    model = MoCo().to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.03, momentum=0.9, weight_decay=1e-4)
    images = torch.rand(16, 3, 24, 24, device=device)

    def run() -> torch.Tensor:
        views = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
        loss = model(*views)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
