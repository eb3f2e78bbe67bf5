"""Custom autograd.Functions: binary weights with a straight-through estimator, a swish that saves less."""

import torch
from torch import nn

import trainfit


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.sign()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= 1)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate * (1 + x * (1 - gate)))


class BinaryLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, SignSTE.apply(self.weight), self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BinaryLinear(64, 128), BinaryLinear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Swish.apply(self.first(x)))


def build(device: str = "cpu") -> trainfit.Step:
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = torch.randn(48, 64, device=device), torch.randint(0, 10, (48,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
