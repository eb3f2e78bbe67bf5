"""Lightning Fabric: setup, backward and clipping by the library, the loop is one's own."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class LitAutoencoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 144))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        flat = batch.flatten(1)
        return F.mse_loss(self.decoder(self.encoder(flat)), flat)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.training_step(batch, 0)


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    fabric = L.Fabric(accelerator=device, devices=1)
    module = LitAutoencoder()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=1e-3))
    images = fabric.to_device(torch.randn(batch, 1, 12, 12))

    def run() -> torch.Tensor:
        loss = model(images)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
