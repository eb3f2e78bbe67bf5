"""What was calibrated, by architecture: constants that differ from the general ones, and kinds of operators.

`benchmarks/calibrate.py` prints this table. A constant is here only if one value for all architectures does
not explain the published steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainfit.devices.device_table import Device


@dataclass(frozen=True)
class Calibration:
    """What published steps on devices of one architecture say."""

    constants: dict[str, float] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    """Kinds of operators (`OpCost.kind`) that took a noticeable share of some step that was fitted on."""


CALIBRATIONS: dict[str, Calibration] = {}

ACCESS_SHARES = {
    "streams": "stream_share",
    "strided": "strided_share",
    "transposed": "transposed_share",
    "joined": "joined_share",
    "reductions": "reduction_share",
    "irregular": "irregular_share",
    "lists": "list_share",
}
"""The constant for each way of walking through memory (`operators.access_patterns`)."""
_DECIDING = {
    "products in 16-bit": "in_step_share",
    "products in tf32": "tf32_share",
    "products in float32": "simt_share shared_lanes_share",
    "dense convolutions in 16-bit": "convolution_share",
    "dense convolutions in tf32": "convolution_share",
    "dense convolutions in float32": "plain_convolution_share",
    "grouped convolutions in 16-bit": "grouped_convolution_share",
    "grouped convolutions in tf32": "grouped_convolution_share",
    "grouped convolutions in float32": "plain_convolution_share",
    "depthwise convolutions in 16-bit": "depthwise_cycles",
    "depthwise convolutions in tf32": "depthwise_cycles",
    "depthwise convolutions in float32": "depthwise_cycles",
    "attention in 16-bit": "attention_share",
    "attention in float32": "attention_share",
    **ACCESS_SHARES,
}
"""What decides about a kind: a device file that has such a constant has measured that kind."""


def uncalibrated_kinds(device: Device, kinds: Iterable[str]) -> frozenset[str]:
    """Return which of these kinds nobody has compared with this device.

    Of a device whose steps were fitted on, those that took little time there; of a device file that says
    it is calibrated, those whose constants it does not have; of any other device all.
    """
    present = frozenset(kind for kind in kinds if kind)
    if not device.calibrated:
        return present
    known = CALIBRATIONS.get(device.architecture, Calibration()).kinds
    own = {kind for kind, names in _DECIDING.items() if device.constants.keys() & set(names.split())}
    return present - known - own
