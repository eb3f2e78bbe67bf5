"""Time the distinct operators of a step on the device at hand, each in the situations that the step has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfit.basics.doing import Measuring
from trainfit.devices.hardware import CUDA, Cuda, free_bytes
from trainfit.timing.caller import REFUSED, Caller
from trainfit.timing.locality import FAR, Caches, Locality, localities, this_machines_caches
from trainfit.timing.memory import Memory
from trainfit.timing.rounds import Rounds, Timing
from trainfit.traces.trace import Signature, Trace

_MEMORY_SHARE = 0.5
"""Operators whose tensors take more than this share of the free memory are not run."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A distinct operator call of a step, and where it finds its memory."""

    signature: Signature
    locality: Locality


def situations_of(trace: Trace) -> list[Counter[Situation]]:
    """Return for each signature its situations and how many of its ops are in each; none for views."""
    if trace.device == "cuda":
        # What a GPU's cache still holds is not modelled: everything comes from its memory.
        return [
            Counter() if s.view else Counter({Situation(s, Locality((FAR,) * len(s.inputs), FAR)): 1})
            for s in trace.signatures
        ]
    found = localities(trace, this_machines_caches())
    return [
        Counter({Situation(signature, where): count for where, count in places.items()})
        for signature, places in zip(trace.signatures, found)
    ]


class Bench:
    """The place where operators are timed; keeps the memory for their inputs."""

    def __init__(self, device: str) -> None:
        """`device` is `cpu` or `cuda`."""
        self._device = device
        self._most_bytes = _MEMORY_SHARE * free_bytes(device)
        self.memory = Memory(device, caches_of(device))

    def time(
        self,
        situations: Sequence[Situation],
        budget_seconds: float,
        *,
        company: Sequence[Situation] = (),
        progress: Measuring | None = None,
        between: Callable[[], object] | None = None,
    ) -> list[Timing | None]:
        """Time operators for about this many seconds; None for those that cannot be run alone.

        The `company` is called in turn with them. `between` is called after each round, when the memory of
        its results has been given back.
        """
        callers = [self._caller(situation) for situation in situations]
        able = [caller for caller in callers if caller is not None]
        if not able:
            return [None] * len(callers)
        others = [caller for caller in map(self._caller, company) if caller is not None]
        rounds = Rounds(able, others, self._device)

        def after_round() -> None:
            if between is not None:
                self.memory.let_go()
                between()

        try:
            rounds.run(budget_seconds, progress, after_round)
        finally:
            self.memory.let_go()
        timings = iter(rounds.timings())
        return [next(timings) if caller is not None else None for caller in callers]

    def _caller(self, situation: Situation) -> Caller | None:
        try:
            return Caller(situation.signature, situation.locality, self.memory, self._most_bytes)
        except REFUSED:
            return None


def caches_of(device: str, cuda: Cuda = CUDA) -> Caches:
    """Return the caches of the device; on a GPU only the one that all multiprocessors share."""
    return this_machines_caches() if device == "cpu" else Caches(0, cuda.properties().cache_bytes)
