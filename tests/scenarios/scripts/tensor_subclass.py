"""A tensor subclass with __torch_function__ that carries a unit through the model's inputs."""

import torch
from torch import nn

import trainfit


class Quantity(torch.Tensor):
    unit = "m"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.unit = next((a.unit for a in args if isinstance(a, cls)), "m")
        return result


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lengths = torch.rand(50, 12, device=device).as_subclass(Quantity)
    lengths.unit = "km"

    def run() -> torch.Tensor:
        prediction = model(lengths)
        assert prediction.unit == "km"
        loss = (prediction - lengths.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.as_subclass(torch.Tensor)

    return trainfit.Step(model, optimizer, run)
