"""One epoch over a data set that is too small: the iterator ends after the first batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfit


def build(batch: int = 32, device: str = "cpu") -> trainfit.Step:
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
    batches = iter(DataLoader(data, batch_size=batch))

    def run() -> torch.Tensor:
        inputs, labels = next(batches)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
