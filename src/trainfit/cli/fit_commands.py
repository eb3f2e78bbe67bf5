"""The command `fit`: what to change so that a step fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from trainfit.cli import cli_options as given
from trainfit.cli.cli_running import present, working
from trainfit.cli.cluster_options import ClusterFlags
from trainfit.cli.plain_option import option

if TYPE_CHECKING:
    from trainfit.api.find_ways import Ask


@dataclass(frozen=True)
class FitFlags:
    """A step, a device, and what may be changed."""

    panel: ClassVar[str] = "What may be changed, and for how long to look"
    device: given.DeviceName = None
    budget: given.Budget = None
    keep_numerics: Annotated[
        bool,
        typer.Option("--keep-numerics", help="Leave out what changes results by more than rounding does."),
    ] = False
    seconds: Annotated[
        float,
        option(
            "N",
            "How long to look for ways; as long as nothing fits, up to four times as long.",
        ),
    ] = 30.0
    step: given.StepFlags = given.NO_STEP_FLAGS
    mesh: Annotated[
        str | None,
        option(
            "DIM=N,...",
            "The devices that a built-in or hf: model may be divided among, as estimate takes them: dp or "
            "fsdp, replicate, tp. The samples of the step stay the same, and each copy gets its share.",
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, option("N", "Of the mesh: processes per node, which NVLink connects. Default: 8.")
    ] = None
    network: Annotated[
        str | None, option("SPEED", "Of the mesh: what each GPU gets of the network between nodes.")
    ] = None
    allocator: given.Allocator = "default"

    def ask(self, target: str) -> Ask:
        """Return the question that the API takes."""
        from trainfit.api.find_ways import Ask
        from trainfit.api.request import default_device

        device = self.device or default_device()
        given_cluster = ClusterFlags(mesh=self.mesh, gpus_per_node=self.gpus_per_node, network=self.network)
        cluster, _ = given_cluster.cluster()
        return Ask(target, device, self.step.options(), self.step.task, self.allocator, cluster)


WayOutput = Annotated[
    str | None, option("FILE", "Write the fastest way, for trainfit.apply.", "--output", "-o")
]


def fit(
    target: given.Target, asked: FitFlags, output: WayOutput = None, *, outputs: given.OutputFlags
) -> None:
    """Find out what to change so that a step fits, and what is fastest.

    Looks at checkpointing plans, smaller batches with accumulation, loss in
    chunks, the optimizer, dtypes, what is kept on the host, the allocator's
    setting, and sharding over a --mesh, alone and together. Each way is
    captured as it would run, with its peak, time and throughput, what becomes
    of the results, and the lines of code that make it. Exit code 3 if nothing
    fits.

    [bold]Examples[/bold]

      trainfit fit llama-3-8b --device h100
      trainfit fit gpt2 --batch 32 --device rtx-4090 --keep-numerics
      trainfit fit llama-3-8b --batch 8 --device h100 --mesh fsdp=8
      trainfit fit train.py:build --budget 22GiB --device a100-40gb -o way.json

    A training script carries out what trainfit can with
    trainfit.apply(model, trainfit.load_way("way.json"), optimizer=optimizer).
    """
    with working(outputs, output=output):
        from trainfit.api.find_ways import fit_step, refuse_nothing_fits
        from trainfit.plans.way_store import save_way
        from trainfit.report.fit_data import fit_data
        from trainfit.report.text_fits import fit_view

        result = fit_step(asked.ask(target), asked.budget, asked.keep_numerics, asked.seconds)
    if output is not None and result.ways:
        save_way(result.ways[0], output)
    present(outputs, fit_data(result), fit_view, result)
    refuse_nothing_fits(result)
