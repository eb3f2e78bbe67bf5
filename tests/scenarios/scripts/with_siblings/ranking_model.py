"""The model of `train_ranking.py`, in a file of its own."""

from torch import Tensor, nn


class Ranker(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.items, self.users = nn.Embedding(300, width), nn.Embedding(200, width)
        self.bias = nn.Embedding(300, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(-1) + self.bias(items).squeeze(-1)
