"""Targets that are the name of a built-in model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from trainfit.errors import OptionError, TargetError
from trainfit.models.bert import BertConfig
from trainfit.models.catalog import (
    PRESETS,
    LanguageConfig,
    Preset,
    VisionConfig,
    make_model,
    names_by_family,
)
from trainfit.models.gpt2 import GPT2Config
from trainfit.models.recipe import StepOptions, default_dtype, training_step
from trainfit.models.resnet import ResNetConfig
from trainfit.models.vit import ViTConfig
from trainfit.step import Step
from trainfit.targets.inputs import masked_labels, random_classes, random_images, random_tokens

# Smaller images leave a ResNet's last stage one pixel, and batch norm cannot train on a batch of one pixel.
_SMALLEST_RESNET_IMAGE = 64


def load_built_in(name: str, options: StepOptions) -> Callable[[], Step]:
    """Return the function that builds the step of the built-in model `name`."""
    preset = _find(name)
    options = _with_defaults(preset, options)
    config = preset.config
    if isinstance(config, ViTConfig | ResNetConfig):
        return _vision_build(config, options)
    return _language_build(config, options)


def _find(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    families = "\n".join(f"  {family:8} {', '.join(names)}" for family, names in names_by_family().items())
    raise TargetError(f"there is no built-in model {name!r}.{meant} The built-in models are\n{families}")


def _with_defaults(preset: Preset, options: StepOptions) -> StepOptions:
    if preset.seq is None:
        options.refuse("seq", f"{preset.name}, which reads images and takes --image-size")
    else:
        options.refuse("image_size", f"{preset.name}, which reads tokens and takes --seq")
    return replace(
        options,
        batch=options.batch or preset.batch,
        seq=options.seq or preset.seq,
        image_size=options.image_size or preset.image_size,
        dtype=options.dtype or preset.dtype,
    )


def _language_build(config: LanguageConfig, options: StepOptions) -> Callable[[], Step]:
    batch, seq = options.batch, options.seq
    assert batch is not None and seq is not None, "filled in by _with_defaults"
    if isinstance(config, GPT2Config | BertConfig) and seq > config.context:
        raise OptionError(
            f"--seq {seq} is longer than the {config.context} positions that this model has embeddings for."
        )

    def build() -> Step:
        with default_dtype(options.parameter_dtype):
            model = make_model(config)
        tokens = random_tokens(batch, seq, config.vocab_size, options.device)
        labels = masked_labels(tokens) if isinstance(config, BertConfig) else tokens
        return training_step(model, {"tokens": tokens, "labels": labels}, options)

    return build


def _vision_build(config: VisionConfig, options: StepOptions) -> Callable[[], Step]:
    batch, size = options.batch, options.image_size
    assert batch is not None and size is not None, "filled in by _with_defaults"
    if isinstance(config, ViTConfig):
        if size % config.patch_size:
            raise OptionError(f"--image-size {size} is not a multiple of the patch size {config.patch_size}.")
        config = replace(config, image_size=size)
    elif size < _SMALLEST_RESNET_IMAGE:
        raise OptionError(
            f"--image-size {size} is too small for a ResNet; the least is {_SMALLEST_RESNET_IMAGE}."
        )
    shape = config

    def build() -> Step:
        with default_dtype(options.parameter_dtype):
            model = make_model(shape)
        inputs: dict[str, Tensor] = {
            "images": random_images(batch, 3, size, size, options),
            "labels": random_classes(batch, shape.classes, options.device),
        }
        return training_step(model, inputs, options)

    return build
