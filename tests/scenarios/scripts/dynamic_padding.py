"""Sentences of random lengths, padded to the longest of each batch by a collate function."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import trainfit


class Sentences(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(5, 40, (512,), generator=generator).tolist()
        self.items = [torch.randint(1, 200, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items[index]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden)


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Sentences(), batch, collate_fn=lambda items: pad_sequence(items, batch_first=True))
    batches = iter(loader)

    def run() -> torch.Tensor:
        tokens = next(batches).to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
