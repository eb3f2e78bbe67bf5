"""The commands about several steps at once: `compare`, one step on several devices, and `sweep`, a grid."""

from __future__ import annotations

import os

import typer

from trainfit.cli import cli_options as given
from trainfit.cli import grid_options as of_grid
from trainfit.cli.cli_running import command, present, working
from trainfit.cli.output_options import OutputFlags, TableOutputFlags


def compare(
    target: given.Target,
    asked: of_grid.DevicesFlags,
    run: of_grid.RunFlags,
    outputs: OutputFlags,
) -> None:
    """Compare devices: where a step fits, with which plan, how fast it is, what a whole run costs.

    Where the step does not fit, the fastest plan that makes it fit is found, and
    times and costs are those with it. Exit code 3 if it fits nowhere.

    [bold]Examples[/bold]

      trainfit compare gpt2 --devices h100,a100-80gb,rtx-4090,l40s
      trainfit compare llama-3-8b --tokens 10B --price h100=2.99/h --price b200=5
      trainfit compare resnet-50 --epochs 90 --samples 1.28M --prices prices.toml
      trainfit compare gpt2 --devices h100,l40s --report compared.html

    Prices are yours, per hour and device, in any currency; none is built in.
    """
    with working(outputs):
        from trainfit.report.text_compared import comparison_view

        result = run.compared(target, asked)
    present(outputs, result.data, comparison_view, result)
    result.check()


def sweep(
    file: of_grid.GridFile,
    *,
    output: of_grid.TableFile = None,
    jobs: of_grid.Jobs = None,
    ray: of_grid.Ray = False,
    ray_address: of_grid.RayAddress = None,
    fresh: of_grid.Fresh = False,
    outputs: TableOutputFlags,
) -> None:
    """Predict a grid of steps, models by batches by devices and so on, and write one table.

    [bold]Examples[/bold]

      trainfit sweep grid.toml
      trainfit sweep grid.toml -o results.parquet --jobs 8
      trainfit sweep grid.toml --ray-address ray://head:10001

    A grid is a TOML file. A list is an axis, one value is the same in all rows:

      target = ["gpt2", "train.py:build"]
      batch = [1, 2, 4, 8]
      dtype = "bf16-autocast"
      device = ["h100", "a100-80gb"]
      budget = ["none", "device"]   # as it is, and with a plan

    Rows are kept as they are done: after Ctrl-C, or if a machine goes down, the
    same command continues. A row that fails has an error in the table, and does
    not stop the others; exit code 2 if all fail.
    """
    table = output if output is not None else f"{os.path.splitext(file)[0]}.csv"
    with working(outputs, output=table):
        from trainfit.report.text_swept import sweep_view
        from trainfit.sweeping.sweep_grid import sweep as sweep_grid

        place: bool | str = ray if ray_address is None else ray_address
        try:
            result = sweep_grid(file, output=table, jobs=jobs, ray=place, fresh=fresh)
        except KeyboardInterrupt as interrupt:
            if str(interrupt):
                typer.echo(f"interrupted: {interrupt}", err=True)
            raise
    present(outputs, result.data, sweep_view, result)
    result.check()


def add_grid_commands(app: typer.Typer) -> None:
    """Register them, so that the help lists them after those about one step."""
    command(app)(compare)
    command(app)(sweep)
