"""The small steps that are run to find out what the host takes around the operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from trainfit.basics.doing import unheard
from trainfit.capturing import capture
from trainfit.devices.device_table import Device
from trainfit.models.gpt2 import GPT2, GPT2Config
from trainfit.models.llama import Llama, LlamaConfig
from trainfit.steps.step import Step
from trainfit.timing.clocks import cpu_clock
from trainfit.traces.trace import PHASES, Trace


@dataclass(frozen=True)
class Sizes:
    """How large a sample is."""

    batch: int
    sequence: int
    hidden: int


TINY = Sizes(batch=1, sequence=16, hidden=32)
"""Everything fits into a core's own cache."""
MEDIUM = Sizes(batch=4, sequence=128, hidden=192)
"""Each operator fills the core's own cache; a step takes some 80 ms on one core."""
_VOCABULARY, _LAYERS, _HEADS = 512, 3, 4

Clock = Callable[[], float]


class Sample:
    """A small step whose phases are timed one by one."""

    def __init__(
        self, family: str, sizes: Sizes, foreach: bool = False, place: str = "cpu", clock: Clock | None = None
    ) -> None:
        """Make the model, the tokens and the optimizer where they are to be."""
        self._clock = clock
        self.model = _make_model(family, sizes).train().to(place)
        self.tokens = torch.randint(0, _VOCABULARY, (sizes.batch, sizes.sequence), device=place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=foreach)

    def run(self) -> dict[str, float]:
        """Run a step and return the seconds of each phase."""
        clock = self._clock or cpu_clock()
        times = [clock()]
        loss: torch.Tensor = self.model(self.tokens, labels=self.tokens)
        times.append(clock())
        loss.backward()
        times.append(clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(clock())
        return {phase: times[n + 1] - times[n] for n, phase in enumerate(PHASES)}

    def as_step(self) -> Step:
        """Return the step in the form in which it is captured."""
        return Step(self.model, self.optimizer, self.run)


def captured(
    family: str,
    sizes: Sizes,
    foreach: bool = False,
    gpu: Device | None = None,
    place: str = "cpu",
    clock: Clock | None = None,
) -> tuple[Sample, Trace]:
    """Return a sample, and the trace of one like it: on this machine's processor, or on a GPU of it."""
    kind = "cpu" if gpu is None else gpu.kind
    with unheard():
        # All of its steps are alike: looking at one is enough.
        trace = capture(lambda: Sample(family, sizes, foreach, kind).as_step(), device=gpu or "cpu", steps=1)
    return Sample(family, sizes, foreach, place, clock), trace


def _make_model(family: str, sizes: Sizes) -> nn.Module:
    if family == "gpt2":
        return GPT2(GPT2Config(_VOCABULARY, sizes.sequence, _LAYERS, _HEADS, sizes.hidden))
    return Llama(LlamaConfig(_VOCABULARY, _LAYERS, _HEADS, _HEADS, sizes.hidden, 3 * sizes.hidden))
