"""The options that say which rank of which cluster a step is; what they mean is read by `cluster_text`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainfit.cli.plain_option import option

if TYPE_CHECKING:
    from trainfit.traces.ranks import Cluster


@dataclass(frozen=True)
class ClusterFlags:
    """One process of several, which train together."""

    panel: ClassVar[str] = "One process of several"
    world_size: Annotated[
        int | None,
        option(
            "N",
            "Predict one of N processes that train together. Your function runs as under torchrun: RANK and "
            "WORLD_SIZE are set, and init_process_group, fully_shard, DDP and their like work, in this one "
            "process. With --solver modules, and without --mesh: processes that parameters, gradients and "
            "optimizer state are merely divided among.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        option(
            "DIM=N,...",
            "How the processes share the work, the last dimension within a node: dp=8,tp=4 is 32 processes. "
            "Built-in and hf: models know dp or fsdp (FSDP2), replicate (DDP; with fsdp HSDP), tp (tensor "
            "parallel) and pp (pipeline). A parameter mesh of your function gets the DeviceMesh, with names "
            "of your own. --batch is for each copy of the model.",
        ),
    ] = None
    rank: Annotated[
        str | None,
        option(
            "R|worst",
            "Which process, from 0 on. worst: look at every one that can differ (stages of a pipeline, the "
            "first and the last part of what is divided), and show the one that needs the most. Default: 0.",
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, option("N", "Processes per node, which NVLink connects. Default: 8.")
    ] = None
    network: Annotated[
        str | None,
        option(
            "SPEED",
            "What each GPU gets of the network between nodes: 50GB/s, or 400Gbit/s. Default: 50GB/s, one "
            "400 Gbit/s adapter per GPU.",
        ),
    ] = None

    def cluster(self) -> tuple[Cluster | None, bool]:
        """Return the cluster, if there is one, and whether its worst rank is asked for."""
        from trainfit.devices.cluster_text import read_cluster

        return read_cluster(self.world_size, self.rank, self.gpus_per_node, self.mesh, self.network)

    @property
    def captures(self) -> bool:
        """Whether more than a world size is said, so that the solver `modules` gets a captured rank."""
        return any(getattr(self, one.name) is not None for one in fields(self) if one.name != "world_size")


NO_CLUSTER = ClusterFlags()
