"""Sentiment of reviews of different lengths: a packed bidirectional LSTM."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import trainfit


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(64, 2)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        mask = torch.arange(padded.size(1), device=padded.device)[None, :] < lengths[:, None].to(
            padded.device
        )
        pooled = (padded * mask.unsqueeze(-1)).sum(1) / lengths[:, None].to(padded.device)
        return self.head(pooled)


def build(device: str = "cpu") -> trainfit.Step:
    model = Classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    reviews = [torch.randint(1, 500, (length,)) for length in (17, 5, 29, 11, 23, 8)]

    def run() -> torch.Tensor:
        lengths = torch.tensor([len(review) for review in reviews])
        tokens = pad_sequence(reviews, batch_first=True).to(device)
        labels = torch.randint(0, 2, (len(reviews),), device=device)
        loss = criterion(model(tokens, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
