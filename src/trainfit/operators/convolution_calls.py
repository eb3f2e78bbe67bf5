"""Convolutions as libraries see them: which kind, in which layout, and what each pass reads and writes."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, replace
from typing import Literal

from trainfit.operators.matrix_products import Product, is_convolution, products_of
from trainfit.operators.names import aten_name
from trainfit.operators.recorded_calls import RecordedArguments, elements
from trainfit.traces.trace import Signature, TensorSpec

Kind = Literal["dense", "grouped", "depthwise"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One of the products of a convolution: its forward, the gradient of its images, or of its weights."""

    product: Product
    images: tuple[TensorSpec, ...]
    """The two that are as large as the batch: what it reads and what it writes, or both that it reads."""
    of_weights: bool


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call, forward or backward."""

    backward: bool
    kind: Kind
    """`depthwise` if every channel has filters of its own, `grouped` if a few channels have."""
    inputs: int
    outputs: int
    """Channels per group."""
    groups: int
    taps: int
    """The size of a filter: 9 if it is 3 x 3."""
    unit_steps: bool
    """Whether it looks at every position, and at neighbours only: neither strided nor dilated."""
    channels_last: bool
    """Whether the images lie in memory as the fast kernels want them."""
    biased: TensorSpec | None
    """The results that a bias is added to, or, in backward, whose gradients are summed for it."""
    passes: tuple[Pass, ...]

    @property
    def images(self) -> tuple[TensorSpec, ...]:
        """All images that it reads or writes; the passes of backward begin with the same gradient."""
        first, *others = self.passes
        return (*first.images, *(spec for one in others for spec in one.images[1:]))

    def in_rows(self) -> Convolution:
        """Return the same with contiguous images, which is how some libraries want them."""
        passes = [replace(one, images=tuple(map(_made_contiguous, one.images))) for one in self.passes]
        return replace(self, channels_last=False, passes=tuple(passes))

    @property
    def is_winograd(self) -> bool:
        """Whether libraries do it with fewer multiplications: 3 x 3 filters on neighbours, many channels."""
        many = min(self.inputs, self.outputs) >= _WINOGRAD_CHANNELS
        return self.kind == "dense" and self.taps == 9 and self.unit_steps and many


_WINOGRAD_CHANNELS = 16
"""With fewer channels, transforming the images takes longer than is gained."""


def convolution_of(signature: Signature) -> Convolution | None:
    """Return the convolution that a call computes, or None."""
    return _found(signature) if is_convolution(signature) else None


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of a position are neighbours in memory."""
    return spec.shape[1] == 1 or (len(spec.stride) == len(spec.shape) and spec.stride[1] == 1)


def _found(signature: Signature) -> Convolution | None:
    products = products_of(signature)
    call = RecordedArguments(signature)
    backward = "backward" in aten_name(signature.name)
    images, weight = call.tensor(int(backward)), call.tensor(1 + backward)
    if not products or images is None or weight is None:
        return None
    transposed = bool(call.get(6 + backward, "transposed", False))
    groups = int(call.get(8 + backward, "groups", 1))
    steps = (call.get(3 + backward, "stride", [1]), call.get(5 + backward, "dilation", [1]))
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    if transposed:
        inputs, outputs = outputs, inputs
    kind: Kind = "dense" if groups == 1 else "depthwise" if inputs == 1 else "grouped"
    return Convolution(
        backward=backward,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        groups=groups,
        taps=math.prod(weight.shape[2:]),
        unit_steps=all(step == 1 for one in steps for step in (one if isinstance(one, list) else [one])),
        channels_last=_is_image(images) and is_channels_last(images),
        biased=_biased(signature, call, backward),
        passes=_passes(signature, products, images, backward),
    )


def _biased(signature: Signature, call: RecordedArguments, backward: bool) -> TensorSpec | None:
    if backward:
        wanted = call.get(10, "output_mask", [True, True, True])
        return signature.inputs[0] if wanted[2] else None
    return signature.outputs[0] if call.tensor(2, "bias") is not None and signature.outputs else None


def _passes(
    signature: Signature, products: tuple[Product, ...], images: TensorSpec, backward: bool
) -> tuple[Pass, ...]:
    if not backward:
        around = (images, *signature.outputs[:1])
        return (Pass(products[0], tuple(filter(_is_image, around)), of_weights=False),)
    gradient = signature.inputs[0]
    wanted = RecordedArguments(signature).get(10, "output_mask", [True, True, True])
    found: list[Pass] = []
    left = list(products)
    if wanted[0]:
        # The gradient of the images has their shape; a recorded result may be missing.
        result = next((spec for spec in signature.outputs if elements(spec) == elements(images)), images)
        around = (gradient, result)
        found.append(Pass(left.pop(0), tuple(filter(_is_image, around)), of_weights=False))
    if wanted[1]:
        found.append(Pass(left.pop(0), tuple(filter(_is_image, (gradient, images))), of_weights=True))
    return tuple(found)


def _is_image(spec: TensorSpec) -> bool:
    return len(spec.shape) >= 3


def _made_contiguous(spec: TensorSpec) -> TensorSpec:
    lengths = reversed((*spec.shape[1:], 1))
    return replace(spec, stride=tuple(reversed([*itertools.accumulate(lengths, operator.mul)])))
