"""A LightningModule, whose hooks a loop calls as the Trainer does with automatic optimization."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class LitClassifier(L.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(144, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch: tuple, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    module = LitClassifier().to(device)
    module.train()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    data = (torch.randn(batch, 1, 12, 12, device=device), torch.randint(0, 10, (batch,), device=device))

    def run() -> torch.Tensor:
        loss = module.training_step(data, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return trainfit.Step(module, optimizer, run)
