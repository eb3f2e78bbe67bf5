"""An IterableDataset that packs a stream of tokens into sequences of one length."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import trainfit


class TokenStream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        random_numbers = random.Random(0)
        buffer: list[int] = []
        while True:
            buffer.extend(random_numbers.randrange(90) for _ in range(random_numbers.randint(3, 30)))
            while len(buffer) > self.length:
                yield torch.tensor(buffer[: self.length + 1])
                buffer = buffer[self.length :]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def build(batch: int = 4, seq: int = 20, device: str = "cpu") -> trainfit.Step:
    batches = iter(DataLoader(TokenStream(seq), batch_size=batch))
    model = nn.Sequential(nn.Embedding(90, 32), Block(), nn.Linear(32, 90)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def run() -> torch.Tensor:
        tokens = next(batches).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 90), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
