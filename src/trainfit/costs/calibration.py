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


def _in_half(*kinds: str) -> frozenset[str]:
    return frozenset(f"{kind} in 16-bit" for kind in kinds)


_CONVOLUTIONS = ("dense convolutions", "grouped convolutions", "depthwise convolutions")
_USUAL = frozenset({"streams", "strided", "reductions"})

CALIBRATIONS: dict[str, Calibration] = {
    # MPTs on A100s: products, attention, and what FSDP does not hide (`benchmarks/cluster_published.py`).
    "sm_80": Calibration(
        constants={"in_step_share": 0.808, "uncertainty": 0.07},
        kinds=_USUAL | {"communication"} | _in_half("products", "attention"),
    ),
    # Image models of timm on an RTX 3090.
    "sm_86": Calibration(
        constants={"uncertainty": 0.11},
        kinds=_USUAL | {"transposed", "joined"} | _in_half("products", *_CONVOLUTIONS),
    ),
    # BERT, T5, Reformer, Whisper, ResNet, ConvNeXt and RegNet on an L40S.
    "sm_89": Calibration(
        constants={"uncertainty": 0.15},
        kinds=_USUAL
        | {"transposed", "joined", "irregular", "lists", "products in tf32", "products in float32"}
        | {"attention in tf32", "attention in float32"}
        | {"depthwise convolutions in tf32", "depthwise convolutions in float32"}
        | _in_half("products", "attention", *_CONVOLUTIONS),
    ),
    # BERT, ConvNeXt and RegNet on an H100 and an H200; Llamas and MPTs on clusters of H100s, on which the
    # speed of products and attention in 16 bits is fitted (`benchmarks/cluster_published.py`). What is
    # relative to it, of TF32 and of convolutions, was turned over so that their own speed stays.
    "sm_90": Calibration(
        constants={
            "tf32_share": 0.659,
            "in_step_share": 0.68,
            "tile_fill": 75.6,
            "convolution_share": 0.558,
            "attention_share": 0.89,
            "attention_backward_share": 0.678,
        },
        kinds=_USUAL
        | {
            "communication",
            "lists",
            "products in tf32",
            "attention in tf32",
            "depthwise convolutions in tf32",
        }
        | _in_half("products", "attention", *_CONVOLUTIONS),
    ),
    # BERT, ConvNeXt and RegNet on an MI325X.
    "gfx942": Calibration(
        constants={
            "in_step_share": 0.33,
            "simt_share": 0.406,
            "convolution_share": 1.5,
            "grouped_convolution_share": 0.929,
            "depthwise_tap_cycles": 0.61,
            "memory_share": 0.35,
            "kernel_seconds": 5.8e-6,
            "uncertainty": 0.3,
        },
        kinds=_USUAL
        | {"lists", "products in float32", "attention in float32", "depthwise convolutions in float32"}
        | _in_half("products", "attention", *_CONVOLUTIONS),
    ),
}

NEAREST = {
    "sm_70": "sm_80",
    "sm_100": "sm_90",
    "sm_103": "sm_90",
    "gfx908": "gfx942",
    "gfx90a": "gfx942",
    "gfx950": "gfx942",
}
"""Architectures that nobody has compared, and the one whose constants they are priced with: chips of data
centers get less of their datasheet in a step than graphics cards, and AMD's less than NVIDIA's."""

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
    "attention in tf32": "attention_share",
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
