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
from trainfit.costs.product_rates import SHARED_LANES

PHASES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class ProbeGroup:
    """Probes that are measured together, and the constants that they decide."""

    name: str
    share: float
    """Of the time that there is."""
    make: Callable[[ProbeSizes], tuple[Probe, ...]]
    ask: Callable[[tuple[Probe, ...]], tuple[Question, ...]]
    tf32: bool = False
    """Whether products of float32 are rounded to TF32 meanwhile."""


def groups_for(instrument: Instrument) -> tuple[ProbeGroup, ...]:
    """Return everything that is measured on a device by probes."""
    rates = tuple(dict.fromkeys(("fp32", instrument.rate_of_steps)))
    exact = tuple(rate for rate in instrument.rates if rate != "tf32")
    groups = [
        ProbeGroup("memory", 0.2, probes.memory, lambda made: _about_memory()),
        ProbeGroup(
            "matrix products",
            0.15,
            lambda sizes: probes.products(sizes, exact),
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
    ]
    if "tf32" in instrument.rates:
        rounded = ProbeGroup(
            "products in TF32",
            0.05,
            lambda sizes: probes.products(sizes, ("tf32",)),
            lambda made: (Question("tf32_share", _keys(made, _is_medium)),),
            tf32=True,
        )
        groups.insert(2, rounded)
    return tuple(groups)


def _about_memory() -> tuple[Question, ...]:
    kinds = {
        "kernel_seconds": ("tiny",),
        "stream_share": ("copy", "add", "gelu"),
        "reduction_share": ("softmax", "layer_norm", "sum"),
        "strided_share": ("broadcast", "cast"),
        "transposed_share": ("transpose",),
        "joined_share": ("join",),
        "irregular_share": ("gather",),
        "list_share": ("list",),
        "cache_gain": ("cached",),
    }
    return tuple(
        Question(constant, tuple((name, phase) for name in names for phase in PHASES))
        for constant, names in kinds.items()
    )


def _is_medium(probe: Probe) -> bool:
    """Whether a product is of a shape that steps have: the largest shows what is possible at best."""
    return not probe.name.endswith(("_large", "_odd"))


def _about_products(made: tuple[Probe, ...], instrument: Instrument) -> tuple[Question, ...]:
    shared = instrument.device.architecture in SHARED_LANES
    plain = "shared_lanes_share" if shared else "simt_share"
    found = [Question(plain, _keys(made, lambda p: p.rate == "fp32" and not p.name.endswith("_large")))]
    mixed = instrument.rate_of_steps
    if mixed != "fp32":
        found.append(Question("in_step_share", _keys(made, lambda p: p.rate == mixed and _is_medium(p))))
        found.append(Question("unaligned_share", _keys(made, lambda p: p.name == f"{mixed}_odd")))
    return tuple(found)


_ROUNDS_OF_TWO = 6
"""Two constants that the same probes depend on are looked for in turn, this often."""


def _about_convolutions(made: tuple[Probe, ...]) -> tuple[Question, ...]:
    """Ask for what tensor cores do and what plain kernels do: each probe counts where it is one of them."""

    def question(constant: str, *kinds: str, layout: str = "", without: str = "-") -> Question:
        return Question(
            constant,
            _keys(
                made,
                lambda p: p.name.startswith(kinds) and p.name.endswith(layout) and without not in p.name,
            ),
        )

    slow = "fp32_nhwc"
    first = (
        question("depthwise_cycles", "depthwise_small", layout="nchw"),
        question("depthwise_tap_cycles", "depthwise_large", layout="nchw"),
    )
    last = (
        question("depthwise_last_cycles", "depthwise_small", layout="nhwc", without=slow),
        question("depthwise_last_tap_cycles", "depthwise_large", layout="nhwc", without=slow),
    )
    return (
        question("convolution_share", "plain", "pointwise", layout="nhwc"),
        question("rewriting_share", "plain", "pointwise", layout="nchw"),
        question("plain_convolution_share", "pointwise"),
        question("winograd_gain", "plain"),
        question("grouped_convolution_share", "grouped_wide", layout="nchw"),
        question("grouped_channels_last_share", "grouped_wide", layout="nhwc"),
        question("narrow_groups_gain", "grouped_narrow"),
        question("odd_groups_share", "grouped_odd", layout="nhwc"),
        *(first * _ROUNDS_OF_TWO),
        *(last * _ROUNDS_OF_TWO),
        question("depthwise_float32_waste", "depthwise", layout=slow),
    )


def _about_attention(made: tuple[Probe, ...], instrument: Instrument) -> tuple[Question, ...]:
    """On a GPU the flash kernel runs in 16 bits only; in float32 it is the memory-efficient one.

    On a CPU the flash kernel runs in any dtype, and float32 decides: most steps there are in it.
    """
    flash = "fp32" if instrument.kind == "cpu" else instrument.rate_of_steps
    found = (
        Question("attention_share", _keys(made, lambda p: p.rate == flash, (FORWARD,))),
        Question("attention_backward_share", _keys(made, lambda p: p.rate == flash, (BACKWARD,))),
    )
    efficient = Question("efficient_attention_share", _keys(made, lambda p: p.rate == "fp32"))
    return found if instrument.kind == "cpu" else (*found, efficient)


def _keys(
    made: tuple[Probe, ...], chosen: Callable[[Probe], bool], phases: tuple[str, ...] = PHASES
) -> tuple[Key, ...]:
    return tuple((probe.name, phase) for probe in made if chosen(probe) for phase in phases)
