"""Running a command: its options as objects, one message for a mistake, progress meanwhile, one result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

from trainfit.basics.doing import doing, heard_by
from trainfit.cli.amount_options import AmountFlags, amount_now
from trainfit.cli.help_layout import fitted
from trainfit.errors import TrainfitError, UserCodeError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.cli.output_options import TableOutputFlags
    from trainfit.report.amounts import Amount

INTERRUPTED = 130
Data = TypeVar("Data")


def command(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: objects of options are filled, and mistakes become exit codes.

    Where a parameter is a dataclass (`cli_options`), the command line has its fields as options in its place;
    in the help they are under the heading that it names as its `panel`. Every command has `-q` and `-v`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        amounts = inspect.Parameter("amounts", inspect.Parameter.KEYWORD_ONLY, annotation=AmountFlags)

        @functools.wraps(function)
        def run(**given: Any) -> None:
            with user_errors():
                amount_now.set(_filled(AmountFlags, "amounts", given).amount())
                function(**{p.name: _filled(p.annotation, p.name, given) for p in parameters})

        flat = [option for parameter in (*parameters, amounts) for option in _options(parameter)]
        run.__doc__ = fitted(inspect.cleandoc(function.__doc__ or ""))
        run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
        return app.command()(run)

    return decorate


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the options that a parameter stands for: itself, or the fields of its object."""
    if not is_dataclass(parameter.annotation):
        yield parameter
        return
    hints = get_type_hints(parameter.annotation, include_extras=True)
    panel = getattr(parameter.annotation, "panel", None)
    for field in fields(parameter.annotation):
        hint = hints[field.name]
        for information in getattr(hint, "__metadata__", ()):
            information.rich_help_panel = information.rich_help_panel or panel
        yield from _options(parameter.replace(name=field.name, annotation=hint, default=field.default))


def _filled(kind: Any, name: str, given: dict[str, Any]) -> Any:
    """Return what was given for a parameter, as the object that it takes."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return given[name]
    hints = get_type_hints(kind)
    return kind(**{f.name: _filled(hints[f.name], f.name, given) for f in fields(kind)})


@contextlib.contextmanager
def working(outputs: TableOutputFlags, **files: str | None) -> Iterator[None]:
    """Show what is being done, with files that cannot be written refused before it begins."""
    outputs.check(files)
    with _standard_output_for(outputs), _progress():
        doing("loading torch")
        yield


def present(
    outputs: TableOutputFlags, data: Data, view: Callable[[Data, Amount], RenderableType], result: Any
) -> None:
    """Write a result for programs where they asked for it, and show it to people.

    The data is what a reader sees of the result; files about every op of the step are made of the result.
    """
    from trainfit.report import tables

    with _progress() if outputs.any_file else contextlib.nullcontext():
        outputs.write(data, result)
    if not outputs.takes_standard_output:
        amount = amount_now.get()
        tables.show(view(data, amount), one_line=amount == "verdict")


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    from trainfit.report import progress

    if amount_now.get() == "verdict":
        yield
        return
    with progress.spinner() as reporter, heard_by(reporter, reporter.measuring):
        yield


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn our exceptions into one message on standard error and exit code 2; an interrupt into 130."""
    try:
        yield
    except TrainfitError as error:
        if isinstance(error, UserCodeError):
            typer.echo(error.user_traceback, err=True)
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _standard_output_for(outputs: TableOutputFlags) -> Iterator[None]:
    """With `--json -`, send what is printed meanwhile to standard error: that stream is for the JSON alone.

    That includes what the user's code prints, and what C code and child processes write to descriptor 1.
    """
    if not outputs.takes_standard_output:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
