"""The options of the command line, each once: what it is called, and the help that it has.

Options that belong together are the fields of one object, which a command takes as one parameter
(`cli_running.command`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trainfit.cli import completions
from trainfit.cli.cluster_options import NO_CLUSTER, ClusterFlags
from trainfit.cli.completions import one_of
from trainfit.cli.output_options import OutputFlags as OutputFlags
from trainfit.cli.output_options import StepOutputFlags as StepOutputFlags
from trainfit.cli.plain_option import option

if TYPE_CHECKING:
    from trainfit.api.request import Request
    from trainfit.models.recipe import StepOptions
    from trainfit.plans.compiled_plan import CompiledPlan

_DTYPES = ("fp32", "bf16", "bf16-autocast", "fp16-autocast")
_OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused", "adamw-for-loop", "sgd", "none")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        autocompletion=completions.targets,
        help="file.py:function or package.module:function that returns a trainfit.Step, "
        "hf:DIRECTORY-or-config.json, or a built-in model (gpt2, llama-3-8b, vit-b-16, ...).",
    ),
]
GraphOrTarget = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH.json|TARGET",
        autocompletion=completions.graphs_and_targets,
        help="A graph in the schema that inductor exports, or a TARGET as the other commands take it.",
    ),
]
DeviceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        autocompletion=completions.devices,
        help="Show one device, however its name is written.",
    ),
]
OldResult = Annotated[
    str,
    typer.Argument(
        metavar="OLD",
        autocompletion=completions.json_files,
        help="A result (--json) or a trace (--save-trace) from before.",
    ),
]
NewResult = Annotated[
    str, typer.Argument(metavar="NEW", autocompletion=completions.json_files, help="The same from now.")
]
StepsLookedAt = Annotated[
    int | None,
    option(
        "N",
        "How many runs of the step to look at once it is steady; the one with the largest peak is "
        "reported. Default: one, and 12 where something in Python changes from run to run.",
    ),
]
Costs = Annotated[
    str,
    option(
        "SOURCE",
        "roofline: time from formulas, on any device. measured: run every operator of the step once on "
        "this machine, which has to be the device, and remember the result.",
        offered=one_of("roofline", "measured"),
    ),
]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="With --costs measured: measure again what is remembered.")
]
Budget = Annotated[
    str | None,
    option(
        "SIZE",
        "Memory that torch's allocator may take: 24GiB, 24GB, 80% of the device. Default: what the device "
        "has, less a margin for what is not simulated.",
    ),
]
Output = Annotated[str | None, option("FILE", "Write the plan, to apply it.", "--output", "-o")]
Allocator = Annotated[
    str,
    option(
        "SETTING",
        "How torch's CUDA caching allocator is set: default, expandable (expandable_segments:True), the "
        "text of PYTORCH_ALLOC_CONF, or a file with it. none: count what is asked for.",
        offered=one_of("default", "expandable", "none"),
    ),
]
CalibratedDevice = Annotated[
    str | None,
    option(
        "NAME",
        "cuda (the GPU in this machine), cuda:1 (the second) or cpu. Default: the GPU if there is one, else "
        "cpu.",
        offered=one_of("cpu", "cuda", "cuda:1"),
    ),
]
DeviceOutput = Annotated[
    str | None,
    option("FILE", "Write the device file, for --device of the other commands.", "--output", "-o"),
]
Minutes = Annotated[
    float,
    option(
        "N",
        "How long to measure, about. What the host takes is measured besides, for a minute or less.",
    ),
]
SaveTrace = Annotated[str | None, option("FILE", "Write the captured trace for later use.")]
GraphKind = Annotated[
    str,
    option(
        "KIND",
        "What a TARGET's graph is. joint: forward and backward as a compiler sees them. "
        "eager: the captured step as it runs without one.",
        offered=one_of("joint", "eager"),
    ),
]
Points = Annotated[int, option("N", "How many budgets to solve for.")]
OrderSeconds = Annotated[
    float | None,
    option(
        "N",
        "Search on until the order is proved optimal or this time is over. "
        "Default: a fixed effort, the same on every machine.",
    ),
]


DeviceName = Annotated[
    str | None,
    option(
        "NAME",
        "A name that `trainfit devices` lists, a JSON file of your own, cpu (this machine) or cuda "
        "(the GPU in it). Default: the GPU if there is one, else cpu.",
        offered=completions.devices,
    ),
]


@dataclass(frozen=True)
class StepFlags:
    """What can be asked of a step."""

    panel: ClassVar[str] = "The step"
    batch: Annotated[int | None, option("N", "Samples per step.")] = None
    seq: Annotated[int | None, option("N", "Tokens per sample.")] = None
    image_size: Annotated[int | None, option("N", "Side of a square image in pixels.")] = None
    dtype: Annotated[
        str | None,
        option("NAME", "fp32, bf16, bf16-autocast or fp16-autocast.", offered=one_of(*_DTYPES)),
    ] = None
    optimizer: Annotated[
        str | None,
        option(
            "NAME",
            "adamw, adamw-foreach, adamw-fused, adamw-for-loop, sgd or none.",
            offered=one_of(*_OPTIMIZERS),
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Any parameter of your own function, any setting of a built-in model (layers=4) or field of "
            "an hf: config (hidden_size=1024). Repeat for more.",
        ),
    ] = None
    task: Annotated[
        str | None,
        option("NAME", "What an hf: model is trained for, e.g. causal-lm. Default: what its config says."),
    ] = None

    def options(self) -> StepOptions:
        """Return what was asked of the step; its own checks say what is wrong with it."""
        from trainfit.models.recipe import StepOptions
        from trainfit.targets.given_values import read_assignments

        asked: dict[str, Any] = {**vars(self), "set": read_assignments(self.set or ())}
        del asked["task"]
        return StepOptions(**asked)

    def request(self, target: str, device: str | None, *rest: Any) -> Request:
        """Return the step on the device that was named, or on that of this machine.

        The rest are further arguments of `Request`, which checks them.
        """
        from trainfit.api.request import Request, default_device

        return Request(target, device or default_device(), self.options(), self.task, *rest)


NO_STEP_FLAGS = StepFlags()


@dataclass(frozen=True)
class RequestFlags:
    """A step on a device, and where its times come from."""

    panel: ClassVar[str] = "The device, and how it is asked about"
    device: DeviceName = None
    step: StepFlags = StepFlags()
    steps: StepsLookedAt = None
    costs: Costs = "roofline"
    refresh: Refresh = False
    allocator: Allocator = "default"
    cluster: ClusterFlags = NO_CLUSTER

    def request(self, target: str, of_cluster: bool = True) -> Request:
        """Return the request that the API takes; for a step of one process, unless `of_cluster`."""
        cluster = self.cluster.cluster() if of_cluster else (None, False)
        rest = (self.steps, self.costs, self.refresh, self.allocator, *cluster)
        return self.step.request(target, self.device, *rest)


@dataclass(frozen=True)
class VerifyFlags:
    """A step that is run for real on this machine, and how."""

    panel: ClassVar[str] = "The run"
    step: StepFlags = StepFlags()
    steps: StepsLookedAt = None
    plan: Annotated[str | None, option("FILE", "Run the step with this plan, and without it.")] = None
    way: Annotated[
        str | None, option("FILE", "Run the step with this way, which fit -o wrote, and without it.")
    ] = None
    budget: Annotated[
        str | None, option("SIZE", "With --compile: plan for this much memory, and run that plan.")
    ] = None
    costs: Costs = "measured"
    refresh: Refresh = False
    force: Annotated[
        bool, typer.Option("--force", help="Run even if this machine's memory may not suffice.")
    ] = False
    eager: Annotated[
        bool, typer.Option("--eager", help="Run what the step compiles without the compiler.")
    ] = False
    runs: Annotated[int | None, option("N", "Time at most N steps. Default: 10.")] = None
    mesh: Annotated[
        str | None,
        option(
            "DIM=N,...",
            "Under torchrun: how its processes share a built-in or hf: model, as estimate takes it, and what "
            "a parameter mesh of your function gets.",
        ),
    ] = None

    def compiled_plan(self) -> CompiledPlan | None:
        """Return the plan for torch.compile that is named, if one is."""
        from trainfit.plans.compiled_plan import CompiledPlan
        from trainfit.plans.plan_store import load_plan

        if self.plan is None or self.way is not None or "{rank}" in self.plan:
            return None
        plan = load_plan(self.plan)
        return plan if isinstance(plan, CompiledPlan) else None

    def request(self, target: str, costs: str | None = None) -> Request:
        """Return the request that the API takes."""
        cluster = ClusterFlags(mesh=self.mesh).cluster()
        rest = (self.steps, costs or self.costs, self.refresh, "default", *cluster)
        return self.step.request(target, None, *rest)

    def arguments(self) -> dict[str, Any]:
        """Return the rest as `api.prove.verify_step` takes it."""
        return {
            "plan": self.plan,
            "way": self.way,
            "force": self.force,
            "eager": self.eager,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class GrowthFlags:
    """What may grow by how much, and where traces are to run."""

    panel: ClassVar[str] = "What may grow"
    max_peak: Annotated[
        str | None, option("PERCENT", "Exit with 4 if the peak grew by more than this, as in 2%.")
    ] = None
    max_time: Annotated[
        str | None, option("PERCENT", "Exit with 4 if the step's time grew by more than this.")
    ] = None
    device: Annotated[
        str | None,
        option(
            "NAME",
            "For two traces: compare the step's time on this device, too. Default: memory only.",
            offered=completions.devices,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return them as `trainfit.diff` takes them."""
        return {"max_peak": self.max_peak, "max_time": self.max_time, "device": self.device}
