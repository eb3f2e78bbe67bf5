"""The commands about several steps at once: `compare`, one step on several devices, and `sweep`, a grid."""

from __future__ import annotations

import typer

from trainfit.cli import cli_options as given
from trainfit.cli import grid_options as of_grid
from trainfit.cli.cli_running import command, present, working
from trainfit.cli.output_options import TableOutputFlags


def compare(
    target: given.Target,
    asked: of_grid.DevicesFlags,
    run: of_grid.RunFlags,
    outputs: TableOutputFlags,
) -> None:
    """Compare devices: where a step fits, with which plan, how fast it is, what a whole run costs.

    Where the step does not fit, the fastest plan that makes it fit is found, and
    times and costs are those with it. Exit code 3 if it fits nowhere.

    [bold]Examples[/bold]

      trainfit compare gpt2 --devices h100,a100-80gb,rtx-4090,l40s
      trainfit compare llama-3-8b --tokens 10B --price h100=2.99/h --price b200=5
      trainfit compare resnet-50 --epochs 90 --samples 1.28M --prices prices.toml

    Prices are yours, per hour and device, in any currency; none is built in.
    """
    with working(outputs):
        from trainfit.report.text_compared import comparison_view

        result = run.compared(target, asked)
    present(outputs, result.data, comparison_view, result)
    result.check()


def add_grid_commands(app: typer.Typer) -> None:
    """Register them, so that the help lists them after those about one step."""
    command(app)(compare)
