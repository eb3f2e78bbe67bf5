"""A recommender like DLRM: embedding bags over ragged features, dot-product interaction, Adagrad."""

import torch
from torch import nn

import trainfit


class Recommender(nn.Module):
    def __init__(self, tables: int = 3, rows: int = 300, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, indices: list, offsets: list) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(i, o) for bag, i, o in zip(self.bags, indices, offsets))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, offset=-1, device=x.device)
        return self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)


def build(batch: int = 24, device: str = "cpu") -> trainfit.Step:
    model = Recommender().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    dense, clicks = torch.rand(batch, 13, device=device), torch.rand(batch, device=device).round()
    indices = [torch.randint(0, 300, (3 * batch,), device=device) for _ in range(3)]
    offsets = [torch.arange(0, 3 * batch, 3, device=device) for _ in range(3)]

    def run() -> torch.Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, indices, offsets), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
