"""Translation with GRUs and attention, teacher forcing for half of the batches."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class Encoder(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gru(self.embedding(tokens))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, token: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor) -> tuple:
        weights = F.softmax(torch.bmm(hidden.transpose(0, 1), memory.transpose(1, 2)), dim=-1)
        context = torch.bmm(weights, memory)
        output, hidden = self.gru(torch.cat([self.embedding(token), context], dim=2), hidden)
        return self.out(output), hidden


def build(device: str = "cpu") -> trainfit.Step:
    random.seed(3)
    encoder, decoder = Encoder(200, 32).to(device), Decoder(180, 32).to(device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (encoder, decoder)]
    source = torch.randint(2, 200, (8, 12), device=device)
    target = torch.randint(2, 180, (8, 9), device=device)

    def run() -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        memory, hidden = encoder(source)
        token = torch.zeros(8, 1, dtype=torch.long, device=device)
        outputs = []
        teacher_forcing = random.random() < 0.5
        for position in range(target.size(1)):
            logits, hidden = decoder(token, hidden, memory)
            outputs.append(logits)
            if teacher_forcing:
                token = target[:, position].unsqueeze(1)
            else:
                token = logits.topk(1).indices.squeeze(-1).detach()
        loss = F.nll_loss(F.log_softmax(torch.cat(outputs, dim=1), dim=-1).view(-1, 180), target.view(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return trainfit.Step(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), optimizers, run)
