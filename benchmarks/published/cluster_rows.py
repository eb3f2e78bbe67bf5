"""The published runs on clusters, each captured once: what was measured, on what, and which are fitted on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import trainfit
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import TrainfitError
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace, save_trace

from .cluster_models import build_cluster_row
from .models import CannotExpress

DATA = Path(__file__).with_name("clusters.json")
_NAMES = {
    "a100_40gb": "a100-sxm-40gb",
    "a100_80gb": "a100-sxm-80gb",
    "h100_80gb": "h100-sxm-80gb",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "H100-96GB-HBM2e-GrandTeton": "h100-hbm2e-96gb",
    "H100-SXM5-80GB": "h100-sxm-80gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
}
_NETWORKS = {"a100-sxm-40gb": 25e9, "a100-sxm-80gb": 25e9}
"""Bytes per second and GPU between nodes where it is not what a device usually has: 8 adapters of 200 Gbit/s
in a node of A100s (DGX A100 and the clouds that rent them)."""
GIB = 1 << 30


@dataclass(frozen=True)
class ClusterRow:
    """One published run, and the step that it was measured on."""

    id: str
    device: Device
    cluster: Cluster
    data: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """What is said about the run."""
        found: dict[str, Any] = self.data["config"]
        return found

    @property
    def source(self) -> str:
        """The trainer that it ran in."""
        return str(self.config["framework"]).split()[0].split("/")[0]

    @property
    def scopes(self) -> tuple[str, ...]:
        """Where constants hold that hold for this run: everywhere, on an architecture, with an attention."""
        attention = "triton" if self.source == "llm-foundry" else "sdpa"
        architecture = self.device.architecture
        return "*", architecture, f"{architecture} {attention}", self.device.name

    @property
    def measured_seconds(self) -> float | None:
        """The time of a step, if one was published."""
        found = self.data["measured"].get("step_time_ms")
        return None if found is None else found / 1e3

    @property
    def measured_bytes(self) -> int | None:
        """The memory, mostly what torch's allocator had reserved, if it was published.

        None under FSDP1, too, whose memory is another: captures for GPUs know FSDP2 only, which stands in for
        it as far as seconds go.
        """
        if "FSDP1" in self.config.get("sharding", ""):
            return None
        found = self.data["measured"].get("peak_memory_gib")
        return None if found is None else round(found * GIB)

    @property
    def ran(self) -> bool:
        """Whether the run did not fail."""
        return not self.data["measured"].get("oom_or_crash")

    @property
    def calibrates(self) -> bool:
        """Whether the row may be fitted on; by a hash of its id, so that nobody chose."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0

    @property
    def allocator(self) -> str:
        """How torch's allocator was set."""
        return "expandable" if self.config.get("alloc_conf", "").startswith("expandable") else "default"

    @property
    def tokens(self) -> float:
        """What one GPU trains on in a step."""
        config = self.config
        batches = config["batch_per_gpu"] * config.get("grad_accum", 1)
        return float(batches * config["seq_len"] / config.get("tp", 1) / config.get("cp", 1))


def load_cluster_rows() -> list[ClusterRow]:
    """Read every row."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    return [_row(data) for data in rows]


def _row(data: dict[str, Any]) -> ClusterRow:
    config = data["config"]
    device = find_device(_NAMES[config["gpu"]])
    ranks, tensor = config["n_gpus"], config.get("tp", 1)
    mesh = [("dp", ranks // tensor)] + ([("tp", tensor)] if tensor > 1 else [])
    cluster = Cluster(world_size=ranks, mesh=tuple(mesh), network_bytes_per_second=_NETWORKS.get(device.name))
    return ClusterRow(data["id"], device, cluster, data)


def captured_rows(
    rows: list[ClusterRow], cache: Path, progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[ClusterRow, Trace | str]]:
    """Yield each row with the trace of its first rank, or with the reason why it cannot be expressed."""
    for number, row in enumerate(rows):
        progress(f"{number + 1}/{len(rows)} {row.id}")
        yield row, _capture(row, cache)


def _capture(row: ClusterRow, cache: Path) -> Trace | str:
    step = json.dumps([row.data["model"], row.data["arch"], row.config], sort_keys=True)
    file = cache / f"{row.id}-{hashlib.sha256(step.encode()).hexdigest()[:8]}.json.gz"
    if file.exists():
        # Links are no part of the step: they may have changed since it was captured.
        return replace(load_trace(file), cluster=row.cluster)
    build = build_cluster_row(row.data)

    def step_of_rank(mesh: DeviceMesh) -> trainfit.Step:
        return build(mesh)

    try:
        trace = trainfit.capture(step_of_rank, device=row.device, cluster=row.cluster)
    except (CannotExpress, TrainfitError) as error:
        return str(error)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_trace(trace, file)
    return trace
