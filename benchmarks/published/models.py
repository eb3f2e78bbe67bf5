"""The models of the published rows, as a step that does what the row says was measured.

Built-ins where there is one, else transformers, else timm itself, if it is installed; what is written out
below are three classics, and torchvision's ConvNeXt, which drops branches at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainfit import Step
from trainfit.models.gpt2 import GPT2, GPT2Config
from trainfit.models.resnet import ResNet, ResNetConfig

from .image_models import IMAGE_MODELS

DEVICE = "cuda"


class CannotExpress(Exception):
    """The row measures something that a captured step does not show; the message says what."""


def build_row(row: dict[str, Any]) -> Callable[[], Step]:
    """Return the function that builds the step of a row."""
    config = row["config"]
    if config.get("compile"):
        raise CannotExpress("the step was compiled; trainfit prices eager steps")
    name = row["model"]
    if name.startswith("MPT"):
        return lambda: _mpt(row)
    if name.startswith("HF "):
        return lambda: _milabench_huggingface(row)
    if name.startswith(("torchvision ", "timm ")):
        return lambda: _vision(row)
    raise CannotExpress(f"no model called {name!r} here")


# -------------------------------------------------------------------------------------------- steps


def _precision(text: str) -> torch.dtype | None:
    """Set what float32 products are rounded to, and return what autocast computes in."""
    tf32 = "tf32" in text and "off" not in text
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return torch.float16 if "fp16" in text else torch.bfloat16 if "bf16" in text else None


def _autocast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(DEVICE, dtype, enabled=dtype is not None)


def _milabench_huggingface(row: dict[str, Any]) -> Step:
    """The Hugging Face bench of milabench: Adam, a gradient scaler, and gradients that are never cleared."""
    config = row["config"]
    dtype = _precision(config["precision"])
    model, inputs = _huggingface(row["model"], config["batch_per_gpu"], config["seq_len"])
    model = model.to(DEVICE).train()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype is torch.float16)

    def run() -> Tensor:
        with _autocast(dtype):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def _vision(row: dict[str, Any]) -> Step:
    """Image classification: milabench's torchvision bench, and timm's training benchmark on torch 1.12."""
    config = row["config"]
    family, name = row["model"].split(" ", 1)
    dtype = _precision(config["precision"])
    model = _image_model(name).to(DEVICE).train()
    images = torch.randn(config["batch_per_gpu"], 3, config["img"], config["img"], device=DEVICE)
    if config.get("layout") == "NHWC":
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (config["batch_per_gpu"],), device=DEVICE)
    timm = family == "timm"
    optimizer = (
        # torch 1.12 updated one parameter after the other.
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
        if timm
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    scaler = torch.amp.GradScaler(DEVICE, enabled=not timm and dtype is torch.float16)

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=not timm)
        with _autocast(dtype):
            output = model(images)
            logits = output if isinstance(output, Tensor) else output.logits
            loss = nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def _mpt(row: dict[str, Any]) -> Step:
    """One micro batch of an MPT: FSDP keeps bf16 weights for the computation, so there is no autocast.

    The optimizer works on a shard and is added by `rows.step_seconds`.
    """
    arch, config = row["arch"], row["config"]
    _precision("bf16")
    shape = GPT2Config(
        vocab_size=arch["vocab"],
        context=config["seq_len"],
        layers=arch["n_layers"],
        heads=arch["n_heads"],
        hidden=arch["dim"],
        dropout=0.0,
    )
    model = GPT2(shape).to(device=DEVICE, dtype=torch.bfloat16).train()
    if config["ac"] == "full":
        for block in model.blocks:
            _checkpoint(block)
    tokens = torch.randint(0, arch["vocab"], (config["batch_per_gpu"], config["seq_len"]), device=DEVICE)

    def run() -> Tensor:
        loss = model(tokens, labels=tokens)
        loss.backward()
        model.zero_grad()
        return loss

    return Step(model=model, optimizer=None, run=run)


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------ language and audio


def _huggingface(name: str, batch: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as t

    def tokens(vocabulary: int) -> Tensor:
        return torch.randint(10, vocabulary, (batch, length), device=DEVICE)

    if "BertConfig" in name:
        model = t.BertForMaskedLM(t.BertConfig())
        return model, {"input_ids": tokens(30522), "labels": tokens(30522)}
    if "ReformerConfig" in name:
        model = t.ReformerForMaskedLM(t.ReformerConfig(is_decoder=False))
        return model, {"input_ids": tokens(320), "labels": tokens(320)}
    if "t5-small" in name:
        shape = t.T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128)
        shape.decoder_start_token_id = shape.pad_token_id
        shape._attn_implementation = "eager"  # what T5 had in the version that was measured
        model = t.T5ForConditionalGeneration(shape)
        return model, {"input_ids": tokens(32128), "labels": tokens(32128)}
    if "whisper-tiny" in name:
        shape = t.WhisperConfig(
            d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, num_labels=2
        )
        model = t.WhisperForAudioClassification(shape)
        features = torch.randn(batch, shape.num_mel_bins, 2 * length, device=DEVICE)
        return model, {
            "input_features": features,
            "labels": torch.zeros(batch, dtype=torch.long, device=DEVICE),
        }
    raise CannotExpress(f"no model called {name!r} here")


# ------------------------------------------------------------------------------------------------ images


def _image_model(name: str) -> nn.Module:
    if name in _RESNETS:
        return ResNet(_RESNETS[name])
    if name in _OWN:
        return _OWN[name]()
    if name in _VITS:
        hidden, heads = _VITS[name]
        return _classifier(
            "vit", hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden,
            attn_implementation="eager",
        )  # fmt: skip
    if name in _TRANSFORMERS:
        kind, sizes = _TRANSFORMERS[name]
        return _classifier(kind, **sizes)
    return _timm(name)


def _timm(name: str) -> nn.Module:
    """The model itself, with the attention of its time: no fused kernels."""
    try:
        import timm
    except ImportError:
        raise CannotExpress(f"{name} is timm's, which is not installed (the extra `benchmarks`)") from None
    timm.layers.set_fused_attn(False)
    model: nn.Module = timm.create_model(name)
    return model


def _classifier(kind: str, **sizes: Any) -> nn.Module:
    import transformers as t

    attention = sizes.pop("attn_implementation", None)
    config = t.AutoConfig.for_model(kind, num_labels=1000, **sizes)
    extra = {"attn_implementation": attention} if attention else {}
    model: nn.Module = t.AutoModelForImageClassification.from_config(config, **extra)
    return model


_RESNETS = {
    "resnet18": ResNetConfig(block="basic", blocks_per_stage=(2, 2, 2, 2)),
    "resnet34": ResNetConfig(block="basic"),
    "resnet50": ResNetConfig(),
    "resnet101": ResNetConfig(blocks_per_stage=(3, 4, 23, 3)),
    "resnext50_32x4d": ResNetConfig(groups=32, group_width=4),
    "resnext101_32x8d": ResNetConfig(blocks_per_stage=(3, 4, 23, 3), groups=32, group_width=8),
    "wide_resnet50_2": ResNetConfig(group_width=128),
}
_VITS = {
    "vit_tiny_patch16_224": (192, 3),
    "vit_small_patch16_224": (384, 6),
    "deit_small_patch16_224": (384, 6),
    "vit_base_patch16_224": (768, 12),
}
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "regnet_y_128gf": (
        "regnet",
        {
            "layer_type": "y",
            "depths": [2, 7, 17, 1],
            "hidden_sizes": [528, 1056, 2904, 7392],
            "groups_width": 264,
        },
    ),
}


def _vgg16() -> nn.Module:
    """Simonyan and Zisserman 2014, configuration D, without batch norm, as timm trains it."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    # timm writes the first two linear layers as convolutions.
    head = (nn.Conv2d(512, 4096, 7), nn.ReLU(True), nn.Dropout(0.0), nn.Conv2d(4096, 4096, 1), nn.ReLU(True))
    return nn.Sequential(*layers, *head, nn.Flatten(), nn.Linear(4096, 1000))


