"""The roofline: what an operator would take on a device from its FLOPs, its bytes and its shape.

An operator takes the longer of computing and moving its bytes, each at the rate that this class of operator
achieves (`efficiency.py`), and at least a kernel's latency. What it does before and after that, such as
rewriting images, is added. Matrix products are laid out in tiles (`tiling.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from trainfit.costs.calibration import ACCESS_SHARES, uncalibrated_kinds
from trainfit.costs.collective_costs import Links, collective_cost
from trainfit.costs.constants import constants_of, uncalibrated_width
from trainfit.costs.host_link import link_cost
from trainfit.costs.measured_exchanges import measured_exchange
from trainfit.costs.product_rates import ProductRates
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.operators.access_patterns import Access
from trainfit.operators.call_contents import CallContents, contents_of
from trainfit.operators.families import takes_lists
from trainfit.operators.fused_attention import FusedAttention
from trainfit.operators.memory_use import ONLY_ALLOCATE
from trainfit.operators.names import aten_name
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Signature, Trace

FREE = OpCost(0.0, "assumed", "nothing", kernels=0)

_TENSORS_PER_LAUNCH = 100
"""A foreach kernel takes the addresses of about this many tensors as its arguments."""


def roofline_costs(trace: Trace, device: Device, constants: Constants | None = None) -> CostTable:
    """Price every signature of a trace on a device, by formulas, with its constants if none are given."""
    constants = constants or constants_of(device)
    links = Links.of(device, trace.cluster, constants)
    model = Roofline(device, constants, trace.tf32, links, trace.cluster)
    costs = tuple(model.price(signature) for signature in trace.signatures)
    return CostTable(
        device=device,
        host=host_of(constants),
        costs=costs,
        uncertainty=constants.uncertainty,
        uncalibrated_uncertainty=uncalibrated_width(device, constants),
        uncalibrated=uncalibrated_kinds(device, {cost.kind for cost in costs}),
        host_uncertainty=constants.host_uncertainty,
        taken_share=constants.taken_share if device.kind == "cuda" else 0.0,
    )


def host_of(constants: Constants, runs_kernels: bool = False) -> Host:
    """Return the host that these constants describe: beside a GPU, or a processor that runs all itself."""
    names = {field.name for field in fields(Host)} & {field.name for field in fields(Constants)}
    names -= {"launch", "cache_bytes"}
    seconds = {name: getattr(constants, name) * constants.host_factor for name in names}
    return Host(runs_kernels, launch=constants.launch, cache_bytes=int(constants.cache_bytes), **seconds)


@dataclass(frozen=True)
class Roofline:
    """Prices signatures on one device."""

    device: Device
    constants: Constants
    tf32: tuple[str, ...] = ()
    links: Links | None = None
    """What connects the GPUs of the cluster; without it collectives are priced by their traffic."""
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """Refuse a device whose speed is not known."""
        assert self.rates

    @cached_property
    def rates(self) -> ProductRates:
        """The speed of products."""
        return ProductRates(self.device, self.constants, self.tf32)

    def price(self, signature: Signature) -> OpCost:
        """Return what one call costs on the device."""
        measured = measured_exchange(signature, self.device)
        if measured is not None:
            return measured
        if self.links is not None and self.device.kind == "cuda":
            exchanged = collective_cost(signature, self.links, self.cluster)
            if exchanged is not None:
                return exchanged
        if signature.view or signature.name in ONLY_ALLOCATE or signature.work_source == "none":
            return FREE
        if signature.over_link:
            return link_cost(signature, self.device)
        return self.price_contents(signature, contents_of(signature))

    def price_contents(self, signature: Signature, contents: CallContents) -> OpCost:
        """Return what a call costs that runs a kernel, by what is known to be inside."""
        computing, kind, rewriting, kernels = self._computing(signature, contents)
        copying, copies = self.rates.copying(contents.copied)
        moving = self._memory_seconds(signature, contents.access)
        kernels += copies + self._kernels(signature)
        latency = kernels * self.constants.kernel_seconds
        seconds = max(computing, moving) + rewriting + copying
        bound = "compute" if computing > moving else "memory"
        if latency > seconds:
            bound = "latency"
        source = "bandwidth" if signature.work_source == "traffic" else "formula"
        return OpCost(seconds + latency, source, bound, kernels, kind)

    def _memory_seconds(self, signature: Signature, access: Access) -> float:
        moved = signature.moved_bytes
        share: float = self.constants.memory_share * getattr(self.constants, ACCESS_SHARES[access])
        cache = self.device.cache_bytes or 0
        # What is smaller than the last-level cache is partly still there from the kernel before.
        kept = max(0.0, 1.0 - moved / cache) if cache else 0.0
        gain = 1.0 - kept * (1.0 - 1.0 / self.constants.cache_gain)
        return moved * gain / (self.rates.bandwidth * share)

    def _computing(self, signature: Signature, contents: CallContents) -> tuple[float, str, float, int]:
        """Return the seconds of computing, of what kind that is, and the seconds and kernels besides it."""
        rates = self.rates
        if contents.convolution is not None:
            called, dtype = contents.convolution, signature.inputs[0].dtype
            kind = f"{called.kind} convolutions in {rates.precision(dtype, 'convolution')}"
            rewriting, copies = rates.rewriting(called, dtype)
            biasing, sums = rates.biasing(called)
            return rates.convolution(called, dtype), kind, rewriting + biasing, copies + sums
        if contents.products:
            dtype = signature.inputs[0].dtype
            seconds = sum(rates.product(product, dtype) for product in contents.products)
            return seconds, f"products in {rates.precision(dtype)}", 0.0, 0
        if contents.attention is not None:
            dtype = signature.inputs[0].dtype
            seconds = self._attention_seconds(contents.attention, dtype)
            return seconds, f"attention in {rates.precision(dtype)}", 0.0, 0
        return signature.flops / rates.flops("fp32"), contents.access, 0.0, 0

    def _attention_seconds(self, attention: FusedAttention, dtype: str) -> float:
        """Return the products, and what each score takes besides: its exponential, its random number."""
        constants, rates = self.constants, self.rates
        rate = rates.large(dtype)
        rate *= constants.attention_backward_share if attention.backward else constants.attention_share
        if attention.kernel == "efficient":
            rate *= constants.efficient_attention_share
        cycles = constants.score_cycles + (constants.dropped_score_cycles if attention.dropout else 0.0)
        scores = attention.scores * cycles / (rates.multiprocessors * self.device.clock)
        return (attention.flops / rate + scores) * attention.executed_share

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
