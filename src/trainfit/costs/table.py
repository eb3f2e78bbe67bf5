"""`CostTable`: what each distinct operator of a trace costs on a device, and where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.devices.device_table import Device


@dataclass(frozen=True, slots=True)
class OpCost:
    """One call of a distinct operator: seconds on the device, besides what the host needs to issue it."""

    seconds: float
    source: str
    """`measured` on this machine; `formula`: FLOPs and bytes are known; `bandwidth`: no formula, priced by
    its traffic; `assumed`: free because nothing runs (views, uninitialised memory)."""
    bound: str = "nothing"
    """What limits its speed on the device: `compute`, `memory`, `latency`, `network` (links between GPUs),
    `link` (to the host) or `nothing`."""
    kernels: int = 1
    """How many kernels it launches; 0 for views and uninitialised memory."""
    kind: str = ""
    """What it is as far as speed goes: `products in tf32`, `grouped convolutions in 16-bit`, `streams`."""
    node_seconds: float = 0.0
    """Of a collective: how long it keeps the GPU's link to its node busy, at full speed."""
    network_seconds: float = 0.0
    """The same for its part of the network between nodes."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that the host spends per call, besides the kernels.

    `runs_kernels` says whether the host runs them itself (a CPU: everything is one queue) or hands them to a
    device that works in parallel (a GPU: two queues).
    """

    runs_kernels: bool
    forward_op: float
    """Python, the dispatcher and autograd's bookkeeping for one operator of the forward."""
    backward_op: float
    """The engine's share for one operator of the backward; no Python."""
    optimizer_op: float
    view_op: float
    module_call: float
    """Entering and leaving a module's `forward`."""
    tensor: float
    """For each further tensor of an operator that takes a list of them (foreach and fused optimizers)."""
    region_call: float = 0.0
    """Running a region that follows a plan: entering and leaving it, in forward and again in backward."""
    region_op: float = 0.0
    """The same for each op in it, views too: the executor follows the plan, and answers in backward."""
    checkpoint_call: float = 0.0
    """Running a region that `torch.utils.checkpoint` alone recomputes as a whole."""
    checkpoint_op: float = 0.0
    """The same for each op in it, besides running it again: what autograd saves is dropped, and found again
    in backward."""
    wrapped_op: float = 0.0
    """An operator on distributed tensors (DTensor), besides the local ones that come of it."""
    conversion: float = 0.0
    """Making a distributed tensor of a local one, the other way round, or dividing it anew."""
    unit_op: float = 0.0
    """Each op by which a unit of FSDP gathers parameters or reduces gradients, besides what others take."""
    rank_reload: float = 0.0
    """On a CPU: each of these three takes so much longer where operators fill the core's cache."""
    launch: float = 0.0
    """From the host's call to the start of the kernel on an idle device."""
    reload: float = 0.0
    """On a CPU: bringing Python's own data and code back after an operator has filled the core's cache."""
    cache_bytes: int = 0
    """On a CPU: the size of that cache."""


@dataclass(frozen=True)
class CostTable:
    """Seconds for every signature of one trace on one device."""

    device: Device
    host: Host
    costs: tuple[OpCost, ...]
    """One per signature of the trace, in its order."""
    uncertainty: float
    """Relative, of what is calibrated: four of five steps are between `seconds / (1 + u)` and `seconds * (1 +
    u)`."""
    warnings: tuple[str, ...] = ()
    """What went wrong on the way without making the figures wrong."""
    uncalibrated_uncertainty: float = 0.0
    """The same for the kinds in `uncalibrated`."""
    uncalibrated: frozenset[str] = frozenset()
    """Kinds of operators whose figures were never compared with the device."""
    host_uncertainty: float | None = None
    """The same for the part of a step in which the device waits for a host that nobody has measured."""
    taken_share: float = 0.0
    """What the kernel of a collective takes of the device from what is computed beside it."""

    def __repr__(self) -> str:
        """One line: there is a cost for every distinct operator."""
        return f"<CostTable of {len(self.costs)} operators on {self.device.name}>"
