"""A Fourier neural operator: real FFTs, complex weights, a product in frequency space."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class SpectralConv(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self, width: int = 16, modes: int = 6) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, width, 1), nn.Conv1d(width, 1, 1)
        self.spectral = nn.ModuleList([SpectralConv(width, modes) for _ in range(2)])
        self.pointwise = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for spectral, pointwise in zip(self.spectral, self.pointwise):
            x = F.gelu(spectral(x) + pointwise(x))
        return self.project(x)


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    model = FNO().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    functions = torch.randn(batch, 2, 64, device=device)
    solutions = torch.randn(batch, 1, 64, device=device)

    def run() -> torch.Tensor:
        difference = (model(functions) - solutions).flatten(1)
        loss = (difference.norm(dim=1) / solutions.flatten(1).norm(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
