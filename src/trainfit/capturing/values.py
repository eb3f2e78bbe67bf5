"""Known values: which small tensors are computed for real, and what is assumed where nothing is known.

Token ids, masks, positions, counts, random draws and constants decide what a model does. They are small and
their inputs are known, so they are computed for real. What depends on weights or activations is not known;
a question about it is answered with a stated assumption and a warning that names the line.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainfit.capturing.ledger import LiveStorage
from trainfit.operators.names import OperatorSet
from trainfit.operators.value_use import ALL_TRUE, ANY_TRUE, RANDOM
from trainfit.traces.assumptions import Assumption

_PATIENCE = 100
"""How often a line may ask about unknown data before it gets the other answer."""
_INTEGER_LIMIT = 1 << 20
_FLOAT_LIMIT = 1 << 16
_ARRAY_LIMIT = 1 << 12
_OUR_FOLDER = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_UNKNOWN_LINE = "unknown line"
_INITIALISATION = str(Path(torch.nn.init.__file__))


class Values:
    """Answers questions about values, and remembers what had to be assumed."""

    def __init__(self, current_module: Callable[[], str]) -> None:
        """`current_module` names the module that is running, for the warnings."""
        self._current_module = current_module
        self.know_everything = False
        """Whether tensors of any size are computed for real: then the capture is a real run."""
        self.assumptions: dict[Assumption, None] = {}
        self.kernel_lacked_values = False
        """Whether some kernel's workspace depends on values that were not known."""
        self.optimizer_lacked_values = False
        """Whether what an optimizer keeps depends on values that were not known."""
        self._asked: dict[str, int] = {}
        self.answers: list[object] = []
        """The known values that the step has read and may decide by."""
        self.building = False
        """Whether the step is being built: what is asked then is asked once, not in every step."""

    def worth_knowing(self, dtype: torch.dtype, numel: int, *, of_integers: bool = False) -> bool:
        """Whether a tensor is small enough to be computed for real.

        Floats that are made of integers alone (`of_integers`) are masks and positions, like integers.
        """
        real = (dtype.is_floating_point or dtype.is_complex) and not of_integers
        return self.know_everything or numel <= (_FLOAT_LIMIT if real else _INTEGER_LIMIT)

    def assume(self, text: str, kind: str = "value") -> None:
        """Note an assumption, once per place.

        Questions about initial values (numbers that are drawn again if they are too large) are not noted.
        """
        stack = traceback.walk_stack(sys._getframe(1))
        if any(frame.f_code.co_filename == _INITIALISATION for frame, _ in stack):
            return
        if self.building:
            kind, text = "value", f"when the step was built, {text}"
        module = self._current_module()
        where = f"in {module} ({user_line()})" if module else f"({user_line()})"
        self.assumptions[Assumption(kind, text, where)] = None

    def note(self, kind: str, text: str, line: str) -> Assumption:
        """Note what was not done as a real run does it, and at which line."""
        noted = Assumption(kind, text, f"({line})")
        self.assumptions[noted] = None
        return noted

    def take_back(self, noted: Assumption) -> None:
        """Forget a note."""
        self.assumptions.pop(noted, None)

    def rely_on(self, live: LiveStorage) -> None:
        """Note that shapes or control flow now rest on values that were themselves assumed."""
        if live.assumption:
            self.assume(live.assumption, "data")

    def note_answer(self, value: object, producer: str) -> None:
        """Note a known value that the step reads, if it may decide by it.

        Among floats those are random draws, and whole numbers that torch itself does not read: an optimizer
        keeps its number of steps as a float.
        """
        if isinstance(value, complex):
            return
        counts = isinstance(value, float) and value.is_integer() and not _asked_by_torch()
        if not isinstance(value, float) or counts or producer in RANDOM:
            self.answers.append(value)

    def note_array(self, values: Any, tensor: torch.Tensor) -> None:
        """Note the values of a tensor that the step reads all at once."""
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= _ARRAY_LIMIT:
            self.answers.append(values if isinstance(values, int | list) else values.tolist())

    def _asked_too_often(self) -> bool:
        """Whether a line keeps asking the same: it may be a loop that ends with the other answer."""
        line = user_line()
        self._asked[line] = self._asked.get(line, 0) + 1
        return self._asked[line] > _PATIENCE

    def scalar(self, tensor: torch.Tensor, live: LiveStorage) -> bool | int | float | complex:
        """Answer `.item()` of a one-element tensor."""
        if live.known:
            self.rely_on(live)
            known: bool | int | float | complex = torch.ops.aten._local_scalar_dense(tensor)
            self.note_answer(known, live.producer)
            return not known if live.undecided and self._asked_too_often() else known
        value = _plausible(tensor.dtype, live.producer)
        if self._asked_too_often():
            value = type(value)(not value)
        self.assume(f"a value that depends on data ({live.producer}) was assumed to be {value}")
        return value


_HOLDS = ALL_TRUE | OperatorSet.of("isfinite")
"""Operators whose answer is true in a healthy step."""


def _plausible(dtype: torch.dtype, producer: str) -> bool | int | float:
    """Return the value that a healthy training step would most likely have."""
    if dtype is torch.bool:
        # all(isfinite(x)) and all(mask) hold; any(isnan(x)) and stopping tests do not.
        return producer in _HOLDS
    return 1.0 if dtype.is_floating_point else 1


def _choices(inputs: list[torch.Tensor], chosen: torch.Tensor) -> str:
    """Spread the choices of a selection evenly.

    Routers of mixture-of-experts models choose by `topk` or `argmax`. With balanced indices everything that
    follows (counts, offsets, masks, gathers) is computed for real and is consistent.
    """
    source = inputs[0]
    dimension = _reduced_dimension(source, chosen)
    choices = source.shape[dimension] if source.dim() else 1
    chosen.copy_(_balanced_indices(chosen.shape, dimension, choices))
    return f"were assumed to be spread evenly over {choices}"


