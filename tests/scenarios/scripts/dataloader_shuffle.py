"""A DataLoader without workers, shuffled, that starts over when it is exhausted."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainfit


def forever(loader: DataLoader):
    while True:
        yield from loader


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    data = TensorDataset(torch.randn(120, 3, 8, 8), torch.randint(0, 5, (120,)))
    train, _ = random_split(data, [100, 20], generator=torch.Generator().manual_seed(42))
    loader = DataLoader(train, batch_size=batch, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def run() -> torch.Tensor:
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