class _DenseLayer(nn.Module):
    """Norm, 1x1, norm, 3x3: 32 new channels beside all earlier ones."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 128, 1, bias=False)),
            *(nn.BatchNorm2d(128), nn.ReLU(inplace=True), nn.Conv2d(128, 32, 3, padding=1, bias=False)),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        made: Tensor = self.layers(torch.cat(features, 1))
        return made


class _DenseNet(nn.Module):
    """Huang et al. 2016."""

    def __init__(self, layers_per_block: tuple[int, ...]) -> None:
        super().__init__()
        stem = (
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stem = nn.Sequential(*stem)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        channels = 64
        for layers in layers_per_block:
            self.blocks.append(nn.ModuleList(_DenseLayer(channels + 32 * n) for n in range(layers)))
            channels += 32 * layers
            half = channels // 2
            halve = (nn.BatchNorm2d(channels), nn.ReLU(True), nn.Conv2d(channels, half, 1, bias=False))
            self.transitions.append(nn.Sequential(*halve, nn.AvgPool2d(2)))
            channels = half
        self.transitions[-1] = nn.Sequential(nn.BatchNorm2d(2 * channels), nn.ReLU(True))
        self.head = nn.Linear(2 * channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions):
            features = [hidden]
            for layer in block:
                features.append(layer(features))
            hidden = transition(torch.cat(features, 1))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class _MixerBlock(nn.Module):
    """Tolstikhin et al. 2021: mix the patches, then the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(
            nn.Linear(patches, width // 2), nn.GELU(), nn.Dropout(0.0), nn.Linear(width // 2, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.tokens(self.norms[0](hidden).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = hidden + self.channels(self.norms[1](hidden))
        return mixed


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.blocks = nn.Sequential(*(_MixerBlock(196, 768) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)).mean(1))
        return logits


class _LastNorm(nn.LayerNorm):
    """A layer norm over the channels of images, which it walks channels last."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNextBlock(nn.Module):
    """Liu et al. 2022, as torchvision trains it: a sample's branch is dropped with some probability."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mixing = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))
        self.kept = 1.0 - dropped

    def forward(self, images: Tensor) -> Tensor:
        mixed = self.mixing(self.depthwise(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        branch: Tensor = self.scale * mixed
        if self.kept < 1.0:
            noise = torch.empty(len(branch), 1, 1, 1, dtype=branch.dtype, device=branch.device)
            branch = branch * noise.bernoulli_(self.kept).div_(self.kept)
        branch += images
        return branch


def _convnext_large() -> nn.Module:
    depths, widths, dropped = (3, 3, 27, 3), (192, 384, 768, 1536), 0.5
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), _LastNorm(widths[0])]
    for stage, (depth, width) in enumerate(zip(depths, widths)):
        if stage:
            layers += [_LastNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        before = sum(depths[:stage])
        layers += [_ConvNextBlock(width, dropped * (before + n) / (sum(depths) - 1)) for n in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), _LastNorm(widths[-1]), nn.Flatten(), nn.Linear(widths[-1], 1000))
    return nn.Sequential(*layers, *head)


_OWN: dict[str, Callable[[], nn.Module]] = {
    "vgg16": _vgg16,
    "densenet121": lambda: _DenseNet((6, 12, 24, 16)),
    "densenet201": lambda: _DenseNet((6, 12, 48, 32)),
    "mixer_b16_224": _Mixer,
    **IMAGE_MODELS,
    "convnext_large": _convnext_large,
}