def _every_second(inputs: list[torch.Tensor], result: torch.Tensor) -> str:
    """A comparison holds for every second element; of a single one it does not, so that loops end."""
    flat = torch.arange(result.numel()) % 2 == 1
    result.copy_(flat.reshape(result.shape))
    return "were assumed to hold for every second element"


def _never(inputs: list[torch.Tensor], result: torch.Tensor) -> str:
    result.fill_(False)
    return "were assumed to be false"


def _always(inputs: list[torch.Tensor], result: torch.Tensor) -> str:
    result.fill_(True)
    return "were assumed to be true"


def _equal(inputs: list[torch.Tensor], result: torch.Tensor) -> str:
    """Two tensors differ, but `x == x` holds: that is how code looks for NaN."""
    return _always(inputs, result) if _same_tensor(inputs) else _never(inputs, result)


def _different(inputs: list[torch.Tensor], result: torch.Tensor) -> str:
    return _never(inputs, result) if _same_tensor(inputs) else _always(inputs, result)


def _same_tensor(inputs: list[torch.Tensor]) -> bool:
    return len(inputs) == 2 and inputs[0].is_set_to(inputs[1])


# What small results of these operators are assumed to be when their inputs are unknown: which output, how.
Assume = Callable[[list[torch.Tensor], torch.Tensor], str]
ASSUMED_RESULTS: dict[str, tuple[int, Assume]] = {
    "aten.topk.default": (1, _choices),
    "aten.sort.default": (1, _choices),
    "aten.sort.stable": (1, _choices),
    "aten.argmax.default": (0, _choices),
    "aten.argmin.default": (0, _choices),
    "aten.max.dim": (1, _choices),
    "aten.min.dim": (1, _choices),
    "aten.multinomial.default": (0, _choices),
    "aten.isnan.default": (0, _never),
    "aten.isinf.default": (0, _never),
    "aten.isfinite.default": (0, _always),
    **{
        f"aten.{test}.{kind}": (0, _every_second)
        for test in ("gt", "lt", "ge", "le")
        for kind in ("Scalar", "Tensor")
    },
    **{f"aten.eq.{kind}": (0, _equal) for kind in ("Scalar", "Tensor")},
    **{f"aten.ne.{kind}": (0, _different) for kind in ("Scalar", "Tensor")},
}


# Operators whose small results get values after they are made: assumed here, or known in `handlers.py`.
FILLED_LATER = {*ASSUMED_RESULTS, "aten._pack_padded_sequence.default"}


def assume_result(name: str, inputs: list[torch.Tensor], results: list[object], live: LiveStorage) -> None:
    """Fill a result that depends on unknown values with plausible ones, and remember that it is assumed."""
    position, fill = ASSUMED_RESULTS[name]
    result = results[position]
    assert isinstance(result, torch.Tensor)
    live.assumption = f"the results of {name} {fill(inputs, result)}"
    live.known = True
    live.undecided = fill is _every_second


def decide(name: str, result: torch.Tensor) -> None:
    """Answer `all` and `any` over tests of unknown data as a healthy step would: all hold, none fires."""
    if name in ALL_TRUE:
        result.fill_(True)
    elif name in ANY_TRUE:
        result.fill_(False)


def _reduced_dimension(source: torch.Tensor, indices: torch.Tensor) -> int:
    """Return the dimension of `source` that the indices run over: the one where the shapes differ."""
    differing = (n for n, (own, other) in enumerate(zip(source.shape, indices.shape)) if own != other)
    last = source.dim() - 1
    return next(differing, last) if source.dim() == indices.dim() else last


def _balanced_indices(shape: torch.Size, dimension: int, choices: int) -> torch.Tensor:
    flat = torch.arange(shape.numel()) % max(choices, 1)
    if dimension >= len(shape) or not shape:
        return flat.reshape(shape)
    moved = list(shape)
    moved.append(moved.pop(dimension))
    return flat.reshape(moved).movedim(-1, dimension)


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor ours."""
    return _first_line(traceback.walk_stack(sys._getframe(1)), is_user_file) or _UNKNOWN_LINE


def script_line() -> str:
    """Return `file:line` of the innermost frame of the user's own code, if possible not of a library."""
    return _first_line(traceback.walk_stack(sys._getframe(1)), is_script) or user_line()


def is_script(filename: str) -> bool:
    """Whether a file is the user's own, and neither torch's nor ours nor of a library."""
    installed = "site-packages" in filename or filename.startswith(_STANDARD_LIBRARY)
    return is_user_file(filename) and not installed


def _first_line(frames: Iterable[tuple[FrameType, int]], wanted: Callable[[str], bool]) -> str | None:
    for frame, line in frames:
        if wanted(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{line}"
    return None


def _asked_by_torch() -> bool:
    """Whether the innermost frame that is not ours is of torch's Python code."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_OUR_FOLDER):
            return frame.f_code.co_filename.startswith(_TORCH_FOLDER)
    return False


def user_line_of(error: BaseException) -> str:
    """Return `file:line` of the innermost user frame in an exception's traceback."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    return _first_line(frames, is_user_file) or _UNKNOWN_LINE


def is_user_file(filename: str) -> bool:
    """Whether a source file belongs to the user (or a library of theirs), not to torch or to us."""
    if filename.startswith("<"):
        return False
    return not filename.startswith((_OUR_FOLDER, _TORCH_FOLDER)) or "/trainfit/models/" in filename


def _short(filename: str) -> str:
    parts = Path(filename).parts
    return str(Path(*parts[-3:])) if len(parts) > 3 else filename
