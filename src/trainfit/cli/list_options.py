"""Options that take several values: one result for each combination, or the largest batch that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli import completions
from trainfit.cli.cli_options import RequestFlags, StepFlags
from trainfit.cli.completions import one_of
from trainfit.cli.output_options import OutputFlags
from trainfit.cli.plain_option import option
from trainfit.errors import OptionError
from trainfit.sizing.size_lists import MAX, MOST_VALUES, Size, read_names, read_sizes

if TYPE_CHECKING:
    from trainfit.api.several import AskedStep
    from trainfit.models.recipe import StepOptions

WITH_LISTS = ("json", "csv")
"""What can be written of several results."""


@dataclass(frozen=True)
class ListedStepFlags(StepFlags):
    """What can be asked of a step, with a list of batches."""

    batch: Annotated[
        str | None,
        option(
            "N|N,N|max",
            "Samples per step. Several with commas between them (1,2,4,8) give a table; max is the largest "
            "batch that fits.",
            offered=one_of(MAX),
        ),
    ] = None  # type: ignore[assignment]

    @property
    def batches(self) -> tuple[Size | None, ...]:
        """The batches that were given; one that is None if none was."""
        return (None,) if self.batch is None else read_sizes(self.batch, "--batch")

    def options(self) -> StepOptions:
        """Return what was asked of the step, if it is asked of one batch."""
        sizes = self.batches
        assert len(sizes) == 1, "of several there is one after the other"
        size: Any = None if sizes[0] == MAX else sizes[0]
        return StepFlags(**{**vars(self), "batch": size}).options()


@dataclass(frozen=True)
class ListedRequestFlags(RequestFlags):
    """A step on a device, or several."""

    device: Annotated[
        str | None,
        option(
            "NAME[,NAME]",
            "A name that `trainfit devices` lists, a JSON file of your own, cpu (this machine) or cuda "
            "(the GPU in it); several with commas between them give a table. Default: the GPU if there is "
            "one, else cpu.",
            offered=completions.devices,
        ),
    ] = None
    step: ListedStepFlags = ListedStepFlags()

    @property
    def has_lists(self) -> bool:
        """Whether there is more than one step."""
        return len(self._combinations()) > 1

    def asked(self, target: str, of_cluster: bool = True) -> list[AskedStep]:
        """Return every step that is asked about: each device with each batch."""
        from trainfit.api.several import AskedStep

        found = []
        for device, batch in self._combinations():
            text = None if batch is None else str(batch)
            one = replace(self, device=device, step=replace(self.step, batch=text))
            found.append(AskedStep(one.request(target, of_cluster), batch == MAX))
        return found

    def _combinations(self) -> list[tuple[str | None, Size | None]]:
        devices = (None,) if self.device is None else read_names(self.device, "--device")
        found = [(device, batch) for device in devices for batch in self.step.batches]
        if len(found) > MOST_VALUES:
            raise OptionError(f"--device and --batch name {len(found)} steps; the most is {MOST_VALUES}.")
        return found


def refuse_with_lists(outputs: OutputFlags, **files: str | None) -> None:
    """Refuse files that are about one step."""
    named = {name: value for name, value in vars(outputs).items() if name not in WITH_LISTS} | files
    for name, value in named.items():
        if value is not None:
            raise OptionError(
                f"--{name.replace('_', '-')} is about one step, and --batch or --device name several; "
                "--json and --csv take all of them."
            )


def hidden(name: str) -> Any:
    """Return an option that is only there to say that it makes no sense."""
    return typer.Option(f"--{name}", hidden=True)
