"""A custom operator with a fake implementation and a backward of its own (torch.library)."""

import torch
from torch import nn

import trainfit


@torch.library.custom_op("scenarios::scaled_square", mutates_args=())
def scaled_square(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().cpu().numpy() ** 2 * scale).to(x.device, x.dtype)


@scaled_square.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    x, scale = inputs
    ctx.save_for_backward(x)
    ctx.scale = scale


def _backward(ctx, gradient: torch.Tensor):
    (x,) = ctx.saved_tensors
    return gradient * 2 * ctx.scale * x, None


scaled_square.register_autograd(_backward, setup_context=_save)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(scaled_square(self.first(x), 0.5))


def build(device: str = "cpu") -> trainfit.Step:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(128, 32, device=device)

    def run() -> torch.Tensor:
        loss = model(inputs).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
