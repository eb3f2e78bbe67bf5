"""One capture for all devices on which a step does the same, instead of one for each.

Kernels that depend on the GPU's architecture are chosen while a step is captured (`capturing/retarget`), and
a step may ask what it runs on. Both are known afterwards: what was captured for one device is used for
another if neither would make a difference there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainfit.api.request import Build, Request
from trainfit.capturing.asked_device import Question, questions_asked
from trainfit.capturing.metadata import MetadataOracle
from trainfit.devices.architectures import same_attention
from trainfit.devices.device_table import Device
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class _Captured:
    trace: Trace
    device: Device
    asked: frozenset[Question]

    def holds_for(self, device: Device) -> bool:
        """Whether a capture for the other device would record the same."""
        if device.kind != self.device.kind:
            return False
        if device == self.device or device.kind == "cpu":
            return True
        if "device" in self.asked:
            return False
        if "architecture" in self.asked:
            return device.architecture == self.device.architecture
        return not self.trace.architecture or same_attention(device.architecture, self.device.architecture)


@dataclass
class SharedCaptures:
    """Traces of one step, by the devices for which they hold."""

    target: str | Build | Trace
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `Request` that say which step is captured."""
    oracles: dict[str, MetadataOracle] = field(default_factory=dict)
    """By device: what is known of its operators, for several steps to have in common."""
    _found: list[_Captured] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How often the step was captured."""
        return len(self._found)

    def request(self, device: Device, **how: Any) -> Request:
        """Return a request for a device, whose trace is there already.

        `how` are further arguments of `Request` that do not change what is captured, such as `allocator`.
        """
        if isinstance(self.target, Trace):
            return Request(self.target, device, **self.arguments, **how)
        known = next((one for one in self._found if one.holds_for(device)), None)
        if known is None:
            request = Request(self.target, device, **self.arguments, **how)
            oracle = self.oracles.setdefault(device.name, MetadataOracle(device.kind))
            with questions_asked() as asked:
                trace = request.trace(oracle=oracle)
            known = _Captured(trace, device, frozenset(asked))
            self._found.append(known)
        # The trace says which rank of which cluster it is.
        return Request(known.trace, device, **how)
