"""Quantisation-aware training: fake-quantise modules with moving observers around a small convnet."""

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, PerChannelMinMaxObserver

import trainfit


def for_activations() -> FakeQuantize:
    return FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)


def for_weights(channels: int) -> FakeQuantize:
    return FakeQuantize(
        observer=PerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


class QuantConv(nn.Conv2d):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, padding=1)
        self.weight_quantizer = for_weights(self.out_channels)
        self.activation_quantizer = for_activations()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation_quantizer(self._conv_forward(x, self.weight_quantizer(self.weight), self.bias))


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(
        for_activations(), QuantConv(3, 16, 3), nn.ReLU(), QuantConv(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(4, 3, 16, 16, device=device), torch.randint(0, 10, (4,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
