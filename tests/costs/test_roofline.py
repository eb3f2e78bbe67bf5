"""The roofline on a device with round figures: operators worked out by hand, and laws that always hold."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from trainfit.costs.constants import CALIBRATED, constants_of
from trainfit.costs.roofline import Roofline, roofline_costs
from trainfit.costs.tiling import tiled_seconds
from trainfit.devices import efficiency
from trainfit.devices.device_table import Device, find_device, known_devices
from trainfit.devices.efficiency import Constants
from trainfit.errors import DeviceError
from trainfit.operators.matrix_products import Product
from trainfit.operators.work import with_work
from trainfit.traces.trace import Signature, TensorSpec, Trace

# One tera-FLOP/s per multiprocessor in bf16, a tenth of it in fp32; one TB/s.
DEVICE = Device(
    "round",
    "cuda",
    1 << 34,
    1e12,
    {"fp32": 1e12, "tf32": 5e12, "bf16": 10e12, "fp16": 10e12},
    1.0,
    sm_count=10,
)
PLAIN = Constants(
    **dict.fromkeys(
        (
            *("in_step_share", "simt_share", "convolution_share", "grouped_convolution_share"),
            *(
                "shared_lanes_share",
                "attention_share",
                "attention_backward_share",
                "efficient_attention_share",
            ),
            *("stream_share", "reduction_share", "strided_share", "irregular_share", "list_share"),
        ),
        1.0,
    ),
    tile_fill=0.0,
    kernel_seconds=0.0,
)
"""Every share is one, so that prices are the datasheet's."""
_TABLES = ("signatures", "ops", "storages", "modules", "calls")
_ORDERS = ("forward_post_order", "backward_pre_order", "backward_post_order")
NOTHING = Trace("nothing", "cuda", "2.13.0", **dict.fromkeys((*_TABLES, *_ORDERS), ()), observed_peak_bytes=0)


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= length
    return TensorSpec(dtype, shape, tuple(strides))


def call(
    name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], arguments: str = "[[],{}]"
) -> Signature:
    bare = Signature(f"aten.{name}", tuple(inputs), tuple(outputs), arguments, False, False, False)
    return with_work(bare, ())


def matmul(m: int, n: int, k: int, dtype: str = "bfloat16") -> Signature:
    return call("mm.default", [spec(m, k, dtype=dtype), spec(k, n, dtype=dtype)], [spec(m, n, dtype=dtype)])


def price(
    signature: Signature, constants: Constants = PLAIN, device: Device = DEVICE, tf32: tuple[str, ...] = ()
) -> float:
    return Roofline(device, constants, tf32).price(signature).seconds


def test_a_large_product_runs_at_the_peak() -> None:
    """2560 x 2560 is 200 tiles of 256 x 128 on ten multiprocessors: 20 whole waves, nothing lost."""
    assert price(matmul(2560, 2560, 4096)) == pytest.approx(2 * 2560 * 2560 * 4096 / 10e12)


def test_float32_uses_tensor_cores_only_if_allowed() -> None:
    product = matmul(2560, 2560, 4096, dtype="float32")
    flops = 2 * 2560 * 2560 * 4096
    assert price(product) == pytest.approx(flops / 1e12)
    assert price(product, tf32=("matmul",)) == pytest.approx(flops / 5e12)
    assert price(product, tf32=("convolution",)) == pytest.approx(flops / 1e12)


def test_a_dtype_without_a_rate_runs_in_float32() -> None:
    old = replace(DEVICE, flops={"fp32": 1e12, "fp16": 10e12})
    assert price(matmul(2560, 2560, 4096), device=old) == pytest.approx(2 * 2560 * 2560 * 4096 / 1e12)


def test_a_skinny_product_is_bound_by_memory() -> None:
    """One row: 2 * 4096 * 4096 FLOPs, but 32 MiB of weights have to be read."""
    slow = replace(DEVICE, bandwidth_bytes_per_second=5e11)
    cost = Roofline(slow, PLAIN).price(matmul(1, 4096, 4096))
    assert cost.bound == "memory"
    assert cost.seconds == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / 5e11)


def test_a_tile_more_takes_another_wave() -> None:
    """Ten tiles fill the device; one row more begins a second wave."""
    full = tiled_seconds(Product(1, 256 * 10, 128, 4096), 10e12, 10, 0.0, 1e12)
    more = tiled_seconds(Product(1, 256 * 10 + 1, 128, 4096), 10e12, 10, 0.0, 1e12)
    assert more > 1.2 * full


def test_few_tiles_with_a_long_sum_are_split() -> None:
    """A weight gradient: one tile, but a sum of a million. Without splitting, nine tenths would idle."""
    alone = Product(1, 128, 128, 1 << 20)
    assert tiled_seconds(alone, 10e12, 10, 0.0, 1e15) < 0.25 * alone.flops / 1e12


def test_no_product_is_faster_than_the_peak() -> None:
    for m in (1, 7, 100, 1000, 5000):
        for n in (1, 64, 1000):
            for k in (1, 100, 10_000):
                product = Product(3, m, n, k)
                assert tiled_seconds(product, 10e12, 10, 0.0, 1e12) >= product.flops / 10e12 * 0.999


def test_elementwise_is_bound_by_memory() -> None:
    cost = Roofline(DEVICE, PLAIN).price(call("add.Tensor", [spec(1000, 1000)] * 2, [spec(1000, 1000)]))
    assert (cost.bound, cost.source) == ("memory", "formula")
    assert cost.seconds == pytest.approx(3 * 2e6 / 1e12)


