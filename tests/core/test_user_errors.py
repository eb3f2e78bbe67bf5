"""Whose mistake it was: the user sees their own frames and nothing of ours; our own mistakes stay."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainfit.basics import user_errors
from trainfit.basics.user_errors import raise_as_user_error
from trainfit.errors import StepError, UserCodeError

PACKAGE = Path(user_errors.__file__).parent.parent


def code_in(file: str | Path, source: str, **names: Any) -> dict[str, Any]:
    """Run source text as if it stood in `file`, so that its frames have that file's name."""
    namespace = dict(names)
    exec(compile(source, str(file), "exec"), namespace)
    return namespace


USER = code_in(
    "/home/ada/train.py",
    """
def build():
    return helper(3)

def helper(width):
    raise ValueError(f"width {width} is odd")

def look_up():
    return {}["missing"]

def doubt():
    assert False, "a batch of 7"

def go_on():
    try:
        helper(1)
    except ValueError as error:
        raise RuntimeError("no model") from error

def stumble():
    try:
        helper(1)
    except ValueError:
        undefined

def call(function, *arguments):
    return function(*arguments)
""",
)
OURS = code_in(
    PACKAGE / "capturing" / "session.py",
    """
def run(function, *arguments):
    return function(*arguments)

def fail(kind):
    raise kind("from our own code")
""",
)
MODELS = code_in(PACKAGE / "models" / "gpt2.py", "def forward():\n    raise KeyError('wte')")


def caught(function: Callable[..., Any], *arguments: Any) -> BaseException:
    """Return what the function raises when our code calls it."""
    try:
        OURS["run"](function, *arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def shown(error: BaseException) -> UserCodeError:
    with pytest.raises(UserCodeError) as raised:
        raise_as_user_error(error, "build()")
    return raised.value


def files_in(user_traceback: str) -> list[str]:
    lines = (line.strip() for line in user_traceback.splitlines())
    return [line.split('"')[1] for line in lines if line.startswith("File ")]


def test_the_user_sees_only_their_own_frames() -> None:
    error = shown(caught(USER["build"]))
    # This test's frame is somebody else's, too: only what is in the package is left out.
    assert files_in(error.user_traceback) == [__file__, "/home/ada/train.py", "/home/ada/train.py"]
    assert "in build" in error.user_traceback and "in helper" in error.user_traceback
    assert error.user_traceback.endswith("ValueError: width 3 is odd\n")


def test_the_message_is_one_sentence() -> None:
    assert str(shown(caught(USER["build"]))) == "build() raised ValueError: width 3 is odd"


def test_a_message_of_many_lines_becomes_one() -> None:
    def fail() -> None:
        raise ValueError("size mismatch:\n   expected 3\n   got 4")

    error = shown(caught(fail))
    assert str(error) == "build() raised ValueError: size mismatch: expected 3 got 4"
    assert "   expected 3\n" in error.user_traceback


def test_the_original_exception_is_the_cause() -> None:
    original = caught(USER["build"])
    assert shown(original).__cause__ is original


def test_frames_of_ours_between_those_of_the_user_are_left_out() -> None:
    """The user calls us, we call the user: as with modules whose forward is recorded."""
    error = shown(caught(USER["call"], OURS["run"], USER["helper"], 1))
    assert files_in(error.user_traceback) == [__file__, "/home/ada/train.py", "/home/ada/train.py"]
    assert str(PACKAGE) not in error.user_traceback


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("go_on", "direct cause of the following exception"),
        ("stumble", "During handling of the above exception"),
    ],
)
def test_exceptions_behind_the_exception_are_shown_without_our_frames(function: str, sentence: str) -> None:
    def through_us() -> None:
        OURS["run"](USER[function])

    error = shown(caught(through_us))
    assert sentence in error.user_traceback
    assert "ValueError: width 1 is odd" in error.user_traceback
    assert str(PACKAGE) not in error.user_traceback


