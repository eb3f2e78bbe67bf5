"""Image models of published memory rows, as timm 0.6 has them, that neither trainfit nor transformers has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000


def _unit(channels: int, width: int, size: Any, act: nn.Module | None = None, **how: Any) -> list[nn.Module]:
    """Convolution, norm, activation; padding keeps the size unless it is given."""
    padding = how.pop("padding", size // 2 if isinstance(size, int) else tuple(one // 2 for one in size))
    eps = how.pop("eps", 1e-5)
    layers = [nn.Conv2d(channels, width, size, padding=padding, bias=False, **how)]
    return [*layers, nn.BatchNorm2d(width, eps=eps), *([act] if act is not None else [])]


# -------------------------------------------------------------------------------------------------- resnet50d


class _BottleneckD(nn.Module):
    """1x1, 3x3, 1x1; the shortcut averages before its 1x1 where the image shrinks (He et al. 2018)."""

    def __init__(self, channels: int, width: int, step: int) -> None:
        super().__init__()
        made = 4 * width
        first = [
            *_unit(channels, width, 1, nn.ReLU(True)),
            *_unit(width, width, 3, nn.ReLU(True), stride=step),
        ]
        self.layers = nn.Sequential(*first, *_unit(width, made, 1))
        shortcut = [nn.AvgPool2d(2, step, ceil_mode=True, count_include_pad=False)] if step > 1 else []
        self.shortcut = nn.Sequential(*shortcut, *(_unit(channels, made, 1) if channels != made else []))

    def forward(self, features: Tensor) -> Tensor:
        made = self.layers(features)
        made += self.shortcut(features)
        return F.relu(made, inplace=True)


def _resnet50d() -> nn.Module:
    stem = [*_unit(3, 32, 3, nn.ReLU(True), stride=2), *_unit(32, 32, 3, nn.ReLU(True))]
    layers = [*stem, *_unit(32, 64, 3, nn.ReLU(True)), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(_BottleneckD(channels, 64 * 2**stage, 2 if stage and not block else 1))
            channels = 256 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


# ------------------------------------------------------------------------ mobilenetv2_140 and efficientnet_b3


class _Squeeze(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        weights = F.silu(self.reduce(features.mean((2, 3), keepdim=True)), inplace=True)
        return features * self.expand(weights).sigmoid()


class _Inverted(nn.Module):
    """Widen, depthwise, squeeze and excite if asked for, narrow (Sandler et al. 2018; Tan and Le 2019)."""

    def __init__(self, channels: int, width: int, size: int, step: int, wider: int, efficient: bool) -> None:
        super().__init__()

        def act() -> nn.Module:
            return nn.SiLU(inplace=True) if efficient else nn.ReLU6(inplace=True)

        inside = channels * wider
        layers = _unit(channels, inside, 1, act()) if wider > 1 else []
        layers += _unit(inside, inside, size, act(), stride=step, groups=inside)
        layers += [_Squeeze(inside, channels // 4)] if efficient else []
        self.layers = nn.Sequential(*layers, *_unit(inside, width, 1))
        self.residual = step == 1 and channels == width

    def forward(self, features: Tensor) -> Tensor:
        made: Tensor = self.layers(features)
        return made + features if self.residual else made


def _rounded(channels: float) -> int:
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found


def _inverted(rows: tuple[tuple[int, ...], ...], wide: float, deep: float, efficient: bool) -> nn.Module:
    def act() -> nn.Module:
        return nn.SiLU(inplace=True) if efficient else nn.ReLU6(inplace=True)

    channels = _rounded(32 * wide)
    layers = _unit(3, channels, 3, act(), stride=2)
    for repeats, width, size, step, wider in rows:
        for number in range(math.ceil(repeats * deep)):
            made = _rounded(width * wide)
            layers.append(_Inverted(channels, made, size, step if number == 0 else 1, wider, efficient))
            channels = made
    head = _rounded(1280 * wide)
    layers += [*_unit(channels, head, 1, act()), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(head, CLASSES))


_MOBILE = (
    *((1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (3, 32, 3, 2, 6), (4, 64, 3, 2, 6)),
    *((3, 96, 3, 1, 6), (3, 160, 3, 2, 6), (1, 320, 3, 1, 6)),
)
_EFFICIENT = (
    *((1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6)),
    *((3, 112, 5, 1, 6), (4, 192, 5, 2, 6), (1, 320, 3, 1, 6)),
)

# ----------------------------------------------------------------------------------------------- inception_v3


class _Branches(nn.Module):
    """Branches side by side; their results become one. A list inside a branch divides it once more."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([branch(features) for branch in self.branches], 1)


def _conv(channels: int, width: int, size: Any, **how: Any) -> nn.Sequential:
    how.setdefault("padding", 0 if size == 1 or how.get("stride", 1) == 2 else None)
    if how["padding"] is None:
        how.pop("padding")
    return nn.Sequential(*_unit(channels, width, size, nn.ReLU(True), eps=1e-3, **how))


