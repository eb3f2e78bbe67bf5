"""Which groups of probes there are, and which probes decide which constant of the roofline.

The order counts: a constant that is found is used to find those after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainfit.calibrating import probes
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probes import Probe, ProbeSizes
from trainfit.calibrating.probing import BACKWARD, FORWARD, Key
from trainfit.calibrating.solving import Question
from trainfit.costs.roofline import SHARED_LANES

PHASES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class ProbeGroup:
    """Probes that are measured together, and the constants that they decide."""

    name: str
    share: float
    """Of the time that there is."""
    make: Callable[[ProbeSizes], tuple[Probe, ...]]
    ask: Callable[[tuple[Probe, ...]], tuple[Question, ...]]


def groups_for(instrument: Instrument) -> tuple[ProbeGroup, ...]:
    """Return everything that is measured on a device by probes."""
    rates = tuple(dict.fromkeys(("fp32", instrument.rate_of_steps)))
    return (
        ProbeGroup("memory", 0.2, probes.memory, lambda made: _about_memory()),
        ProbeGroup(
            "matrix products",
            0.2,
            lambda sizes: probes.products(sizes, instrument.rates),
            lambda made: _about_products(made, instrument),
        ),
        ProbeGroup(
            "convolutions", 0.25, lambda sizes: probes.convolutions(sizes, rates), _about_convolutions
        ),
        ProbeGroup(
            "attention",
            0.1,
            lambda sizes: probes.attention(sizes, rates),
            lambda made: _about_attention(made, instrument),
        ),
    )


def _about_memory() -> tuple[Question, ...]:
    kinds = {
        "kernel_seconds": ("tiny",),
        "stream_share": ("copy", "add", "gelu"),
        "reduction_share": ("softmax", "layer_norm", "sum"),
        "strided_share": ("transpose",),
        "irregular_share": ("gather",),
        "list_share": ("list",),
        "cache_gain": ("cached",),
    }
    return tuple(
        Question(constant, tuple((name, phase) for name in names for phase in PHASES))
        for constant, names in kinds.items()
    )


def _about_products(made: tuple[Probe, ...], instrument: Instrument) -> tuple[Question, ...]:
    shared = instrument.device.architecture in SHARED_LANES
    asked = {"shared_lanes_share" if shared else "simt_share": "fp32"}
    if instrument.rate_of_steps != "fp32":
        asked["in_step_share"] = instrument.rate_of_steps
    # The largest says what is possible at best; the others are what steps have.
    return tuple(
        Question(constant, _keys(made, lambda p: p.rate == rate and not p.name.endswith("_large")))  # noqa: B023
        for constant, rate in asked.items()
    )


def _about_convolutions(made: tuple[Probe, ...]) -> tuple[Question, ...]:
    slow = "depthwise_fp32_nhwc"
    return (
        Question("convolution_share", _keys(made, lambda p: p.name.startswith(("plain", "pointwise")))),
        Question("grouped_convolution_share", _keys(made, lambda p: p.name.startswith("grouped"))),
        Question("depthwise_flops", _keys(made, lambda p: p.name.startswith("depthwise") and p.name != slow)),
        Question("depthwise_float32_flops", _keys(made, lambda p: p.name == slow)),
    )


def _about_attention(made: tuple[Probe, ...], instrument: Instrument) -> tuple[Question, ...]:
    """On a GPU the flash kernel runs in 16 bits only; in float32 it is the memory-efficient one."""
    if instrument.kind == "cpu":
        return tuple(
            Question(constant, _keys(made, lambda p: True, (phase,)))
            for constant, phase in (("attention_share", FORWARD), ("attention_backward_share", BACKWARD))
        )
    flash = instrument.rate_of_steps
    return (
        Question("attention_share", _keys(made, lambda p: p.rate == flash, (FORWARD,))),
        Question("attention_backward_share", _keys(made, lambda p: p.rate == flash, (BACKWARD,))),
        Question("efficient_attention_share", _keys(made, lambda p: p.rate == "fp32")),
    )


def _keys(
    made: tuple[Probe, ...], chosen: Callable[[Probe], bool], phases: tuple[str, ...] = PHASES
) -> tuple[Key, ...]:
    return tuple((probe.name, phase) for probe in made if chosen(probe) for phase in phases)
