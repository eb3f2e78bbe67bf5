"""A variational autoencoder with the reparameterisation trick."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log_variance = nn.Linear(196, 80), nn.Linear(80, 10), nn.Linear(80, 10)
        self.fc3, self.fc4 = nn.Linear(10, 80), nn.Linear(80, 196)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log_variance


def build(batch: int = 32) -> trainfit.Step:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = torch.rand(batch, 1, 14, 14)

    def run() -> float:
        data = images.to(device).view(-1, 196)
        optimizer.zero_grad()
        output, mean, log_variance = model(data)
        reconstruction = F.binary_cross_entropy(output, data, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = reconstruction + divergence
        loss.backward()
        optimizer.step()
        return loss.item() / len(data)

    return trainfit.Step(model, optimizer, run)
