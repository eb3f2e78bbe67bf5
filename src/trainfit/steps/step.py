"""`Step`: what the user gives us, one full training step in ordinary PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.errors import StepError

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Model, optimizer(s) and `run`, a function that performs one whole training step.

    `run` does everything one iteration of the user's loop does: forward, backward, optimizer step,
    zeroing of gradients. What it returns (normally the loss) is kept until the step ends. `samples` and
    `tokens` say what it trains on, for figures per second; they change nothing else.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    run: Callable[[], Any]
    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a step at once, where the user's own line is still on the stack."""
        if not isinstance(self.model, nn.Module):
            raise StepError(f"Step.model must be a torch.nn.Module, got {type(self.model).__name__}.")
        if not callable(self.run):
            raise StepError(f"Step.run must be a function without arguments, got {type(self.run).__name__}.")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise StepError(
                    "Step.optimizer must be a torch.optim.Optimizer, a list of them or None, "
                    f"got {type(optimizer).__name__}."
                )
        for name, count in (("samples", self.samples), ("tokens", self.tokens)):
            if count is not None and (type(count) is not int or count < 1):
                raise StepError(f"Step.{name} must be a whole number above zero or None, got {count!r}.")

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers of the step, as a tuple."""
        if self.optimizer is None:
            return ()
        if isinstance(self.optimizer, Iterable) and not isinstance(self.optimizer, torch.optim.Optimizer):
            return tuple(self.optimizer)
        return (self.optimizer,)

    @staticmethod
    def of(
        model: nn.Module,
        inputs: Any,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        autocast: torch.dtype | None = None,
    ) -> Step:
        """Build the usual step: forward, loss, backward, optimizer step, gradients to None.

        `inputs` is a mapping (keyword arguments), a tuple or list (positional) or one value. `loss` turns
        the model's output into a scalar; without it the output's `.loss`, its "loss" entry, a scalar
        output, or the first entry of a tuple is taken. `autocast` runs forward and loss in that dtype.
        """

        def run() -> torch.Tensor:
            with torch.autocast(_device_type(model), autocast, enabled=autocast is not None):
                output = _call(model, inputs)
                value = loss(output) if loss is not None else find_loss(output)
            value.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.zero_grad()
            return value

        samples, tokens = count_inputs(inputs)
        return Step(model=model, optimizer=optimizer, run=run, samples=samples, tokens=tokens)


def count_inputs(inputs: Any) -> tuple[int | None, int | None]:
    """Return how many samples and tokens a model's inputs hold, as far as their shapes say.

    The first dimension of the first tensor is the batch; tokens are the elements of the first tensor of
    whole numbers with a second dimension.
    """
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    token_ids = [tensor for tensor in tensors if tensor.dtype in _TOKEN_DTYPES and tensor.dim() == 2]
    samples = tensors[0].shape[0] if tensors else 0
    return samples or None, (token_ids[0].numel() if token_ids else 0) or None


_TOKEN_DTYPES = (torch.int64, torch.int32)


def find_loss(output: Any) -> torch.Tensor:
    """Return the scalar loss in a model's output, wherever models usually put it."""
    candidates: list[Any] = [output]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if hasattr(output, "loss"):
        candidates.append(output.loss)
    if isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate
    raise StepError(
        f"no scalar loss in the model's output of type {type(output).__name__}; "
        "pass loss=, a function from the output to a scalar tensor."
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return parameter.device.type if parameter is not None else "cpu"
