"""The roofline: what an operator would take on a device from its FLOPs, its bytes and its shape.

An operator takes the longer of computing and moving its bytes, each at the rate that this class of operator
achieves (`constants.py`), and at least a kernel's latency. Matrix products are laid out in tiles
(`tiling.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from trainfit.costs.constants import constants_of
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.costs.tiling import tiled_seconds
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.errors import DeviceError
from trainfit.operators.families import IRREGULAR, REDUCTIONS, takes_lists
from trainfit.operators.fused_attention import FusedAttention, attention_of
from trainfit.operators.matrix_products import Product, is_convolution, products_of
from trainfit.operators.memory_use import COPIES, ONLY_ALLOCATE
from trainfit.operators.names import aten_name
from trainfit.operators.recorded_calls import nbytes
from trainfit.traces.trace import Signature, TensorSpec, Trace

FREE = OpCost(0.0, "assumed", "nothing", kernels=0)

_TENSORS_PER_LAUNCH = 100
"""A foreach kernel takes the addresses of about this many tensors as its arguments."""
SHARED_LANES = ("sm_86", "sm_89", "sm_120")
_NARROW_GROUP = 8
"""Channels per group below which a convolution is not done on tensor cores."""


def roofline_costs(trace: Trace, device: Device, constants: Constants | None = None) -> CostTable:
    """Price every signature of a trace on a device, by formulas, with its constants if none are given."""
    constants = constants or constants_of(device)
    model = Roofline(device, constants, trace.tf32)
    return CostTable(
        device=device,
        host=host_of(constants),
        costs=tuple(model.price(signature) for signature in trace.signatures),
        uncertainty=_uncertainty(device, constants),
    )


def _uncertainty(device: Device, constants: Constants) -> float:
    """Return how far off a step may be: what is known of this device, of its maker's, or of none."""
    if device.calibrated:
        return constants.uncertainty
    nvidia = not device.architecture or device.architecture.startswith("sm_")
    return constants.uncalibrated_uncertainty if nvidia else constants.foreign_uncertainty


def host_of(constants: Constants, runs_kernels: bool = False) -> Host:
    """Return the host that these constants describe: beside a GPU, or a processor that runs all itself."""
    names = {field.name for field in fields(Host)} & {field.name for field in fields(Constants)}
    figures = {name: getattr(constants, name) for name in names - {"cache_bytes"}}
    return Host(runs_kernels=runs_kernels, cache_bytes=int(constants.cache_bytes), **figures)


