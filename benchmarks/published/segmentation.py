"""FCN on a dilated ResNet, as mmsegmentation trains it: the published rows of memory are about it.

The stem has three 3x3 convolutions (ResNetV1c); the last two stages keep their resolution and dilate (D8), so
that features are an eighth of the image. The decoder sees stage 4, an auxiliary one stage 3; both are trained
with a cross entropy at the resolution of the image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit import Step

from .older_torch import LogSoftmaxWithInput

DEVICE = "cuda"
CLASSES = 19
_DEPTHS = {"r18": (2, 2, 2, 2), "r50": (3, 4, 6, 3), "r101": (3, 4, 23, 3)}
_STRIDES, _DILATIONS = (1, 2, 1, 1), (1, 1, 2, 4)


def _unit(channels: int, width: int, size: int, stride: int = 1, dilation: int = 1) -> list[nn.Module]:
    padding = dilation * (size // 2)
    convolution = nn.Conv2d(channels, width, size, stride, padding, dilation, bias=False)
    return [convolution, nn.BatchNorm2d(width)]


class _Residual(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the channels."""

    def __init__(self, channels: int, width: int, stride: int, dilation: int, bottleneck: bool) -> None:
        super().__init__()
        made = 4 * width if bottleneck else width
        if bottleneck:
            layers = [*_unit(channels, width, 1), nn.ReLU(True), *_unit(width, width, 3, stride, dilation)]
            layers += [nn.ReLU(True), *_unit(width, made, 1)]
        else:
            layers = [*_unit(channels, width, 3, stride, dilation), nn.ReLU(True), *_unit(width, width, 3)]
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and channels == made
        self.shortcut = nn.Sequential() if same else nn.Sequential(*_unit(channels, made, 1, stride))

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.layers(features) + self.shortcut(features), inplace=True)


class _Decoder(nn.Module):
    """3x3 convolutions; with `concatenate` one more that sees the input beside their result."""

    def __init__(self, channels: int, width: int, convolutions: int, concatenate: bool) -> None:
        super().__init__()
        inside = [channels, *[width] * convolutions]
        units = ([*_unit(a, b, 3), nn.ReLU(True)] for a, b in itertools.pairwise(inside))
        self.layers = nn.Sequential(*(layer for unit in units for layer in unit))
        joined = [*_unit(channels + width, width, 3), nn.ReLU(True)] if concatenate else []
        self.joined = nn.Sequential(*joined)
        self.concatenate = concatenate
        self.classify = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, CLASSES, 1))

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.layers(features)
        if self.concatenate:
            hidden = self.joined(torch.cat([features, hidden], 1))
        logits: Tensor = self.classify(hidden)
        return logits


class FullyConvolutional(nn.Module):
    """Returns the loss of both decoders."""

    def __init__(self, depth: str) -> None:
        super().__init__()
        bottleneck = depth != "r18"
        stem = [*_unit(3, 32, 3, 2), nn.ReLU(True), *_unit(32, 32, 3), nn.ReLU(True), *_unit(32, 64, 3)]
        self.stem = nn.Sequential(*stem, nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        channels = 64
        for number, blocks in enumerate(_DEPTHS[depth]):
            width, stride, dilation = 64 * 2**number, _STRIDES[number], _DILATIONS[number]
            # The first block of a stage still has the dilation of the stage before.
            dilations = [max(dilation // 2, 1), *[dilation] * (blocks - 1)]
            stage = []
            for block, spacing in enumerate(dilations):
                stage.append(_Residual(channels, width, stride if block == 0 else 1, spacing, bottleneck))
                channels = 4 * width if bottleneck else width
            self.stages.append(nn.Sequential(*stage))
        self.decoder = _Decoder(channels, channels // 4, 2, concatenate=True)
        self.auxiliary = _Decoder(channels // 2, channels // 8, 1, concatenate=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        seen = []
        hidden = self.stem(images)
        for stage in self.stages:
            hidden = stage(hidden)
            seen.append(hidden)
        main, auxiliary = self.decoder(seen[3]), self.auxiliary(seen[2])
        return _loss(main, labels) + 0.4 * _loss(auxiliary, labels)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    resized = F.interpolate(logits.float(), labels.shape[1:], mode="bilinear", align_corners=False)
    scores = LogSoftmaxWithInput.apply(resized)
    # One loss per pixel first: mmsegmentation weighs them.
    return F.nll_loss(scores, labels, reduction="none", ignore_index=255).mean()


def build_segmentation(config: dict[str, Any]) -> Callable[[], Step]:
    """Return the function that builds the step of a row.

    Each process of data parallel training has a second copy of all gradients, in the buckets that it sends.
    """

    def build() -> Step:
        torch.backends.cudnn.allow_tf32 = False  # no such thing on a V100
        model = FullyConvolutional(config["depth"]).to(DEVICE).train()
        images = torch.randn(config["images"], 3, config["height"], config["width"], device=DEVICE)
        shape = (config["images"], config["height"], config["width"])
        labels = torch.randint(0, CLASSES, shape, device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        buckets = [torch.zeros_like(parameter) for parameter in model.parameters()]

        def run() -> Tensor:
            with torch.autocast(DEVICE, torch.float16, enabled="fp16" in config["precision"]):
                loss: Tensor = model(images, labels)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            assert buckets
            return loss

        return Step(model=model, optimizer=optimizer, run=run)

    return build
