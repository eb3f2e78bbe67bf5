"""The commands about what only a cluster decides: `scale`, which mesh, and `shard`, which units of FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from trainfit.cli import cli_options as given
from trainfit.cli.cli_running import command, present, working
from trainfit.cli.cluster_options import NO_CLUSTER, ClusterFlags
from trainfit.cli.completions import one_of
from trainfit.cli.list_options import hidden
from trainfit.cli.output_options import TableOutputFlags
from trainfit.cli.plain_option import option
from trainfit.errors import OptionError

if TYPE_CHECKING:
    from trainfit.scaling.found_scale import Scale
    from trainfit.sharding.found_sharding import ShardingResult


@dataclass(frozen=True)
class StepOfScale(given.StepFlags):
    """What can be asked of a step whose micro-batch is looked for."""

    batch: Annotated[int | None, hidden("batch")] = None


@dataclass(frozen=True)
class ScaleFlags:
    """Which clusters, and what a step of them trains on."""

    panel: ClassVar[str] = "The clusters"
    world_sizes: Annotated[
        str,
        option("N..M|N,...", "Numbers of GPUs: 8..1024 is each twice the one before, 8,16,64 these."),
    ] = "8..1024"
    global_batch: Annotated[
        str | None,
        option(
            "COUNT",
            "What one step of all GPUs trains on, in sequences (512) or tokens ('4Mi tokens'); copies of the "
            "model share it, and accumulate gradients where their part does not fit at once. Default: no "
            "accumulation, and the micro-batch with the most throughput.",
        ),
    ] = None
    dimensions: Annotated[
        str | None,
        option(
            "DIM,...",
            "What a mesh may have, of replicate, fsdp, tp, cp, ep and pp. Default: replicate,fsdp,tp,pp, ep "
            "for models with experts, and cp for sequences from 32,768 tokens on or where there are fewer "
            "sequences than GPUs need.",
        ),
    ] = None
    gpus_per_node: Annotated[int, option("N", "GPUs per node, which NVLink connects.")] = 8
    network: Annotated[
        str | None,
        option("SPEED", "What each GPU gets of the network between nodes: 50GB/s, or 400Gbit/s."),
    ] = None
    confirm: Annotated[
        str,
        option(
            "WHICH",
            "best: capture the whole model with the mesh that has the most throughput per GPU, and certify "
            "its plan. all: with the best mesh of every size, which takes longer. none: nothing but what is "
            "worked out.",
            offered=one_of("best", "all", "none"),
        ),
    ] = "best"


@dataclass(frozen=True)
class ScaleRequestFlags:
    """The step, the device, and how long to look for a plan."""

    panel: ClassVar[str] = "The device, and how it is asked about"
    device: given.DeviceName = None
    step: StepOfScale = StepOfScale()
    budget: given.Budget = None
    allocator: given.Allocator = "default"
    seconds: Annotated[
        float, option("N", "Stop solving for the plan of a confirmed mesh after this long.")
    ] = 10.0

    def scaled(self, target: str, clusters: ScaleFlags) -> Scale:
        """Look at every size; what is wrong with the options is said before anything is captured."""
        from trainfit.scaling.which_mesh import scale as scale_model

        return scale_model(
            target,
            clusters.world_sizes,
            device=self.device or "h100",
            options=self.step.options(),
            task=self.step.task,
            global_batch=clusters.global_batch,
            dimensions=clusters.dimensions,
            budget=self.budget,
            allocator=self.allocator,
            gpus_per_node=clusters.gpus_per_node,
            network=clusters.network,
            confirm=clusters.confirm,
            seconds_limit=self.seconds,
        )


def scale(
    target: given.Target, *, clusters: ScaleFlags, asked: ScaleRequestFlags, outputs: TableOutputFlags
) -> None:
    """Find the best mesh for each number of GPUs: how far does it scale, and what limits it?

    For each size the mesh (copies, FSDP, tensor and context parallel, pipeline)
    with its micro-batch and checkpointing that trains the most per second, and
    why the others lose. The model is captured with few layers, the rest worked
    out and said to be derived; the winner is captured whole and its plan
    certified. Exit code 3 if nothing fits.

    [bold]Examples[/bold]

      trainfit scale llama-3-8b --device h100 --world-sizes 8..256
      trainfit scale llama-3-70b --global-batch "4Mi tokens" --dtype bf16-autocast
      trainfit scale llama-3-8b --seq 131072 --world-sizes 64 --dimensions fsdp,cp,tp
      trainfit scale hf:config.json --world-sizes 8,16,32 --confirm all
    """
    with working(outputs):
        from trainfit.report.text_scale import scale_view

        result = asked.scaled(target, clusters)
    present(outputs, result.data, scale_view, result)
    result.check()


@dataclass(frozen=True)
class ShardRequestFlags:
    """The step of a rank, the device, and how long to look for plans."""

    panel: ClassVar[str] = "The device, and how it is asked about"
    device: given.DeviceName = None
    step: given.StepFlags = given.NO_STEP_FLAGS
    budget: given.Budget = None
    allocator: given.Allocator = "default"
    seconds: Annotated[float, option("N", "Stop solving for the plan of a setting after this long.")] = 10.0
    cluster: ClusterFlags = NO_CLUSTER

    def sharded(self, target: str) -> ShardingResult:
        """Try the settings; what is wrong with the options is said before anything is captured."""
        from trainfit.sharding.found_sharding import plan_sharding

        cluster, worst = self.cluster.cluster()
        if cluster is None:
            raise OptionError(
                "shard is about a step of several processes: say how they share the work by --mesh dp=8, or "
                "how many there are by --world-size 8."
            )
        if worst:
            raise OptionError(
                "--rank worst: all ranks have the same setting; it is looked for on one of them."
            )
        return plan_sharding(
            target,
            cluster=cluster,
            device=self.device or "h100",
            budget=self.budget,
            options=self.step.options(),
            task=self.step.task,
            allocator=self.allocator,
            seconds_limit=self.seconds,
        )


def shard(
    target: given.Target,
    *,
    asked: ShardRequestFlags,
    output: Annotated[
        str | None, option("FILE", "Write the setting with its plan, to apply it.", "--output", "-o")
    ] = None,
    outputs: TableOutputFlags,
) -> None:
    """Find how to set FSDP: its units, which stay whole after forward, and what is checkpointed.

    Keeping units whole saves gathers and costs memory, which recomputation gives
    back for time: each setting is captured, gets the fastest plan that fits, and
    the fastest of all is shown. Exit code 3 if none fits.

    [bold]Examples[/bold]

      trainfit shard llama-3-8b --mesh dp=16 --device h100
      trainfit shard llama-3-8b --mesh dp=64 --network 25GB/s --budget 40GiB -o shard.json
      trainfit shard train.py:build --world-size 8 --device a100-80gb

    A training script needs trainfit.shard(model, trainfit.load_sharding("shard.json"),
    mesh=mesh) in place of its calls of fully_shard.
    """
    with working(outputs, output=output):
        from trainfit.plans.sharding_choice import save_sharding
        from trainfit.report.text_sharding import sharding_view

        result = asked.sharded(target)
    if output is not None and result.data.feasible:
        save_sharding(result.sharding, output)
    present(outputs, result.data, sharding_view, result)
    result.check()


def register_scale_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(app)(shard)
    command(app)(scale)
