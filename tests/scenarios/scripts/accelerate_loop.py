"""Accelerate: prepare, accumulate, backward and clip as in its documentation."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfit


def build(batch: int = 8) -> trainfit.Step:
    accelerator = Accelerator(gradient_accumulation_steps=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    data = TensorDataset(torch.randn(64 * batch, 32), torch.randint(0, 10, (64 * batch,)))
    loader = DataLoader(data, batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = iter(loader)

    def run() -> torch.Tensor:
        inputs, labels = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
