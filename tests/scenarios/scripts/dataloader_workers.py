"""A DataLoader with two worker processes, pinned memory and copies that do not block."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainfit


class Pictures(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        random = np.random.default_rng(index)
        return random.standard_normal((3, 8, 8), dtype=np.float32), index % 5


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    loader = DataLoader(
        Pictures(), batch_size=batch, num_workers=2, pin_memory=device == "cuda", drop_last=True
    )
    batches = iter(loader)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> torch.Tensor:
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
