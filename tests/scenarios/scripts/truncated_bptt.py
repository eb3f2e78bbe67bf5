"""A language model with truncated back-propagation: the state of the LSTM goes on, detached."""

import torch
from torch import nn

import trainfit


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 120, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight  # tied
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor, hidden: tuple) -> tuple[torch.Tensor, tuple]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, batch, 32), weight.new_zeros(2, batch, 32)


def repackage(state):
    return state.detach() if isinstance(state, torch.Tensor) else tuple(repackage(part) for part in state)


def build(batch: int = 6, seq: int = 12, device: str = "cpu") -> trainfit.Step:
    model = LanguageModel().to(device)
    corpus = torch.randint(0, 120, (400, batch), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hidden = model.init_hidden(batch)
    position = 0

    def run() -> torch.Tensor:
        nonlocal hidden, position
        data, target = corpus[position : position + seq], corpus[position + 1 : position + seq + 1]
        position = (position + seq) % (len(corpus) - seq - 1)
        hidden = repackage(hidden)
        output, hidden = model(data, hidden)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
