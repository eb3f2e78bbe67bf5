"""Small built-in models, divided and not: what they compute, step by step. Runs as one of several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainfit.models.catalog import PRESETS, make_model
from trainfit.models.parallel.built_in_layout import BuiltInLayout
from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.parallel_step import parallel_step
from trainfit.models.recipe import StepOptions, default_dtype, training_step
from trainfit.steps.step import Step
from trainfit.targets.built_in import _changed, _inputs, _with_defaults

STEPS = 3


def plain_step(name: str, settings: dict[str, Any], options: StepOptions) -> Step:
    model, inputs, options = _made(name, settings, options)
    return training_step(model, inputs, options)


def divided_step(name: str, settings: dict[str, Any], options: StepOptions, sizes: dict[str, int]) -> Step:
    model, inputs, options = _made(name, settings, options)
    preset = PRESETS[name]
    dimensions = MeshDimensions(tuple(sizes.items()))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    layout = BuiltInLayout(name, preset.family, _changed(preset, settings))
    return parallel_step(model, inputs, options, layout, dimensions, mesh)


def _made(name: str, settings: dict[str, Any], options: StepOptions) -> tuple[nn.Module, Any, StepOptions]:
    torch.manual_seed(0)
    preset = PRESETS[name]
    config = _changed(preset, settings)
    options = _with_defaults(preset, config, options)
    with default_dtype(options.parameter_dtype):
        model = make_model(config)
    return model, _inputs(config, options), options


def trained(step: Step) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Return the loss of each step, and the weights after the last."""
    losses = []
    for _ in range(STEPS):
        loss = step.run()
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        losses.append(None if loss is None else loss.item())
    weights = {}
    for name, weight in step.model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weights[name.removeprefix("module.").removeprefix("model.")] = whole.detach()
    return losses, weights


def compared(cases: list[tuple[str, dict[str, Any], StepOptions, dict[str, int]]]) -> list[Any]:
    """For each case: losses divided, losses not divided, the largest difference of a weight and its name."""
    results = []
    for name, settings, options, sizes in cases:
        try:
            losses, weights = trained(divided_step(name, settings, options, sizes))
        except Exception as error:
            import traceback
            results.append(traceback.format_exc()[-1800:])
            continue
        plain_losses, plain = trained(plain_step(name, settings, options))
        differences = {
            weight: (value.double() - plain[weight].double()).abs().max().item()
            for weight, value in weights.items()
            if "qkv" not in weight  # whose rows are in another order
        }
        worst = max(differences, key=lambda weight: differences[weight])
        results.append((losses, plain_losses, differences[worst], worst))
    return results
