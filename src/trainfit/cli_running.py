"""Running a command: one message for a mistake, a spinner meanwhile, one result at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from trainfit.errors import TrainfitError, UserCodeError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.devices import Device
    from trainfit.models.recipe import StepOptions
    from trainfit.report.progress import Reporter

INTERRUPTED = 130


@contextlib.contextmanager
def working(json: str | None, **files: str | None) -> Iterator[Reporter]:
    """Show what is being done, with files that cannot be written refused before it begins."""
    from trainfit.report import json_result, progress

    for name, path in {"json": json, **files}.items():
        if path is not None:
            json_result.check_destination(path, f"--{name.replace('_', '-')}")
    with _standard_output_for(json), progress.spinner() as report:
        report("loading torch")
        yield report


def present(
    json: str | None, as_json: Callable[[], dict[str, Any]], view: Callable[[], RenderableType]
) -> None:
    """Write the result for programs where they asked for it, and show it to people."""
    from trainfit.report import json_result, tables

    if json is not None:
        json_result.write_json(as_json(), json)
    if json != json_result.STANDARD_OUTPUT:
        tables.show(view())


def asked_for(device: str | None, *step: Any) -> tuple[Device, StepOptions]:
    """Return the device that was named, or that of this machine, and what was asked of the step on it."""
    from trainfit.devices import find_device

    found = find_device(device or default_device())
    return found, step_options(found.kind, *step)


def step_options(
    device: str,
    batch: int | None,
    seq: int | None,
    image_size: int | None,
    dtype: str | None,
    optimizer: str | None,
    set: list[str] | None,
) -> StepOptions:
    """Return what was asked of the step; its own checks say what is wrong with it."""
    from trainfit.models.recipe import StepOptions
    from trainfit.targets.given_values import read_assignments

    # StepOptions checks the choices itself.
    chosen: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "set": read_assignments(set or ())}
    return StepOptions(batch=batch, seq=seq, image_size=image_size, device=device, **chosen)


def default_device() -> str:
    """Return the GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


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
def _standard_output_for(json: str | None) -> Iterator[None]:
    """With `--json -`, send what is printed meanwhile to standard error: that stream is for the JSON alone.

    That includes what the user's code prints, and what C code and child processes write to descriptor 1.
    """
    if json != "-":
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
