"""The options that say where a result is written, besides the terminal: checked first, written last.

Each command takes the object with the files that its result has: `TableOutputFlags` for a table,
`OutputFlags` for what has a page, too, `StepOutputFlags` where the result is one step, op by op. A field is
an option, and has its writer in `write`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from trainfit.basics.doing import doing
from trainfit.cli.plain_option import option
from trainfit.errors import OptionError

if TYPE_CHECKING:
    from trainfit.api.request import Request

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class TableOutputFlags:
    """What can be written of a result that is a table."""

    panel: ClassVar[str] = "What is shown and written"
    json: Annotated[
        str | None,
        option(
            "FILE",
            "Write the result as one JSON object; - is standard output, and then nothing else goes there.",
        ),
    ] = None
    csv: Annotated[
        str | None,
        option("DIR", "Write every table of the result into this folder, each as a CSV file of its own."),
    ] = None

    @property
    def takes_standard_output(self) -> bool:
        """Whether standard output is for a program, and nothing else may go there."""
        return self.json == STANDARD_OUTPUT

    @property
    def any_file(self) -> bool:
        """Whether anything is to be written that takes a while to make."""
        return any(getattr(self, field.name) for field in fields(self) if field.name != "json")

    def check(self, others: Mapping[str, str | None]) -> None:
        """Refuse what cannot be written before the work begins; others are a command's own files."""
        from trainfit.exports.table_folder import check_folder
        from trainfit.report.json_result import check_destination

        named = {**{field.name: getattr(self, field.name) for field in fields(self)}, **others}
        flags = {f"--{name.replace('_', '-')}": path for name, path in named.items() if path is not None}
        for flag, path in flags.items():
            if path == STANDARD_OUTPUT and flag != "--json":
                raise OptionError(f"{flag} - : only --json can be written to standard output; name a file.")
            (check_folder if flag == "--csv" else check_destination)(path, flag)
        _refuse_one_file_twice(flags)

    def write(self, data: Any, result: Any) -> None:
        """Write every file that was asked for, each whole or not at all."""
        from trainfit.report import json_result

        if self.csv is not None:
            from trainfit.exports.csv_tables import write_tables

            doing("writing the tables")
            write_tables(data, result, self.csv)
        if self.json is not None:
            doing("writing the JSON")
            json_result.write_json(json_result.whole_json(data), self.json)


@dataclass(frozen=True)
class OutputFlags(TableOutputFlags):
    """What can be written of any result about one step."""

    report: Annotated[
        str | None,
        option("F.html", "Write the result as one page to look at: pictures, tables, no network needed."),
    ] = None

    def write(self, data: Any, result: Any) -> None:
        """Write every file that was asked for, each whole or not at all."""
        super().write(data, result)
        if self.report is not None:
            from trainfit.webpage.page import write_page

            doing("writing the report")
            write_page(data, result, self.report)


@dataclass(frozen=True)
class StepOutputFlags(OutputFlags):
    """What can be written of a step that is known op by op."""

    snapshot: Annotated[
        str | None,
        option(
            "F.pickle",
            "Write the step's memory as a snapshot of PyTorch's allocator: drop it on pytorch.org/memory_viz,"
            " or python -m torch.cuda._memory_viz trace_plot F.pickle -o page.html.",
        ),
    ] = None

    perfetto: Annotated[
        str | None,
        option(
            "F.json",
            "Write the step in time as a trace: open it in ui.perfetto.dev or chrome://tracing. Ops on host, "
            "compute, copies and communication, what waits for what, and memory over time.",
        ),
    ] = None

    def check_speed(self, request: Request) -> None:
        """Refuse a step in time before the work begins, where nothing is known about the device's speed."""
        if self.perfetto is not None and not request.device.has_speed and request.costs != "measured":
            from trainfit.exports.perfetto import NO_SPEED

            raise OptionError(NO_SPEED)

    def write(self, data: Any, result: Any) -> None:
        """Write every file that was asked for, each whole or not at all."""
        if self.snapshot is not None:
            from trainfit.exports.memory_snapshot import write_snapshot

            doing("writing the memory snapshot")
            write_snapshot(result, self.snapshot)
        if self.perfetto is not None:
            from trainfit.exports.perfetto import write_perfetto

            doing("writing the trace for Perfetto")
            write_perfetto(result, self.perfetto)
        super().write(data, result)


def _refuse_one_file_twice(flags: Mapping[str, str]) -> None:
    """The second would replace the first, without a word."""
    seen: dict[str, str] = {}
    for flag, path in flags.items():
        place = os.path.realpath(path)
        if place in seen and not (os.path.exists(place) and not os.path.isfile(place)):
            raise OptionError(f"{seen[place]} and {flag} name the same file, {path!r}.")
        seen[place] = flag
