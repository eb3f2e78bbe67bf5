"""Options about how a plan is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from trainfit.cli.cluster_options import ClusterFlags
from trainfit.cli.completions import one_of
from trainfit.cli.plain_option import option

Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="Let results be copied to the host's memory and back, instead of being kept or computed again: "
        "on a GPU over its link, beside what it computes.",
    ),
]


@dataclass(frozen=True)
class SolverFlags:
    """How a plan is looked for."""

    panel: ClassVar[str] = "How a plan is found"
    seconds: Annotated[float, option("N", "Stop solving after this long, with the best so far.")] = 30.0
    solver: Annotated[
        str,
        option(
            "NAME",
            "regions: finds what to checkpoint and keep, op by op; the better plans. modules: PyTorch's "
            "formulation, for the units that you name.",
            offered=one_of("regions", "modules"),
        ),
    ] = "regions"
    ac_unit: Annotated[
        list[str] | None,
        option(
            "NAME",
            "With --solver modules: a module that may be checkpointed, such as blocks.0; blocks.* is "
            "all of them. Repeat for more. Default: every module that has modules inside.",
        ),
    ] = None
    fsdp_unit: Annotated[
        list[str] | None,
        option(
            "NAME",
            "With --solver modules: a module that FSDP shards as a unit; nothing around it is "
            "checkpointed. Repeat for more. With --mesh: the units that were captured.",
        ),
    ] = None

    offload: Offload = False

    def divides(self, cluster: ClusterFlags) -> bool:
        """Whether the solver takes a world size itself, and divides a step that is of one process."""
        return self.solver == "modules" and not cluster.captures

    def arguments(self, cluster: ClusterFlags) -> dict[str, Any]:
        """Return them as `api.choose.plan_step` takes them."""
        return {
            "seconds_limit": self.seconds,
            "solver": self.solver,
            "ac_units": self.ac_unit or None,
            "fsdp_units": self.fsdp_unit or (),
            "world_size": (cluster.world_size or 1) if self.divides(cluster) else 1,
            "offload": self.offload,
        }
