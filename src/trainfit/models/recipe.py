"""The usual training step around a model: parameter dtype, autocast, gradient scaling, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from trainfit.errors import OptionError
from trainfit.steps.step import Loss, Step, count_inputs, find_loss
from trainfit.traces.ranks import Cluster

Dtype = Literal["fp32", "bf16", "bf16-autocast", "fp16-autocast"]
OptimizerName = Literal["adamw", "adamw-foreach", "adamw-fused", "adamw-for-loop", "sgd", "none"]
FLAGS = ("batch", "seq", "image_size", "dtype", "optimizer")
"""The options of a step that have a flag of their own."""

# Beyond these a size is a typing mistake; torch would answer with an overflow deep inside a kernel.
RANGES = {"batch": (1, 1_000_000), "seq": (2, 100_000_000), "image_size": (1, 65_536)}

DEFAULT_OPTIMIZER: OptimizerName = "adamw"
_AUTOCAST_DTYPES = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
_ADAMW: dict[OptimizerName, dict[str, Any]] = {
    "adamw": {},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-for-loop": {"foreach": False, "fused": False},
}


@dataclass(frozen=True)
class StepOptions:
    """What the user asked of the step; None where they left the choice to the target.

    `seq` is tokens (audio samples for raw audio models), `image_size` the side of a square image in pixels.
    `device` is where the step would run: "cpu", "cuda" or "cuda:N". `set` are further values by name, as
    `--set` gives them: parameters of the user's function, settings of a built-in model or of a config.
    `cluster` is which rank of which cluster the step is; questions about a step set it, as they set the
    device.
    """

    batch: int | None = None
    seq: int | None = None
    image_size: int | None = None
    dtype: Dtype | None = None
    optimizer: OptimizerName | None = None
    device: str = "cpu"
    set: Mapping[str, Any] = field(default_factory=dict)
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values at once, naming the possible ones."""
        for name, (smallest, largest) in RANGES.items():
            _check_range(name, getattr(self, name), smallest, largest)
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        _check_device(self.device)

    def given(self) -> dict[str, int | str]:
        """Return the options that the user set. The device is not among them: every step has one."""
        return {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not None}

    def refuse(self, name: str, what: str) -> None:
        """Raise if the user set the option `name`, which means nothing to `what`."""
        if name in self.given():
            raise OptionError(f"{flag_of(name)} does not apply to {what}.")

    @property
    def device_type(self) -> str:
        """The kind of device, "cpu" or "cuda", without its number."""
        return self.device.partition(":")[0]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What the weights and floating inputs are stored in: autocast keeps float32 weights."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What forward computes in where autocast allows it, or None without autocast."""
        return _AUTOCAST_DTYPES.get(self.dtype or "fp32")


def training_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    options: StepOptions,
    loss: Loss | None = None,
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    autocast: bool = True,
) -> Step:
    """Put `model` on the device and wrap it in one whole training step.

    `inputs` are the keyword arguments of the model, already on the device. `loss` turns the model's output
    into a scalar; without it the output is searched for one, as in `Step.of`. Forward and backward run inside
    of `around`. `autocast` is False where the model itself sees to what it computes in.
    """
    model = in_parameter_dtype(model, options.parameter_dtype).to(options.device).train()
    optimizer = make_optimizer(model, options.optimizer)
    loss_of = loss if loss is not None else find_loss
    computes_in = options.autocast_dtype if autocast else None

    def forward() -> torch.Tensor:
        with torch.autocast(options.device_type, computes_in, enabled=computes_in is not None):
            return loss_of(model(**inputs))

    # Scaled so that small float16 gradients do not vanish; steps that overflow are skipped.
    scaler = torch.amp.GradScaler(options.device_type, enabled=options.dtype == "fp16-autocast")

    def run() -> torch.Tensor:
        with around():
            loss = forward()
            scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            model.zero_grad()
        return loss

    samples, tokens = count_inputs(inputs)
    return Step(model=model, optimizer=optimizer, run=run, samples=samples, tokens=tokens)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating tensors in `dtype` inside the block.

    A model built so never exists in float32, and the buffers it asks for in float32 by name stay so.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_parameter_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its weights in this dtype."""
    # Only if needed: `.to(dtype)` would also convert buffers that a model keeps in float32 on purpose.
    if all(parameter.dtype == dtype for parameter in model.parameters() if parameter.is_floating_point()):
        return model
    return model.to(dtype)


def make_optimizer(model: nn.Module, name: OptimizerName | None) -> torch.optim.Optimizer | None:
    """Return the optimizer of this name, or the usual one; None for `none`."""
    # The learning rates are the usual ones; they change no memory and no time.
    name = name or DEFAULT_OPTIMIZER
    match name:
        case "sgd":
            return torch.optim.SGD(_parameter_groups(model), lr=0.01, momentum=0.9)
        case "none":
            return None
        case _:
            return torch.optim.AdamW(_parameter_groups(model), lr=3e-4, **_ADAMW[name])


def _parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters that one operator can update together: those of one mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _check_range(name: str, value: object, smallest: int, largest: int) -> None:
    if value is None:
        return
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not smallest <= int(value) <= largest:  # type: ignore[call-overload]
        flag = flag_of(name)
        raise OptionError(f"{flag} must be a whole number from {smallest} to {largest:,}, got {value!r}.")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise OptionError(f"{flag_of(name)} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_device(device: str) -> None:
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise OptionError(f"the device of a step must be cpu, cuda or cuda:N, got {device!r}.")


def flag_of(name: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + name.replace("_", "-")
