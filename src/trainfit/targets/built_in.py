"""Targets that are the name of a built-in model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from torch import Tensor

from trainfit.errors import OptionError, TargetError
from trainfit.models.bert import BertConfig
from trainfit.models.catalog import PRESETS, Config, Preset, make_model, names_by_family
from trainfit.models.gpt2 import GPT2Config
from trainfit.models.mixtral import MixtralConfig
from trainfit.models.recipe import DEFAULT_OPTIMIZER, StepOptions, default_dtype
from trainfit.models.resnet import ResNetConfig
from trainfit.models.vit import ViTConfig
from trainfit.steps.step import Step
from trainfit.targets.divided import step_maker
from trainfit.targets.given_values import converted, refuse_unknown
from trainfit.targets.inputs import masked_labels, random_classes, random_images, random_tokens
from trainfit.targets.target import Target
from trainfit.traces.settings import Settings, named

if TYPE_CHECKING:
    from trainfit.models.parallel.layout import Layout

# Smaller images leave a ResNet's last stage one pixel, and batch norm cannot train on a batch of one pixel.
_SMALLEST_RESNET_IMAGE = 64
_OWN_FLAGS = ("image_size",)
"""What a config has, but an option of its own sets."""
_LARGEST_SIZE = 10_000_000
_MOST = {"layers": 10_000, "experts": 10_000, "blocks_per_stage": 10_000, "dropout": 1}
"""The largest number that `--set` gives: modules are made one by one."""


def load_built_in(name: str, options: StepOptions) -> Target:
    """Find the built-in model `name`."""
    preset = _find(name)
    config = _changed(preset, options.set)
    options = _with_defaults(preset, config, options)
    config = _fitted(config, options)
    make_step = step_maker(name, partial(_layout, preset, config), options)

    def build() -> Step:
        with default_dtype(options.parameter_dtype):
            model = make_model(config)
        return make_step(model, _inputs(config, options))

    settings = Settings(
        batch=options.batch,
        seq=options.seq,
        image_size=options.image_size,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
        model=named({name: value for name, value in asdict(config).items() if name not in _OWN_FLAGS}),
    )
    # Only a router's weights are drawn and decide something.
    return Target(name, build, "built-in", settings, decides_by_draws=isinstance(config, MixtralConfig))


def _layout(preset: Preset, config: Config) -> Layout:
    from trainfit.models.parallel.built_in_layout import BuiltInLayout  # takes seconds to load

    return BuiltInLayout(preset.name, preset.family, config)


def _changed(preset: Preset, changes: Mapping[str, Any]) -> Config:
    """Return the model's shape with what `--set` gives."""
    kinds = get_type_hints(type(preset.config))
    known = [field.name for field in fields(preset.config) if field.name not in _OWN_FLAGS]
    refuse_unknown(changes, known, preset.name)
    values = {name: converted(name, value, kinds[name]) for name, value in changes.items()}
    for name, value in values.items():
        least = 0 if kinds[name] is float else 1
        several = value if isinstance(value, tuple) else (value,)
        numbers = [number for number in several if isinstance(number, int | float)]
        if any(number < least for number in numbers):
            raise OptionError(f"--set {name}={value}: the least is {least}.")
        most = _MOST.get(name, math.inf if kinds[name] is float else _LARGEST_SIZE)
        if any(number > most for number in numbers):
            raise OptionError(f"--set {name}={value}: the most is {most:,}.")
    config = replace(preset.config, **values)
    if changes:
        _refuse_impossible(config)
    return config


def _refuse_impossible(config: Config) -> None:
    """Refuse numbers that do not go together, before the model says so in its own words."""
    shape = asdict(config)
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if part in shape and shape[whole] % shape[part]:
            raise OptionError(
                f"--set: {whole} ({shape[whole]}) must be a multiple of {part} ({shape[part]})."
            )
    if "kv_heads" in shape and shape["hidden"] // shape["heads"] % 2:
        width = shape["hidden"] // shape["heads"]
        raise OptionError(f"--set: hidden / heads must be even, for rotary positions; it is {width}.")
    if "experts" in shape and shape["experts_per_token"] > shape["experts"]:
        raise OptionError(
            f"--set: experts_per_token ({shape['experts_per_token']}) must be at most experts "
            f"({shape['experts']})."
        )


def _find(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    families = "\n".join(f"  {family:8} {', '.join(names)}" for family, names in names_by_family().items())
    raise TargetError(f"there is no built-in model {name!r}.{meant} The built-in models are\n{families}")


def _with_defaults(preset: Preset, config: Config, options: StepOptions) -> StepOptions:
    if preset.seq is None:
        options.refuse("seq", f"{preset.name}, which reads images and takes --image-size")
    else:
        options.refuse("image_size", f"{preset.name}, which reads tokens and takes --seq")
    return replace(
        options,
        batch=options.batch or preset.batch,
        seq=options.seq or _usual_seq(preset, config),
        image_size=options.image_size or preset.image_size,
        dtype=options.dtype or preset.dtype,
    )


def _usual_seq(preset: Preset, config: Config) -> int | None:
    """Return the preset's own sequence length, as far as the model has positions for it."""
    if preset.seq is None or not isinstance(config, GPT2Config | BertConfig):
        return preset.seq
    return min(preset.seq, config.context)


def _fitted(config: Config, options: StepOptions) -> Config:
    """Return the model's shape for these sizes; refuse those that it cannot take."""
    seq, size = options.seq or 0, options.image_size or 0
    if isinstance(config, GPT2Config | BertConfig) and seq > config.context:
        raise OptionError(
            f"--seq {seq} is longer than the {config.context} positions that this model has embeddings for."
        )
    if isinstance(config, ResNetConfig) and size < _SMALLEST_RESNET_IMAGE:
        raise OptionError(
            f"--image-size {size} is too small for a ResNet; the least is {_SMALLEST_RESNET_IMAGE}."
        )
    if not isinstance(config, ViTConfig):
        return config
    if size % config.patch_size:
        raise OptionError(f"--image-size {size} is not a multiple of the patch size {config.patch_size}.")
    return replace(config, image_size=size)


def _inputs(config: Config, options: StepOptions) -> dict[str, Tensor]:
    batch, seq, size = options.batch, options.seq, options.image_size
    assert batch is not None, "filled in by _with_defaults"
    if isinstance(config, ViTConfig | ResNetConfig):
        assert size is not None, "filled in by _with_defaults"
        images = random_images(batch, 3, size, size, options)
        return {"images": images, "labels": random_classes(batch, config.classes, options.device)}
    assert seq is not None, "filled in by _with_defaults"
    tokens = random_tokens(batch, seq, config.vocab_size, options.device)
    return {"tokens": tokens, "labels": masked_labels(tokens) if isinstance(config, BertConfig) else tokens}
