"""FLOP/s of matrix products and convolutions on a device, by what they run on and how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainfit.costs.tiling import tiled_seconds
from trainfit.devices.architectures import is_amd
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.errors import DeviceError
from trainfit.operators.convolution_calls import Convolution, Pass, is_channels_last
from trainfit.operators.copied_inputs import lies_in_rows
from trainfit.operators.matrix_products import Product
from trainfit.operators.recorded_calls import ITEM_BYTES, nbytes
from trainfit.traces.trace import TensorSpec

SHARED_LANES = ("sm_86", "sm_89", "sm_120")
_ALIGNED_BYTES = 16
"""What tensor cores load at once: rows that begin elsewhere need other kernels."""
_WIDE_GROUP = 32
"""Channels of a group that fill the smallest tile."""
_GROUPS_AT_ONCE = 32
"""Groups that the fast kernels for groups do at once: those of ResNeXt, whose layers have 32 or 64."""
_CORES = {"fp64": "float64", "fp32": "float32", "tf32": "tf32", "bf16": "16-bit", "fp16": "16-bit"}


@dataclass(frozen=True)
class ProductRates:
    """Seconds of products on one device."""

    device: Device
    constants: Constants
    tf32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a device whose speed is not known."""
        needed = ("bandwidth_bytes_per_second", "flops", "sm_count")
        missing = [name for name in needed if not getattr(self.device, name)]
        if missing:
            raise DeviceError(
                f"{self.device.name} has no {' and no '.join(missing)}, so its time cannot be predicted; "
                "add it to a device file of your own."
            )

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second between memory and the chip."""
        assert self.device.bandwidth_bytes_per_second is not None
        return self.device.bandwidth_bytes_per_second

    @cached_property
    def multiprocessors(self) -> int:
        """How many there are."""
        assert self.device.sm_count is not None
        return self.device.sm_count

    def precision(self, dtype: str, kind: str = "matmul") -> str:
        """Return in what products of a dtype are computed: `16-bit`, `tf32`, `float32` and so on."""
        rate = self.device.rate_of(dtype, self.tf32, kind)
        return _CORES.get(rate, rate)

    def flops(self, rate: str) -> float:
        """Return the peak FLOP/s of a rate; a device file need not have all."""
        flops = self.device.flops
        return flops.get(rate) or flops.get("fp32") or max(flops.values())

    def large(self, dtype: str, kind: str = "matmul") -> float:
        """Return the FLOP/s of a product that is large enough to fill the device, in a step."""
        name = self.device.rate_of(dtype, self.tf32, kind)
        if not self.on_tensor_cores(dtype, kind):
            return self.without_tensor_cores(name)
        best = self.device.matmul_share or self.constants.best_share
        rounding = self.constants.tf32_share if name == "tf32" else 1.0
        return self.flops(name) * best * self.constants.in_step_share * rounding

    def without_tensor_cores(self, rate: str = "fp32") -> float:
        """Return the FLOP/s of plain kernels."""
        shared = self.device.architecture in SHARED_LANES
        share = self.constants.shared_lanes_share if shared else self.constants.simt_share
        return self.flops(rate) * share

    def on_tensor_cores(self, dtype: str, kind: str = "matmul") -> bool:
        """Whether products of a dtype run on tensor cores."""
        return self.device.rate_of(dtype, self.tf32, kind) not in ("fp32", "fp64")

    # Products --------------------------------------------------------------------------------------------

    def product(self, product: Product, dtype: str) -> float:
        """Return the seconds of a plain product."""
        rate = self.large(dtype)
        # The summed dimension or the result's rows are what lies in a row of memory, in most layouts.
        if self.on_tensor_cores(dtype) and not _aligned(dtype, product.n, product.k):
            rate *= self.constants.unaligned_share
        tiled = self._tiled(product, rate)
        # A product with a vector would waste most of every tile: plain kernels do it without tensor cores.
        return min(tiled, product.flops / self.without_tensor_cores())

    def _tiled(self, product: Product, rate: float) -> float:
        return tiled_seconds(product, rate, self.multiprocessors, self.constants.tile_fill, self.bandwidth)

    # Convolutions ----------------------------------------------------------------------------------------

    def convolution(self, called: Convolution, dtype: str) -> float:
        """Return the seconds of the products of a convolution, without rewriting its images."""
        called = self._as_given(called)
        if called.kind == "depthwise":
            return sum(self._depthwise(called, one, dtype) for one in called.passes)
        if called.kind == "grouped" and self._without_kernel(called, dtype):
            return self._plain_groups(called)
        rate = self.large(dtype, "convolution") * self._convolution_share(called, dtype)
        seconds = sum(self._tiled(one.product, rate) for one in called.passes)
        if called.kind == "grouped" or not self.on_tensor_cores(dtype, "convolution"):
            return seconds
        flops = sum(one.product.flops for one in called.passes)
        # The libraries have plain kernels too, for images of few channels; for groups they hardly do.
        return min(seconds, flops / self.without_tensor_cores())

    def _convolution_share(self, called: Convolution, dtype: str) -> float:
        """Return the speed of a convolution's products against plain ones."""
        constants = self.constants
        if not self.on_tensor_cores(dtype, "convolution"):
            winograd = constants.winograd_gain if called.is_winograd else 1.0
            return constants.plain_convolution_share * winograd
        if called.kind == "grouped":
            return self._grouped_share(called)
        aligned = _aligned(dtype, called.inputs, called.outputs)
        return constants.convolution_share * (1.0 if aligned else constants.unaligned_share)

    def _grouped_share(self, called: Convolution) -> float:
        """Return the same for groups; several narrow ones are done at once where there are many of them."""
        constants, last = self.constants, called.channels_last
        share = constants.grouped_channels_last_share if last else constants.grouped_convolution_share
        at_once = called.inputs < _WIDE_GROUP and called.groups % _GROUPS_AT_ONCE == 0
        return share * (constants.narrow_groups_gain if at_once else 1.0)

    def _without_kernel(self, called: Convolution, dtype: str) -> bool:
        """Whether tensor cores have no kernel for such groups: with channels last few numbers of them do."""
        odd = called.channels_last and called.groups % _GROUPS_AT_ONCE != 0
        return odd and self.on_tensor_cores(dtype, "convolution")

    def _plain_groups(self, called: Convolution) -> float:
        """Return the seconds of plain kernels, which narrow groups do not fill."""
        share = self.constants.odd_groups_share * min(1.0, called.inputs / _WIDE_GROUP)
        flops = sum(one.product.flops for one in called.passes)
        return flops / (self.without_tensor_cores() * share)

    def _depthwise(self, called: Convolution, one: Pass, dtype: str) -> float:
        """Return the seconds of plain kernels: so many cycles per element, and more for each tap."""
        constants = self.constants
        if dtype == "float32" and called.channels_last:
            rate = self.large(dtype, "convolution")
            return one.product.flops * constants.depthwise_float32_waste / rate
        if called.channels_last:
            each, per_tap = constants.depthwise_last_cycles, constants.depthwise_last_tap_cycles
        else:
            each, per_tap = constants.depthwise_cycles, constants.depthwise_tap_cycles
        cycles = each + per_tap * called.taps
        elements = one.product.flops / (2 * called.taps)
        return elements * cycles / (self.multiprocessors * self.device.clock)

    def rewriting(self, called: Convolution, dtype: str) -> tuple[float, int]:
        """Return the seconds and the kernels of rewriting images for tensor cores.

        They want channels last, and rows of whole vectors. Every pass rewrites for itself, before and after
        its products: nothing of it overlaps with them. What torch copies before that, for a library that
        wants images in rows, comes on top.
        """
        given = self._as_given(called)
        copied = [] if given is called else [spec for spec in called.images if not lies_in_rows(spec)]
        seconds, kernels = self.copying(copied)
        if called.kind == "depthwise" or not self.on_tensor_cores(dtype, "convolution"):
            return seconds, kernels
        rewritten = [
            2 * nbytes(spec)
            for one in given.passes
            for spec in one.images
            if not is_channels_last(spec) or not _aligned(dtype, spec.shape[1])
        ]
        share = self.constants.memory_share * self.constants.rewriting_share
        return seconds + sum(rewritten) / (self.bandwidth * share), kernels + len(rewritten)

    def biasing(self, called: Convolution) -> tuple[float, int]:
        """Return the seconds and the kernels of a bias, which torch adds, or sums the gradient of, by itself.

        Only its own kernel for depthwise filters in rows does both at once.
        """
        if called.biased is None:
            return 0.0, 0
        constants = self.constants
        if called.kind == "depthwise" and not (called.backward or called.channels_last):
            return 0.0, 0
        moved = nbytes(called.biased) * (1 if called.backward else 2)
        share = constants.reduction_share if called.backward else constants.strided_share
        return moved / (self.bandwidth * constants.memory_share * share), 1

    def copying(self, copied: Sequence[TensorSpec]) -> tuple[float, int]:
        """Return the seconds and the kernels of making tensors contiguous that were permuted."""
        share = self.constants.memory_share * self.constants.transposed_share
        moved = sum(2 * nbytes(spec) for spec in copied)
        return moved / (self.bandwidth * share), len(copied)

    def _as_given(self, called: Convolution) -> Convolution:
        """Return a convolution as the library gets it: AMD's wants images in rows."""
        return called.in_rows() if is_amd(self.device.architecture) else called


def _aligned(dtype: str, *lengths: int) -> bool:
    step = _ALIGNED_BYTES // ITEM_BYTES.get(dtype, 1)
    return all(length % step == 0 for length in lengths)
