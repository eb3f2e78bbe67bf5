"""ResNet (He et al. 2015) in its v1.5 form: a bottleneck that shrinks the image does so in its 3x3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainfit.models.losses import class_loss


@dataclass(frozen=True)
class ResNetConfig:
    """Shape of a ResNet. The defaults are ResNet-50's for the 1000 ImageNet classes."""

    block: Literal["basic", "bottleneck"] = "bottleneck"
    blocks_per_stage: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    groups: int = 1
    """Of a bottleneck's 3x3 convolution: 32 in a ResNeXt."""
    group_width: int = 64
    """Channels per group inside the first stage's bottlenecks: 4 in a ResNeXt-50, 128 in a wide ResNet."""
    classes: int = 1000

    @property
    def expansion(self) -> int:
        """How many times wider a block's output is than its inside."""
        return 4 if self.block == "bottleneck" else 1


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Without bias, because a batch norm with its own bias always follows."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, groups=groups, bias=False)


class ResidualBlock(nn.Module):
    """Convolutions, each with batch norm, added to a shortcut.

    Basic: 3x3, 3x3. Bottleneck: 1x1 to narrow, 3x3, 1x1 to widen. Where the shape changes, the shortcut
    is a 1x1 convolution.
    """

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * config.expansion
        if config.block == "bottleneck":
            inside = width * config.groups * config.group_width // 64
            convolutions = [
                _convolution(inputs, inside, 1),
                _convolution(inside, inside, 3, stride, config.groups),
                _convolution(inside, outputs, 1),
            ]
        else:
            convolutions = [_convolution(inputs, width, 3, stride), _convolution(width, outputs, 3)]
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm2d(layer.out_channels) for layer in convolutions)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        hidden = images
        last = len(self.convolutions) - 1
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            hidden = norm(convolution(hidden))
            if number != last:
                hidden = self.relu(hidden)
        hidden += self.shortcut(images)
        activated: Tensor = self.relu(hidden)
        return activated


class ResNet(nn.Module):
    """Class logits for `images`, or the mean loss when `labels` are given."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Sequential(
            _convolution(3, config.width, 7, stride=2),
            nn.BatchNorm2d(config.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.stages = nn.ModuleList()
        inputs = config.width
        for number, blocks in enumerate(config.blocks_per_stage):
            width = config.width * 2**number
            stage = nn.Sequential()
            for position in range(blocks):
                stride = 2 if number > 0 and position == 0 else 1
                stage.append(ResidualBlock(config, inputs, width, stride))
                inputs = width * config.expansion
            self.stages.append(stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, config.classes)
        self.apply(_initialise)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.stem(images)
        for stage in self.stages:
            hidden = stage(hidden)
        logits: Tensor = self.head(torch.flatten(self.pool(hidden), start_dim=1))
        return logits if labels is None else class_loss(logits, labels)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
