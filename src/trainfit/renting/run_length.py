"""How long a run is, in tokens or in epochs of samples, and what it takes and costs at a step's speed.

steps = what the run trains on / what one step of all copies of the model trains on, rounded up
hours = steps * seconds per step / 3600
cost  = hours * price per hour * devices
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainfit.basics.count_text import parse_count, short_count
from trainfit.errors import OptionError, StepError

MILLION = 1_000_000
_MOST_EPOCHS = 1_000_000


@dataclass(frozen=True)
class RunLength:
    """What a run trains on: so many tokens, or so many samples several times over."""

    tokens: int | None = None
    samples: int | None = None
    """Of one epoch."""
    epochs: float = 1.0

    @property
    def words(self) -> str:
        """As people say it: `10B tokens`, `3 epochs of 1.2M samples`."""
        if self.tokens is not None:
            return f"{short_count(self.tokens)} tokens"
        epochs = f"{self.epochs:g} epoch{'' if self.epochs == 1 else 's'}"
        return f"{epochs} of {short_count(self.samples or 0)} samples"

    def steps(self, rate: StepRate) -> int:
        """Return how many steps the run has; an error if the step does not say what it trains on."""
        unit, whole = ("tokens", self.tokens) if self.tokens is not None else ("samples", self.samples)
        each = rate.tokens if unit == "tokens" else rate.samples
        assert whole is not None
        if not each:
            other = (
                "; for this step write --epochs and --samples" if unit == "tokens" and rate.samples else ""
            )
            raise StepError(
                f"--{unit} {short_count(whole)}: the step does not say how many {unit} it trains on{other}. "
                f"A function of your own says it by trainfit.Step(..., {unit}=N)."
            )
        return max(math.ceil(whole * (self.epochs if unit == "samples" else 1) / (each * rate.copies)), 1)


def read_length(
    tokens: str | int | None, epochs: float | None, samples: str | int | None
) -> RunLength | None:
    """Return the length that was given, or None; refuse one that contradicts itself."""
    if tokens is not None and (epochs is not None or samples is not None):
        raise OptionError(
            "--tokens and --epochs with --samples are two ways to say how long a run is: give one."
        )
    if tokens is not None:
        return RunLength(tokens=parse_count(tokens, "--tokens"))
    if samples is None:
        if epochs is not None:
            raise OptionError(
                "--epochs needs --samples: how many samples an epoch has, as in --samples 1.2M."
            )
        return None
    known = isinstance(epochs, int | float) and not isinstance(epochs, bool)
    if epochs is not None and not (known and 0 < epochs <= _MOST_EPOCHS):
        raise OptionError(f"--epochs must be above 0 and at most {_MOST_EPOCHS:,}, got {epochs!r}.")
    return RunLength(
        samples=parse_count(samples, "--samples"), epochs=1.0 if epochs is None else float(epochs)
    )


@dataclass(frozen=True)
class StepRate:
    """What one step trains on, how long it takes, and on how many devices."""

    seconds: float
    samples: int | None
    tokens: int | None
    """Of one copy of the model."""
    devices: int = 1
    copies: int = 1
    """How many copies of the model train at once, each on data of its own."""

    def per_second(self, count: int | None) -> float | None:
        """Return how many of something all copies together get through in a second."""
        return count * self.copies / self.seconds if count and self.seconds else None

    def cost_of(self, seconds: float, price_per_hour: float) -> float:
        """Return what all devices cost for so long."""
        return seconds / 3600 * price_per_hour * self.devices

    def cost_per(self, count: int, each: int | None, price_per_hour: float) -> float | None:
        """Return what it costs to train on so many tokens or samples, of which a step has `each`."""
        rate = self.per_second(each)
        return None if rate is None else self.cost_of(count / rate, price_per_hour)
