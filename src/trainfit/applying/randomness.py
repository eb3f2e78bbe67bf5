"""Random numbers: the state that a generator had in forward, so that a draw can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from trainfit.capturing.random_stream import HostRandomState
from trainfit.capturing.schemas import describe
from trainfit.operators import collectives

_KNOWN_NAMESPACES = ("aten", "prims", *collectives.NAMESPACES)


def may_draw(func: OpOverload) -> bool:
    """Whether an operator may draw random numbers; of a custom operator nothing is known, so it may."""
    return describe(func).random or func.namespace not in _KNOWN_NAMESPACES


def generator_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> torch.Generator:
    """Return the generator that an operator called like this draws from."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, torch.Generator):
            return value
    place = kwargs.get("device")
    device = torch.device(place) if place is not None else tensors[0].device if tensors else None
    if device is not None and device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[number]
        return generator
    return torch.default_generator


def state_of(generator: torch.Generator) -> torch.Tensor:
    """Return a copy of a generator's state."""
    # A capture of a model that runs a plan counts the bytes of states that this function returns.
    return torch.get_rng_state() if generator is torch.default_generator else generator.get_state()


@contextlib.contextmanager
def drawn_again(before: HostRandomState | None) -> Iterator[None]:
    """Let Python's and NumPy's generators begin at `before` in a block, and be as they are now after it."""
    if before is None:
        yield
        return
    now = HostRandomState()
    before.restore()
    try:
        yield
    finally:
        now.restore()


@contextlib.contextmanager
def generators_at(states: dict[torch.Generator, torch.Tensor]) -> Iterator[None]:
    """Let torch's generators begin at these states in a block, and be as they are now after it."""
    now = {generator: state_of(generator) for generator in states}
    try:
        _set_states(states)
        yield
    finally:
        _set_states(now)


def _set_states(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


class Draws:
    """Repeats draws: sets generators to the states of forward, and puts them back at the end."""

    def __init__(self) -> None:
        """Nothing has been drawn yet."""
        self._before: dict[torch.Generator, torch.Tensor] = {}
        self._last: dict[torch.Generator, int] = {}

    def repeat(
        self, generator: torch.Generator, state: torch.Tensor | None, number: int, draw_before: int
    ) -> None:
        """Get ready for draw `number`, which followed `draw_before` in forward."""
        if generator not in self._before:
            self._before[generator] = state_of(generator)
        if self._last.get(generator) != draw_before or draw_before < 0:
            assert state is not None, "a draw is repeated from a state, or after the draw before it"
            generator.set_state(state)
        self._last[generator] = number

    def put_back(self) -> None:
        """Leave the generators as they were."""
        _set_states(self._before)
        self._before.clear()
        self._last.clear()
