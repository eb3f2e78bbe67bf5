"""Copies of a region's results to the host's memory and back: how fast they are, and what they run beside.

On a GPU the link to the host works beside the kernels. What a region hands over is copied while the call that
follows it computes, and its memory is free when that call ends; it is brought back while that call's backward
runs. So copies of one region have a window of their own, and never wait for those of another: what does not
get done in the window is what the step waits for. On a CPU, whose memory is copied by the processor itself,
nothing overlaps: results are copied when the region ends, and brought back when its backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainfit.costs.host_link import LINK_KIND, link_seconds
from trainfit.costs.table import CostTable, OpCost
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.planning.edits import SEGMENT_END, Moment
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.regions import RegionGraph
from trainfit.traces.trace import COMPUTE, Signature, TensorSpec, Trace

TO_HOST, FROM_HOST = "copies to the host", "copies from the host"
"""Queues: a link carries both directions at once."""
_COPY = "aten.copy_.default"
_LARGE = 1 << 40


@dataclass(frozen=True)
class HostLink:
    """How fast results get to the host's memory, or back."""

    bytes_per_second: float
    latency: float
    """Of one copy, however small."""
    overlaps: bool
    """Whether copies run beside what the device computes."""

    @classmethod
    def of(cls, device: Device) -> HostLink:
        """Return the link of a device; refuses one whose link is not known."""
        if device.kind == "cpu":
            if device.bandwidth_bytes_per_second is None:
                raise OptionError(f"{device.name} has no memory bandwidth, so what copies take is not known.")
            return cls(device.bandwidth_bytes_per_second / 2, 0.0, overlaps=False)
        if device.pcie_bytes_per_second is None:
            raise OptionError(
                f"offloading needs the rate of the link to the host, and {device.name} has none: give "
                "pcie_bytes_per_second in a device file."
            )
        latency = link_seconds(device, 0)
        return cls(_LARGE / (link_seconds(device, _LARGE) - latency), latency, overlaps=True)

    def seconds(self, size: int) -> float:
        """Return what one copy takes."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True)
class CopyWindow:
    """What the copies of one region run beside."""

    call: int
    """The call in whose forward and backward they run; -1 if they do not overlap with anything."""
    freed: int
    """Before which op the device's memory is free, if that is not at once."""
    fetched: int
    """Before which op of backward it is taken again."""
    out_seconds: float = 0.0
    back_seconds: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside something."""
        return self.call >= 0

    @property
    def narrowest(self) -> float:
        """The seconds that copies may take in either direction."""
        return min(self.out_seconds, self.back_seconds)


@dataclass(frozen=True)
class HostCopies:
    """The results of one region that are in the host's memory between its forward and its backward."""

    storages: tuple[int, ...]
    window: CopyWindow
    link: HostLink

    @property
    def freed(self) -> Moment:
        """When the device's memory is free: at once, after the copies, or when the call beside them ends."""
        return Moment(self.window.freed, -1 if self.window.overlaps else SEGMENT_END)

    @property
    def queues(self) -> tuple[str, str]:
        """Where the copies run, out and back."""
        return (TO_HOST, FROM_HOST) if self.window.overlaps else (COMPUTE, COMPUTE)


@dataclass(frozen=True)
class Offloading:
    """What offloading can use: the link, and which calls follow which."""

    trace: Trace
    link: HostLink
    seconds: Sequence[float]
    """Of each op."""

    def window(self, region: RegionGraph) -> CopyWindow | None:
        """Return where copies of a region run; None if there is no place for them."""
        if len(region.calls) > 1 or region.first_unpack <= region.end:
            return None
        if not self.link.overlaps:
            return CopyWindow(-1, region.end, region.first_unpack)
        call = self._following(region)
        if call is None:
            return None
        beside = self.trace.calls[call]
        return self._beside(region, call, beside.body.stop, beside.backward_start)

    def _beside(self, region: RegionGraph, call: int, freed: int, fetched: int) -> CopyWindow:
        out, back = sum(self.seconds[region.end : freed]), sum(self.seconds[fetched : region.first_unpack])
        return CopyWindow(call, freed, fetched, out, back)

    def _following(self, region: RegionGraph) -> int | None:
        """Return the call after a region whose backward is over before the region's begins.

        Of those that begin first, the one that lies as deep as the region does; else the outermost.
        """
        trace = self.trace
        found = [
            number
            for number in candidate_calls(trace)
            if trace.calls[number].body.start >= region.end
            and trace.calls[number].body.stop <= trace.calls[number].backward_start
            and trace.calls[number].backward_start < region.first_unpack
        ]
        first = min((trace.calls[number].body.start for number in found), default=-1)
        found = [number for number in found if trace.calls[number].body.start == first]
        depth = trace.module_name(region.module).count(".")
        alike = (n for n in found if trace.module_name(trace.calls[n].module).count(".") == depth)
        return next(alike, found[0] if found else None)

    def exposed_seconds(self, window: CopyWindow, sizes: Sequence[int]) -> float:
        """Return how long a step waits for copies of these sizes."""
        copying = sum(map(self.link.seconds, sizes))
        return max(copying - window.out_seconds, 0.0) + max(copying - window.back_seconds, 0.0)


def copy_signature(size: int) -> Signature:
    """Return the call that copies so many bytes."""
    spec = TensorSpec("uint8", (size,), (1,))
    return Signature(_COPY, (spec,), (spec,), "", False, False, False, moved_bytes=2 * size, over_link=True)


def priced_copies(costs: CostTable, copies: Sequence[HostCopies], sizes: Sequence[int]) -> CostTable:
    """Return prices of a trace to which signatures of copies of these sizes were appended."""
    if not sizes:
        return costs
    link = copies[0].link
    bound, kind = ("link", LINK_KIND) if link.overlaps else ("memory", "")
    added = [OpCost(link.seconds(size), "formula", bound, kind=kind) for size in sizes]
    return replace(costs, costs=(*costs.costs, *added))
