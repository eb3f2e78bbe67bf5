"""Tell a mistake in the user's code from one of ours, and show the user only their own frames."""

from __future__ import annotations

import argparse
import importlib
import os
import traceback
from pathlib import Path
from typing import NoReturn

from trainfit.errors import TrainfitError, UserCodeError

_OWN_FOLDER = str(Path(__file__).parent.parent) + os.sep
_OWN_MODELS = _OWN_FOLDER + "models" + os.sep
# What a mistake of ours raises. Other exceptions that end in a frame of ours come out of torch, which was
# called there on the user's behalf: a shape that does not fit, an index out of range.
_OUR_MISTAKES = (AssertionError, AttributeError, NameError, KeyError, ImportError)


def raise_as_user_error(error: BaseException, doing: str) -> NoReturn:
    """Raise `error` as a UserCodeError that shows the user's frames, unless the mistake is not theirs.

    Our own exceptions already speak to the user. `doing` completes the sentence "... raised".
    """
    if isinstance(error, TrainfitError) or _raised_by_us(error):
        raise error
    report = traceback.TracebackException.from_exception(error)
    _drop_own_frames(report)
    if isinstance(error, SystemExit):
        raise UserCodeError(_ended_the_program(error, doing), "".join(report.format())) from error
    advice = _DATA_ENDED if data_ended(error) else _cause_of(error)
    raise UserCodeError(f"{doing} raised {_one_line(error)}{advice}", "".join(report.format())) from error


def _one_line(error: BaseException) -> str:
    without_notes = traceback.TracebackException(type(error), error, None)
    without_notes.__notes__ = None
    return " ".join(list(without_notes.format_exception_only())[-1].split())


def _cause_of(error: BaseException) -> str:
    """Name the first of the errors that an error was made of, as torch's pipelines make theirs."""
    first, passed = error, {id(error)}
    while first.__cause__ is not None and id(first.__cause__) not in passed:
        first = first.__cause__
        passed.add(id(first))
    return "" if first is error else f", because of {_one_line(first)}"


_DATA_ENDED = (
    ": its data ended. run() is called several times, so let the data begin again, as itertools.cycle does, "
    "or take more of it."
)


def data_ended(error: BaseException) -> bool:
    """Whether an iterator had nothing more to give; inside a generator Python makes another error of it."""
    return isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)


def _ended_the_program(error: SystemExit, doing: str) -> str:
    """Say that the code left by `sys.exit`; if a parser of arguments did, say what it missed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # argparse prints its message and leaves; what it says is in the frame of its `error`.
        if frame.f_code.co_filename == argparse.__file__ and frame.f_code.co_name == "error":
            return (
                f"{doing} reads a command line, and there is none: {frame.f_locals.get('message')}. Give the "
                "function parameters for these values and pass them with --set name=value, or give the "
                "parser defaults."
            )
    code = "" if error.code is None else f" with {error.code!r}"
    return (
        f"{doing} ended the program: it called sys.exit{code}. What is to run only as a script belongs under "
        'if __name__ == "__main__".'
    )


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own_frame(frames[-1]) and isinstance(error, _OUR_MISTAKES)


def _is_own_frame(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN_FOLDER) and not frame.filename.startswith(_OWN_MODELS)


def _drop_own_frames(report: traceback.TracebackException) -> None:
    """Leave out trainfit's frames and the import machinery's, in the exception and in those behind it."""
    kept = [
        frame
        for frame in report.stack
        if not _is_own_frame(frame)
        and not frame.filename.startswith("<frozen importlib")
        and frame.filename != importlib.__file__
    ]
    report.stack = traceback.StackSummary.from_list(kept)
    for behind in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if behind is not None:
            _drop_own_frames(behind)