def _inception_v3() -> nn.Module:
    """Szegedy et al. 2015, without the second classifier."""
    pool, s = lambda: nn.AvgPool2d(3, 1, 1), nn.Sequential
    stem = [_conv(3, 32, 3, stride=2), _conv(32, 32, 3, padding=0), _conv(32, 64, 3), nn.MaxPool2d(3, 2)]
    layers: list[nn.Module] = [*stem, _conv(64, 80, 1), _conv(80, 192, 3, padding=0), nn.MaxPool2d(3, 2)]
    for channels, pooled in ((192, 32), (256, 64), (288, 64)):
        five = s(_conv(channels, 48, 1), _conv(48, 64, 5))
        three = s(_conv(channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3))
        layers.append(_Branches(_conv(channels, 64, 1), five, three, s(pool(), _conv(channels, pooled, 1))))
    shrink = s(_conv(288, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, stride=2))
    layers.append(_Branches(_conv(288, 384, 3, stride=2), shrink, nn.MaxPool2d(3, 2)))
    for w in (128, 160, 160, 192):
        seven = s(_conv(768, w, 1), _conv(w, w, (1, 7)), _conv(w, 192, (7, 1)))
        twice = s(_conv(768, w, 1), _conv(w, w, (7, 1)), _conv(w, w, (1, 7)), _conv(w, w, (7, 1)))
        twice.append(_conv(w, 192, (1, 7)))
        layers.append(_Branches(_conv(768, 192, 1), seven, twice, s(pool(), _conv(768, 192, 1))))
    one = s(_conv(768, 192, 1), _conv(192, 320, 3, stride=2))
    other = s(
        _conv(768, 192, 1), _conv(192, 192, (1, 7)), _conv(192, 192, (7, 1)), _conv(192, 192, 3, stride=2)
    )
    layers.append(_Branches(one, other, nn.MaxPool2d(3, 2)))
    for channels in (1280, 2048):
        wide = s(_conv(channels, 384, 1), _Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))))
        deep = s(_conv(channels, 448, 1), _conv(448, 384, 3))
        deep.append(_Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))))
        layers.append(_Branches(_conv(channels, 320, 1), wide, deep, s(pool(), _conv(channels, 192, 1))))
    return s(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


# ---------------------------------------------------------------------------------------- deit3_base and cait


class _Attention(nn.Module):
    """Attention in plain operators; with `talking`, heads are mixed before and after the softmax."""

    def __init__(self, width: int, heads: int, talking: bool) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.ModuleList(nn.Linear(heads, heads) for _ in range(2)) if talking else None

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        qkv = self.qkv(x).reshape(batch, rows, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.mix is None:
            query, key, value = qkv.unbind(0)
            weights = (query @ key.transpose(-2, -1)) * self.scale
            weights = weights.softmax(dim=-1)
        else:
            query, key, value = qkv[0] * self.scale, qkv[1], qkv[2]
            weights = query @ key.transpose(-2, -1)
            weights = self.mix[0](weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            weights = weights.softmax(dim=-1)
            weights = self.mix[1](weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = (weights @ value).transpose(1, 2).reshape(batch, rows, width)
        made: Tensor = self.proj(x)
        return made


class _ClassAttention(nn.Module):
    """The class token alone asks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        shape = (self.heads, width // self.heads)
        query = self.q(x[:, 0]).unsqueeze(1).reshape(batch, 1, *shape).permute(0, 2, 1, 3) * self.scale
        key, value = (make(x).reshape(batch, rows, *shape).permute(0, 2, 1, 3) for make in (self.k, self.v))
        weights = (query @ key.transpose(-2, -1)).softmax(dim=-1)
        made: Tensor = self.proj((weights @ value).transpose(1, 2).reshape(batch, 1, width))
        return made


class _ScaledBlock(nn.Module):
    """A block whose two parts are scaled by weights that begin small (Touvron et al. 2021, 2022)."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), 1e-6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scales[0] * self.attention(self.norms[0](x))
        return x + self.scales[1] * self.mlp(self.norms[1](x))

    def for_class(self, x: Tensor, token: Tensor) -> Tensor:
        joined = torch.cat((token, x), dim=1)
        token = token + self.scales[0] * self.attention(self.norms[0](joined))
        return token + self.scales[1] * self.mlp(self.norms[1](token))


class _Vision(nn.Module):
    """DeiT III, or CaiT with two last layers for the class token."""

    def __init__(self, width: int, heads: int, blocks: int, last: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 196, width))
        made = [_ScaledBlock(width, _Attention(width, heads, talking=bool(last))) for _ in range(blocks)]
        self.blocks = nn.Sequential(*made)
        self.last = nn.ModuleList(_ScaledBlock(width, _ClassAttention(width, heads)) for _ in range(last))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        token = self.token.expand(len(x), -1, -1)
        if not self.last:
            x = self.norm(self.blocks(torch.cat((token, x), dim=1)))
        else:
            x = self.blocks(x)
            for block in self.last:
                token = block.for_class(x, token)
            x = self.norm(torch.cat((token, x), dim=1))
        logits: Tensor = self.head(x[:, 0])
        return logits


IMAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50d": _resnet50d,
    "mobilenetv2_140": lambda: _inverted(_MOBILE, 1.4, 1.0, efficient=False),
    "efficientnet_b3": lambda: _inverted(_EFFICIENT, 1.2, 1.4, efficient=True),
    "inception_v3": _inception_v3,
    "deit3_base_patch16_224": lambda: _Vision(768, 12, 12, 0),
    "cait_s24_224": lambda: _Vision(384, 8, 24, 2),
}
