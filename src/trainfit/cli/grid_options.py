"""The options of `compare` and `sweep`: one step on several devices, and a grid of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trainfit.cli import completions
from trainfit.cli.cli_options import NO_STEP_FLAGS, Allocator, StepFlags, StepsLookedAt
from trainfit.cli.cluster_options import NO_CLUSTER, ClusterFlags
from trainfit.cli.plain_option import option

if TYPE_CHECKING:
    from trainfit.renting.found_comparison import DeviceComparison


PlanSeconds = Annotated[
    float, option("N", "Stop solving for the plan of a device after this long, with the best so far.")
]
GridFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE.toml",
        autocompletion=completions.toml_files,
        help="The grid: target, batch, seq, dtype, budget, device, mesh, ..., each one value or a list.",
    ),
]
TableFile = Annotated[
    str | None,
    option(
        "FILE",
        "Write the table here, as CSV or, if the name ends in .parquet, as Parquet. Default: the grid's name "
        "with .csv. What is done is kept beside it, in FILE.state.jsonl.",
        "--output",
        "-o",
    ),
]
Jobs = Annotated[
    int | None,
    option(
        "N", "How many processes work at once. Default: one per processor, or per CPU of the Ray cluster."
    ),
]
Ray = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Work on a Ray cluster instead of in processes of this machine: the one that RAY_ADDRESS names, "
        "one that runs here, or a new one.",
    ),
]
RayAddress = Annotated[str | None, option("ADDRESS", "Work on the Ray cluster at this address.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew: forget what an earlier run has done.")]


@dataclass(frozen=True)
class DevicesFlags:
    """Which devices, and how the step on them is asked about."""

    panel: ClassVar[str] = "The devices, and how they are asked about"
    devices: Annotated[
        str | None,
        option(
            "NAME,...",
            "Names that `trainfit devices` lists, or JSON files of your own, with commas between them; all: "
            "every one of the table. Default: those that have a price, or a usual set.",
            offered=completions.listed_devices,
        ),
    ] = None
    step: StepFlags = NO_STEP_FLAGS
    steps: StepsLookedAt = None
    allocator: Allocator = "default"
    seconds: PlanSeconds = 30.0
    cluster: ClusterFlags = NO_CLUSTER


@dataclass(frozen=True)
class RunFlags:
    """How long a whole run is, and what an hour costs."""

    panel: ClassVar[str] = "A whole run, and what it costs"
    tokens: Annotated[str | None, option("COUNT", "The run trains on so many tokens: 10B, 300M.")] = None
    epochs: Annotated[float | None, option("N", "The run is so many epochs of --samples.")] = None
    samples: Annotated[str | None, option("COUNT", "An epoch has so many samples: 1.2M, 50k.")] = None
    price: Annotated[
        list[str] | None,
        option("NAME=N/h", "What an hour of a device costs, as in h100=2.99/h. Repeat for more."),
    ] = None
    prices: Annotated[
        str | None,
        option("FILE", 'A TOML or JSON file of prices per hour: h100 = 2.99, or {"h100": 2.99}.'),
    ] = None

    def compared(self, target: str, asked: DevicesFlags) -> DeviceComparison:
        """Compare; what is wrong with the options is said before anything is captured."""
        from trainfit.renting.price_text import assigned_prices, read_prices, refuse_unused
        from trainfit.renting.run_length import read_length
        from trainfit.renting.shared_captures import SharedCaptures
        from trainfit.renting.which_device import compare_devices, read_devices

        given = assigned_prices(self.price or ())
        prices = (read_prices(self.prices) if self.prices is not None else {}) | given
        devices = read_devices(asked.devices, prices)
        refuse_unused(given, devices, "--price")
        run = read_length(self.tokens, self.epochs, self.samples)
        cluster, worst_rank = asked.cluster.cluster()
        arguments: dict[str, Any] = {
            "options": asked.step.options(),
            "task": asked.step.task,
            "steps": asked.steps,
            "cluster": cluster,
            "worst_rank": worst_rank,
        }
        captures = SharedCaptures(target, arguments)
        return compare_devices(captures, devices, prices, run, asked.allocator, asked.seconds)