def test_a_kernel_takes_at_least_its_latency() -> None:
    tiny = call("add.Tensor", [spec(1)] * 2, [spec(1)])
    cost = Roofline(DEVICE, replace(PLAIN, kernel_seconds=2e-6)).price(tiny)
    assert cost.seconds >= 2e-6
    assert cost.bound == "latency"


def test_views_and_empty_memory_are_free() -> None:
    view = replace(call("view.default", [spec(10)], []), view=True)
    for free in (view, call("empty.memory_format", [], [spec(10, 10)])):
        cost = Roofline(DEVICE, PLAIN).price(free)
        assert (cost.seconds, cost.kernels, cost.source) == (0.0, 0, "assumed")


def test_what_has_no_formula_is_priced_by_its_traffic() -> None:
    unknown = replace(call("twist.default", [spec(1000)], [spec(1000)]), name="mine.twist.default")
    cost = Roofline(DEVICE, PLAIN).price(with_work(unknown, ()))
    assert cost.source == "bandwidth"
    assert cost.seconds == pytest.approx(4000 / 1e12)


def test_causal_attention_takes_half_the_time() -> None:
    arguments = '[[{"tensor":0},{"tensor":1},{"tensor":2},0.0,%s],{}]'
    heads = [spec(2, 8, 4096, 64)] * 3
    whole, causal = (
        price(call("_scaled_dot_product_flash_attention.default", heads, [heads[0]], arguments % flag))
        for flag in ("false", "true")
    )
    assert causal / whole == pytest.approx(0.5, rel=0.001)
    assert whole == pytest.approx(4 * 2 * 8 * 4096 * 4096 * 64 / 10e12)


def test_channels_last_convolutions_need_no_rewriting() -> None:
    arguments = '[[{"tensor":0},{"tensor":1},null,[1,1],[1,1],[1,1],false,[0,0],1],{}]'
    weight = spec(64, 64, 3, 3)
    first = call("convolution.default", [spec(8, 64, 56, 56), weight], [spec(8, 64, 56, 56)], arguments)
    image = replace(spec(8, 64, 56, 56), stride=(64 * 56 * 56, 1, 64 * 56, 64))
    last = call("convolution.default", [image, weight], [image], arguments)
    slow = replace(DEVICE, bandwidth_bytes_per_second=1e9)  # so that memory decides
    assert price(first, device=slow) > 2 * price(last, device=slow)


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_known_device_can_be_priced(device: Device) -> None:
    """A product of 8192 cubed runs between 25 % (a T4's power cap) and 105 % of what the datasheet says."""
    dtype = "bfloat16" if "bf16" in device.flops else "float16"
    peak = device.flops[device.rate_of(dtype)]
    seconds = Roofline(device, Constants()).price(matmul(8192, 8192, 8192, dtype)).seconds
    assert 0.25 < 2 * 8192**3 / seconds / peak <= 1.05


def test_a_device_without_speed_is_refused() -> None:
    with pytest.raises(
        DeviceError, match="mine has no bandwidth_bytes_per_second and no flops and no sm_count"
    ):
        Roofline(Device("mine", "cuda", 1 << 30), Constants())


def test_constants_that_are_called_fitted_are_those_that_the_calibration_fits() -> None:
    source = ast.parse(Path(efficiency.__file__).read_text(encoding="utf-8"))
    (body,) = (node.body for node in source.body if isinstance(node, ast.ClassDef))
    called: set[str] = set()
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and names:
            called |= {names[-1]} if "Fitted" in str(node.value.value) else set()
    script = Path(__file__).parent.parent.parent / "benchmarks" / "calibrate.py"
    (fitted,) = (
        ast.literal_eval(
            ast.Tuple([name for part in node.value.elts for name in part.value.elts], ast.Load())
        )
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FITTED"
    )
    assert called == set(fitted)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("l40s", CALIBRATED.uncertainty),
        ("h100", CALIBRATED.uncalibrated_uncertainty),
        ("rtx-4090", CALIBRATED.uncalibrated_uncertainty),
        ("mi300x", CALIBRATED.foreign_uncertainty),
    ],
)
def test_the_range_is_as_wide_as_the_calibration_allows(name: str, width: float) -> None:
    """A measured product alone (the H100 and the MI300X have one) says little about steps."""
    costs = roofline_costs(NOTHING, find_device(name))
    assert costs.uncertainty == width
    assert CALIBRATED.uncertainty < CALIBRATED.uncalibrated_uncertainty < CALIBRATED.foreign_uncertainty


def test_a_device_may_have_constants_of_its_own() -> None:
    """Half the bandwidth and a slow host: everything else stays as it is in general."""
    own = replace(DEVICE, constants={"stream_share": 0.4, "forward_op": 1e-3})
    assert constants_of(own) == replace(CALIBRATED, stream_share=0.4, forward_op=1e-3)
    costs = roofline_costs(NOTHING, own)
    assert costs.host.forward_op == 1e-3
    adding = call("add.Tensor", [spec(1000, 1000)] * 2, [spec(1000, 1000)])
    latency = CALIBRATED.kernel_seconds
    assert price(adding, constants_of(own), own) - latency == pytest.approx(3 * 2e6 / (0.4 * 1e12))
