"""Run probes for the clock: all of a group in turn, round after round, smaller ones where memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainfit.basics.doing import doing, measuring
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probes import Probe, ProbeSizes, Wanted
from trainfit.errors import DeviceError
from trainfit.timing.rounds import Rounds, Timing

FORWARD, BACKWARD = "forward", "backward"
Key = tuple[str, str]
"""A probe's name and the phase: `forward` or `backward`."""
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


@dataclass(frozen=True)
class Readings:
    """What the clock said about a group of probes."""

    probes: tuple[Probe, ...]
    timings: dict[Key, Timing]
    """Of those that could be run."""
    failures: dict[str, str]
    """The others, each with the first line of what torch said."""
    sizes: ProbeSizes


def read_group(
    what: str,
    make: Callable[[ProbeSizes], Sequence[Probe]],
    instrument: Instrument,
    seconds: float,
) -> Readings:
    """Measure a group of probes for about this many seconds, with sizes that fit into the memory."""
    sizes: ProbeSizes | None = instrument.sizes
    doing(f"measuring {what}")
    while sizes is not None:
        found = _unless_memory_ends(tuple(make(sizes)), instrument, seconds, sizes)
        instrument.let_go()
        if found is not None:
            return found
        sizes = sizes.halved()
        doing(f"measuring {what}, smaller: there is not enough memory")
    raise DeviceError(
        f"{instrument.device.name} has not enough free memory to measure {what}, even with the smallest "
        "tensors that say something; end what else runs on it."
    )


def _unless_memory_ends(
    probes: tuple[Probe, ...], instrument: Instrument, seconds: float, sizes: ProbeSizes
) -> Readings | None:
    try:
        return _read(probes, instrument, seconds, sizes)
    except _NoMemory:
        return None


class _NoMemory(Exception):
    """The device has too little memory for a probe."""


class _Call:
    """A call of a probe, or of its backward, in the form in which `Rounds` calls operators."""

    warm_code = False

    def __init__(self, key: Key, function: Callable[..., Any], arguments: list[Any], records: bool) -> None:
        self.key = key
        self.records = records
        self.failure = ""
        self._function = function
        self._arguments = arguments

    @property
    def function(self) -> _Call:
        """Itself; not kept, so that its tensors are freed as soon as nobody needs them."""
        return self

    def __str__(self) -> str:
        """Name it for who waits."""
        return " ".join(self.key).replace("_", " ")

    def __call__(self, *arguments: Any) -> Any:
        """Do it; remember why it could not be done."""
        try:
            return self._function(*arguments)
        except Exception as error:
            if is_want_of_memory(error):
                raise _NoMemory from None
            self.failure = first_line(error)
            raise

    def prepare(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the next call."""
        return self._arguments, {}

    def finish(self, result: Any) -> None:
        """Let the result go."""


def _read(probes: tuple[Probe, ...], instrument: Instrument, seconds: float, sizes: ProbeSizes) -> Readings:
    calls: list[_Call] = []
    failures: dict[str, str] = {}
    for probe in probes:
        try:
            calls += _calls(probe, instrument.place)
        except RuntimeError as error:
            if is_want_of_memory(error):
                raise _NoMemory from None
            failures[probe.name] = first_line(error)
    rounds = Rounds(calls, [], instrument.place, instrument.timed)
    rounds.run(seconds, measuring())
    timings = {
        call.key: timing
        for call, timing in zip(calls, rounds.timings())
        if timing is not None and timing.seconds > 0
    }
    failures |= {call.key[0]: call.failure for call in calls if call.failure}
    return Readings(probes, timings, failures, sizes)


def is_want_of_memory(error: BaseException) -> bool:
    """Whether torch says that memory ran out, on a GPU or on the host."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _calls(probe: Probe, place: str) -> Iterator[_Call]:
    tensors = [_filled(wanted, place) for wanted in probe.tensors]
    yield _Call((probe.name, FORWARD), probe.call, tensors, probe.backward)
    if probe.backward:
        with torch.enable_grad():
            result = probe.call(*tensors)
        gradient = torch.full_like(result, 0.01)
        trained = [tensor for tensor in tensors if tensor.requires_grad]

        def backward(result: torch.Tensor, gradient: torch.Tensor) -> Any:
            return torch.autograd.grad(result, trained, gradient, retain_graph=True)

        yield _Call((probe.name, BACKWARD), backward, [result, gradient], False)


def empty_tensor(wanted: Wanted, place: str) -> torch.Tensor:
    """Return a tensor as a probe wants it, with any values."""
    layout = torch.channels_last if wanted.channels_last else torch.contiguous_format
    tensor = torch.empty(wanted.shape, dtype=wanted.dtype, device=place, memory_format=layout)
    return tensor.requires_grad_(wanted.trained)


def _filled(wanted: Wanted, place: str) -> torch.Tensor:
    """Return such a tensor with values as they are in training: zeros would be faster on some devices."""
    tensor = empty_tensor(wanted, place)
    with torch.no_grad():
        return tensor.random_(wanted.below) if wanted.below else tensor.uniform_(-1, 1)


@contextlib.contextmanager
def matmul_tf32(allowed: bool) -> Iterator[None]:
    """Let products of float32 be rounded to TF32 inside, or not, whatever the process has set."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before