@dataclass(frozen=True)
class Roofline:
    """Prices signatures on one device."""

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

    def price(self, signature: Signature) -> OpCost:
        """Return what one call costs on the device."""
        if signature.view or signature.name in ONLY_ALLOCATE or signature.work_source == "none":
            return FREE
        moving = self._memory_seconds(signature)
        computing = self._compute_seconds(signature)
        kernels = self._kernels(signature)
        latency = kernels * self.constants.kernel_seconds
        seconds = max(computing, moving) + latency
        bound = "compute" if computing > moving else "memory"
        if latency > max(computing, moving):
            bound = "latency"
        source = "bandwidth" if signature.work_source == "traffic" else "formula"
        return OpCost(seconds, source, bound, kernels)

    # Memory ----------------------------------------------------------------------------------------------

    def _memory_seconds(self, signature: Signature) -> float:
        moved = signature.moved_bytes
        if is_convolution(signature):
            moved += self._layout_bytes(signature)
        share = self._bandwidth_share(signature)
        cache = self.device.cache_bytes or 0
        # What is smaller than the last-level cache is partly still there from the kernel before.
        kept = max(0.0, 1.0 - moved / cache) if cache else 0.0
        gain = 1.0 - kept * (1.0 - 1.0 / self.constants.cache_gain)
        return moved * gain / (self.bandwidth * share)

    def _bandwidth_share(self, signature: Signature) -> float:
        constants, name = self.constants, signature.name
        if takes_lists(name):
            return constants.list_share
        if name in IRREGULAR:
            return constants.irregular_share
        if name in REDUCTIONS:
            return constants.reduction_share
        if name in COPIES and _is_transposed(signature):
            return constants.strided_share
        return constants.stream_share

    def _layout_bytes(self, signature: Signature) -> int:
        """Tensor cores want channels last: other images are rewritten before, and the results after."""
        if not self._on_tensor_cores(signature.inputs[0].dtype, "convolution"):
            return 0
        return sum(2 * nbytes(spec) for spec in _images(signature) if not _channels_last(spec))

    # Computing -------------------------------------------------------------------------------------------

    def _compute_seconds(self, signature: Signature) -> float:
        products = products_of(signature)
        if products:
            return sum(self._product_seconds(signature, product) for product in products)
        attention = attention_of(signature)
        if attention is not None:
            return self._attention_seconds(attention, signature.inputs[0].dtype)
        return signature.flops / self._flops("fp32")

    def _product_seconds(self, signature: Signature, product: Product) -> float:
        constants = self.constants
        convolution = is_convolution(signature)
        if convolution and product.batch > 1 and min(product.m, product.n, product.k) < _NARROW_GROUP:
            return product.flops / self._depthwise_rate(signature)
        rate = self._matmul_rate(signature.inputs[0].dtype, "convolution" if convolution else "matmul")
        if convolution:
            rate *= constants.convolution_share if product.batch == 1 else constants.grouped_convolution_share
        assert self.device.sm_count is not None
        tiled = tiled_seconds(product, rate, self.device.sm_count, constants.tile_fill, self.bandwidth)
        # A product with a vector would waste most of every tile: plain kernels do it without tensor cores.
        return min(tiled, product.flops / self._simt_rate("fp32"))

    def _depthwise_rate(self, signature: Signature) -> float:
        image = signature.inputs[0]
        slow = image.dtype == "float32" and _channels_last(image)
        per_cycle = self.constants.depthwise_float32_flops if slow else self.constants.depthwise_flops
        assert self.device.sm_count is not None
        return per_cycle * self.device.sm_count * self.device.clock

    def _simt_rate(self, rate: str) -> float:
        shared = self.device.architecture in SHARED_LANES
        share = self.constants.shared_lanes_share if shared else self.constants.simt_share
        return self._flops(rate) * share

    def _attention_seconds(self, attention: FusedAttention, dtype: str) -> float:
        constants = self.constants
        rate = self._matmul_rate(dtype, "matmul")
        rate *= constants.attention_backward_share if attention.backward else constants.attention_share
        if attention.kernel == "efficient":
            rate *= constants.efficient_attention_share
        return attention.flops * attention.executed_share / rate

    def _matmul_rate(self, dtype: str, kind: str) -> float:
        name = self.device.rate_of(dtype, self.tf32, kind)
        if not self._on_tensor_cores(dtype, kind):
            return self._simt_rate(name)
        best = self.device.matmul_share or self.constants.best_share
        return self._flops(name) * best * self.constants.in_step_share

    def _on_tensor_cores(self, dtype: str, kind: str) -> bool:
        return self.device.rate_of(dtype, self.tf32, kind) not in ("fp32", "fp64")

    def _flops(self, rate: str) -> float:
        """Return the peak FLOP/s of a rate; a device file need not have all."""
        flops = self.device.flops
        return flops.get(rate) or flops.get("fp32") or max(flops.values())

    def _kernels(self, signature: Signature) -> int:
        if takes_lists(signature.name):
            tensors = max(len(signature.inputs), len(signature.outputs))
            return max(1, tensors // _TENSORS_PER_LAUNCH)
        return _KERNELS.get(aten_name(signature.name), 1)


_KERNELS = {
    "native_layer_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "native_group_norm": 3,
    "native_group_norm_backward": 4,
    "convolution_backward": 2,
    "embedding_dense_backward": 8,
    "index_put_": 8,
    "_index_put_impl_": 8,
    "index_put": 9,
    "sort": 8,
    "topk": 4,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "nonzero": 3,
    "cumsum": 2,
}
"""Operators that launch more than one kernel, and about how many."""


def _images(signature: Signature) -> list[TensorSpec]:
    """Return the images among a convolution's tensors: what is as large as the batch, not the weights."""
    batch = signature.inputs[0].shape[:1]
    return [
        spec
        for spec in (*signature.inputs, *signature.outputs)
        if len(spec.shape) >= 3 and spec.shape[:1] == batch
    ]


def _channels_last(spec: TensorSpec) -> bool:
    return spec.shape[1] == 1 or (len(spec.stride) == len(spec.shape) and spec.stride[1] == 1)


def _is_transposed(signature: Signature) -> bool:
    """Whether some input does not lie in the order in which the result is written."""
    return any(not _dense_in_order(spec) for spec in signature.inputs if len(spec.shape) > 1)


def _dense_in_order(spec: TensorSpec) -> bool:
    """Whether the last dimension of more than one element is the one that is contiguous."""
    inner = [stride for length, stride in zip(spec.shape, spec.stride) if length > 1]
    return not inner or inner[-1] == 1 or inner[-1] == 0