def test_an_exception_of_ours_behind_the_users_loses_its_frames() -> None:
    def fail() -> None:
        try:
            OURS["fail"](TypeError)
        except TypeError:
            raise ValueError("on top") from None

    assert str(PACKAGE) not in shown(caught(fail)).user_traceback


# Whose mistake ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, NameError, KeyError, ImportError])
def test_our_mistakes_stay(kind: type[Exception]) -> None:
    ours = caught(OURS["fail"], kind)
    with pytest.raises(kind) as raised:
        raise_as_user_error(ours, "build()")
    assert raised.value is ours
    frames = traceback.extract_tb(ours.__traceback__)
    assert frames[-1].filename == str(PACKAGE / "capturing" / "session.py")


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError, IndexError])
def test_what_torch_raises_when_we_call_it_for_the_user_is_theirs(kind: type[Exception]) -> None:
    """A shape that does not fit is raised in C, so that the last Python frame is ours."""
    error = shown(caught(USER["call"], OURS["fail"], kind))
    assert files_in(error.user_traceback) == [__file__, "/home/ada/train.py"]


@pytest.mark.parametrize("function", ["look_up", "doubt"])
def test_the_same_exceptions_from_the_users_code_are_theirs(function: str) -> None:
    error = shown(caught(USER[function]))
    assert files_in(error.user_traceback)[-1] == "/home/ada/train.py"


def test_the_built_in_models_count_as_user_code() -> None:
    error = shown(caught(MODELS["forward"]))
    assert files_in(error.user_traceback)[-1] == str(PACKAGE / "models" / "gpt2.py")
    assert str(error) == "build() raised KeyError: 'wte'"


def test_a_folder_whose_name_begins_like_ours_is_not_ours() -> None:
    neighbour = code_in(str(PACKAGE) + "_plugins/step.py", "def fail():\n    raise KeyError('theirs')")
    assert files_in(shown(caught(neighbour["fail"])).user_traceback)[-1].endswith("_plugins/step.py")


def test_our_own_exceptions_already_speak_to_the_user() -> None:
    def fail() -> None:
        raise StepError("the model has no parameters.")

    error = caught(fail)
    with pytest.raises(StepError) as raised:
        raise_as_user_error(error, "build()")
    assert raised.value is error


def test_an_exception_that_was_never_raised_is_the_users() -> None:
    assert str(shown(KeyError("lost"))) == "build() raised KeyError: 'lost'"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (SystemExit, "build() ended the program: it called sys.exit. What is to run only as a script"),
        (KeyboardInterrupt, "build() raised KeyboardInterrupt"),
    ],
)
def test_leaving_the_program_is_shown_like_an_exception(kind: type[BaseException], says: str) -> None:
    """Whether to pass these on is the caller's decision, not ours."""

    def leave() -> None:
        raise kind

    assert str(shown(caught(leave))).startswith(says)


# Importing the user's file ------------------------------------------------------------------------------


def import_file(file: Path) -> None:
    spec = importlib.util.spec_from_file_location("user_file", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_import_machinery_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import math\nmath.nonsense\n")
    error = shown(caught(import_file, file))
    assert files_in(error.user_traceback)[-1] == str(file)
    assert "importlib" not in error.user_traceback.replace("importlib.util.module_from_spec", "")
    assert "math.nonsense" in error.user_traceback


def test_a_module_that_does_not_exist() -> None:
    error = shown(caught(importlib.import_module, "there_is_no_such_module"))
    assert str(error) == "build() raised ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert files_in(error.user_traceback) == [__file__]


def test_a_syntax_error_points_at_the_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def build(:\n    pass\n")
    error = shown(caught(import_file, file))
    assert str(error) == "build() raised SyntaxError: invalid syntax"
    assert f'File "{file}", line 1' in error.user_traceback
    assert "def build(:" in error.user_traceback
