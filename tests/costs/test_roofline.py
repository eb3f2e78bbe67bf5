"""The roofline on a device with round figures: operators worked out by hand, and laws that always hold."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from trainfit.costs.calibration import uncalibrated_kinds
from trainfit.costs.constants import CALIBRATED, constants_of
from trainfit.costs.roofline import Roofline, host_of, roofline_costs
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
            *("in_step_share", "simt_share", "shared_lanes_share", "tf32_share", "unaligned_share"),
            *("convolution_share", "grouped_convolution_share", "grouped_channels_last_share"),
            *("narrow_groups_gain", "odd_groups_share"),
            *("plain_convolution_share", "winograd_gain", "depthwise_float32_waste"),
            *("attention_share", "attention_backward_share", "efficient_attention_share"),
            *("memory_share", "stream_share", "strided_share"),
            *("transposed_share", "joined_share", "rewriting_share", "reduction_share"),
            *("irregular_share", "list_share"),
        ),
        1.0,
    ),
    tile_fill=0.0,
    kernel_seconds=0.0,
    score_cycles=0.0,
    dropped_score_cycles=0.0,
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


def channels_last(image: TensorSpec) -> TensorSpec:
    _, channels, height, width = image.shape
    return replace(image, stride=(channels * height * width, 1, channels * width, channels))


def convolution(
    image: TensorSpec, weight: TensorSpec, result: TensorSpec, *, groups: int = 1, stride: int = 1
) -> Signature:
    rest = f"null,[{stride},{stride}],[1,1],[1,1],false,[0,0],{groups}"
    arguments = f'[[{{"tensor":0}},{{"tensor":1}},{rest}],{{}}]'
    return call("convolution.default", [image, weight], [result], arguments)


def convolution_backward(image: TensorSpec, weight: TensorSpec, *, groups: int = 1) -> Signature:
    rest = f"[0],[1,1],[1,1],[1,1],false,[0,0],{groups},[true,true,false]"
    arguments = f'[[{{"tensor":0}},{{"tensor":1}},{{"tensor":2}},{rest}],{{}}]'
    return call("convolution_backward.default", [image, image, weight], [image, weight], arguments)


IMAGE, WEIGHT = spec(8, 64, 56, 56), spec(64, 64, 3, 3)
IMAGE_BYTES = 8 * 64 * 56 * 56 * 2


@pytest.mark.parametrize("bandwidth", [1e9, 1e15])
def test_rewriting_images_comes_on_top_of_computing_and_moving(bandwidth: float) -> None:
    """Whatever decides: both images are read and written once more, before and after the products."""
    device = replace(DEVICE, bandwidth_bytes_per_second=bandwidth)
    last = price(convolution(channels_last(IMAGE), WEIGHT, channels_last(IMAGE)), device=device)
    first = price(convolution(IMAGE, WEIGHT, IMAGE), device=device)
    assert first - last == pytest.approx(4 * IMAGE_BYTES / bandwidth, rel=1e-6)
    half = price(convolution(IMAGE, WEIGHT, IMAGE), replace(PLAIN, rewriting_share=0.5), device)
    assert half - last == pytest.approx(8 * IMAGE_BYTES / bandwidth, rel=1e-6)


def test_each_gradient_rewrites_its_images_for_itself() -> None:
    """Gradient in, gradient out; gradient in again, and the images: four, each read and written."""
    slow = replace(DEVICE, bandwidth_bytes_per_second=1e9)
    last = price(convolution_backward(channels_last(IMAGE), WEIGHT), device=slow)
    first = price(convolution_backward(IMAGE, WEIGHT), device=slow)
    assert first - last == pytest.approx(4 * 2 * IMAGE_BYTES / 1e9, rel=1e-6)
    cost = Roofline(slow, PLAIN).price(convolution_backward(IMAGE, WEIGHT))
    assert cost.kernels == 2 + 4


def test_images_are_rewritten_for_tensor_cores_only() -> None:
    image, weight = spec(8, 64, 56, 56, dtype="float32"), spec(64, 64, 3, 3, dtype="float32")
    plain = convolution(image, weight, image)
    assert price(plain) == pytest.approx(
        price(convolution(channels_last(image), weight, channels_last(image)))
    )
    assert price(plain, tf32=("convolution",)) > price(
        convolution(channels_last(image), weight, channels_last(image)), tf32=("convolution",)
    )


@pytest.mark.parametrize(
    ("groups", "width", "last", "share"),
    [
        (8, 64, False, 0.5),
        (32, 64, True, 0.125),
        (32, 8, False, 0.5 * 2.0),  # several narrow groups at once
        (32, 8, True, 0.125 * 2.0),
        (64, 24, True, 0.125 * 2.0),
        (8, 24, False, 0.5),  # but not if they are few
        (8, 64, True, 0.0625),  # and with channels last there is no kernel for few
        (48, 32, True, 0.0625),
    ],
)
def test_groups_are_as_fast_as_the_kernels_for_them(
    groups: int, width: int, last: bool, share: float
) -> None:
    """Nothing moves, so that products decide; against a device on which every share is one."""
    device = replace(DEVICE, bandwidth_bytes_per_second=1e18)
    image, weight = spec(8, groups * width, 56, 56), spec(groups * width, width, 3, 3)
    image = channels_last(image) if last else image
    called = convolution(image, weight, image, groups=groups)
    constants = replace(
        PLAIN,
        grouped_convolution_share=0.5,
        grouped_channels_last_share=0.125,
        narrow_groups_gain=2.0,
        odd_groups_share=0.0625,
    )
    assert price(called, PLAIN, device) / price(called, constants, device) == pytest.approx(share, rel=1e-3)
    assert Roofline(device, constants).price(called).kind == "grouped convolutions in 16-bit"


def test_groups_without_a_fast_kernel_take_plain_ones_that_narrow_groups_do_not_fill() -> None:
    """At a quarter of a tera-FLOP/s; groups of 16 channels fill half of what 32 would."""
    device = replace(DEVICE, bandwidth_bytes_per_second=1e18)
    constants = replace(PLAIN, odd_groups_share=0.25)
    for width, filled in ((16, 0.5), (32, 1.0), (120, 1.0)):
        image, weight = channels_last(spec(8, 4 * width, 56, 56)), spec(4 * width, width, 3, 3)
        flops = 2 * 8 * 56 * 56 * 4 * width * width * 9
        seconds = price(convolution(image, weight, image, groups=4), constants, device)
        assert seconds == pytest.approx(flops / (0.25e12 * filled), rel=1e-6)


def with_bias(called: Signature) -> Signature:
    """The same with a bias, or with its gradient."""
    if "backward" in called.name:
        return replace(called, arguments=called.arguments.replace("[true,true,false]", "[true,true,true]"))
    bias = called.arguments.replace('{"tensor":1},null', '{"tensor":1},{"tensor":2}')
    return replace(called, arguments=bias, inputs=(*called.inputs, spec(64)))


def test_a_bias_takes_kernels_of_its_own() -> None:
    """It is added to the results, read and written once more; its gradient is a sum that reads once."""
    image = channels_last(IMAGE)
    forward, backward = convolution(image, WEIGHT, image), convolution_backward(image, WEIGHT)
    for called, moved in ((forward, 2 * IMAGE_BYTES), (backward, IMAGE_BYTES)):
        added = price(with_bias(called)) - price(called)
        assert added == pytest.approx(moved / 1e12, rel=1e-6)
    depthwise = convolution(IMAGE, spec(64, 1, 3, 3), IMAGE, groups=64)
    assert price(with_bias(depthwise)) == pytest.approx(price(depthwise))


def test_channels_that_do_not_fill_vectors_are_rewritten() -> None:
    """60 channels are 120 bytes: the images are padded; the results have 64."""
    given = channels_last(spec(8, 60, 56, 56))
    called = convolution(given, spec(64, 60, 3, 3), channels_last(IMAGE))
    half = price(called, replace(PLAIN, rewriting_share=0.5)) - price(called)
    assert half == pytest.approx(2 * 8 * 60 * 56 * 56 * 2 / 1e12, rel=1e-6)


def test_what_was_permuted_is_copied_before_a_norm_reads_its_rows() -> None:
    """A layer norm over transposed features takes what it takes in rows, and a copy that transposes."""
    rows = spec(64, 1500, 384)
    permuted = replace(rows, stride=(1500 * 384, 1, 1500))
    arguments = '[[{"tensor":0},[384],null,null,1e-05],{}]'
    constants = replace(PLAIN, transposed_share=0.5)
    plain, copied = (
        price(call("native_layer_norm.default", [given], [rows], arguments), constants)
        for given in (rows, permuted)
    )
    assert copied - plain == pytest.approx(2 * 64 * 1500 * 384 * 2 / 0.5e12, rel=1e-6)


def test_on_amd_images_are_made_contiguous_before_the_library_gets_them() -> None:
    """The library rewrites them again, as it does images in rows; depthwise filters are not cuDNN's."""
    amd = replace(DEVICE, architecture="gfx942", flops={"fp32": 1e12, "bf16": 10e12})
    last, slow = channels_last(IMAGE), replace(PLAIN, transposed_share=0.5)
    in_rows, permuted = convolution(IMAGE, WEIGHT, IMAGE), convolution(last, WEIGHT, IMAGE)
    added = price(permuted, slow, amd) - price(in_rows, slow, amd)
    assert added == pytest.approx(2 * IMAGE_BYTES / 0.5e12, rel=1e-6)
    image, weight = spec(8, 64, 56, 56, dtype="float32"), spec(64, 1, 3, 3, dtype="float32")
    wasteful = replace(PLAIN, depthwise_float32_waste=1000.0)
    depthwise = convolution(channels_last(image), weight, image, groups=64)
    assert price(depthwise, wasteful, amd) < 0.1 * price(depthwise, wasteful)


def test_winograd_makes_3_by_3_filters_faster_without_tensor_cores() -> None:
    device = replace(DEVICE, bandwidth_bytes_per_second=1e18)
    constants = replace(PLAIN, winograd_gain=2.0)

    def seconds(size: int, stride: int, dtype: str = "float32", channels: int = 256) -> float:
        image, side = spec(40, channels, 32, 32, dtype=dtype), 32 // stride
        result = spec(40, 256, side, side, dtype=dtype)
        called = convolution(image, spec(256, channels, size, size, dtype=dtype), result, stride=stride)
        flops = 2 * 40 * side * side * 256 * channels * size * size
        return price(called, constants, device) / (flops / 1e12)

    # 40960 x 256 is 320 tiles on ten multiprocessors: whole waves, at the datasheet's speed.
    assert seconds(3, 1) == pytest.approx(0.5)
    assert seconds(3, 2) == pytest.approx(1.0)
    assert seconds(1, 1) == pytest.approx(1.0)
    assert seconds(5, 1) == pytest.approx(1.0)
    assert seconds(3, 1, channels=8) == pytest.approx(1.0)
    assert seconds(3, 1, dtype="bfloat16") == pytest.approx(0.1)


@pytest.mark.parametrize(("last", "small", "large"), [(False, 9.5, 29.5), (True, 1.9, 5.9)])
def test_depthwise_filters_take_cycles_per_element_and_per_tap(
    last: bool, small: float, large: float
) -> None:
    """Five cycles per element and half a cycle per tap; with channels last a fifth of both."""
    constants = replace(
        PLAIN,
        depthwise_cycles=5.0,
        depthwise_tap_cycles=0.5,
        depthwise_last_cycles=1.0,
        depthwise_last_tap_cycles=0.1,
    )
    clock = 1e12 / (2 * 128 * 10)
    elements = 8 * 64 * 56 * 56
    image = channels_last(IMAGE) if last else IMAGE
    for size, cycles in ((3, small), (7, large)):
        once = elements * cycles / (10 * clock)
        weight = spec(64, 1, size, size)
        assert price(convolution(image, weight, image, groups=64), constants) == pytest.approx(once)
        assert price(convolution_backward(image, weight, groups=64), constants) == pytest.approx(2 * once)


def test_depthwise_filters_in_float32_with_channels_last_are_products_that_are_mostly_wasted() -> None:
    constants = replace(PLAIN, depthwise_cycles=5.0, depthwise_tap_cycles=0.5, depthwise_float32_waste=50.0)
    elements, clock = 8 * 64 * 56 * 56, 1e12 / (2 * 128 * 10)
    image, weight = spec(8, 64, 56, 56, dtype="float32"), spec(64, 1, 3, 3, dtype="float32")
    last = convolution(channels_last(image), weight, channels_last(image), groups=64)
    assert price(last, constants) == pytest.approx(50 * elements * 18 / 1e12)
    assert price(last, constants, tf32=("convolution",)) == pytest.approx(50 * elements * 18 / 5e12)
    first = convolution(image, weight, image, groups=64)
    assert price(first, constants) == pytest.approx(elements * 9.5 / (10 * clock))


def test_rows_that_16_bytes_do_not_divide_are_slower_on_tensor_cores() -> None:
    constants = replace(PLAIN, unaligned_share=0.5)
    device = replace(DEVICE, bandwidth_bytes_per_second=1e18)
    for n, k, dtype, factor in (
        (2560, 4096, "bfloat16", 1.0),
        (2559, 4096, "bfloat16", 2.0),
        (2560, 4094, "bfloat16", 2.0),
        (2560, 4092, "float32", 1.0),  # four elements are 16 bytes
        (2560, 4094, "float32", 2.0),
    ):
        product = matmul(2560, n, k, dtype=dtype)
        slow, fast = (price(product, c, device, tf32=("matmul",)) for c in (constants, PLAIN))
        assert slow == pytest.approx(factor * fast, rel=1e-6), (n, k, dtype)
    plain = matmul(2560, 2559, 4096, dtype="float32")
    assert price(plain, constants, device) == pytest.approx(price(plain, PLAIN, device))
    odd = convolution(channels_last(spec(8, 60, 56, 56)), spec(64, 60, 3, 3), channels_last(IMAGE))
    assert price(odd, constants, device) == pytest.approx(2 * price(odd, PLAIN, device), rel=1e-5)


def test_tf32_does_nothing_on_amd() -> None:
    product = matmul(4096, 4096, 4096, dtype="float32")
    for name in ("mi325x", "mi300x", "mi250x"):
        device = find_device(name)
        constants = constants_of(device)
        assert price(product, constants, device, ("matmul",)) == price(product, constants, device)
    h100 = find_device("h100")
    assert price(product, PLAIN, h100, ("matmul",)) < 0.5 * price(product, PLAIN, h100)


def test_scores_take_cycles_besides_the_products_and_dropped_ones_more() -> None:
    """Two samples of 8 heads, 4096 x 4096 scores each: half a cycle, and one more where numbers are drawn."""
    arguments = '[[{"tensor":0},{"tensor":1},{"tensor":2},%s,false],{}]'
    heads = [spec(2, 8, 4096, 64)] * 3
    constants = replace(PLAIN, score_cycles=0.5, dropped_score_cycles=1.0)
    name = "_scaled_dot_product_flash_attention.default"
    plain, dropped = (call(name, heads, [heads[0]], arguments % share) for share in (0.0, 0.1))
    cycle = 2 * 8 * 4096 * 4096 / (10 * 1e12 / (2 * 128 * 10))
    products = 4 * 2 * 8 * 4096 * 4096 * 64 / 10e12
    assert price(plain, constants) == pytest.approx(products + 0.5 * cycle)
    assert price(dropped, constants) == pytest.approx(products + 1.5 * cycle)


@pytest.mark.parametrize(
    ("constant", "signature", "moved"),
    [
        ("stream_share", call("add.Tensor", [spec(64, 64)] * 2, [spec(64, 64)]), 3 * 64 * 64 * 2),
        ("joined_share", call("cat.default", [spec(64, 64)] * 2, [spec(128, 64)]), 4 * 64 * 64 * 2),
        # A cast reads four bytes and writes two.
        (
            "strided_share",
            call("_to_copy.default", [spec(64, 64, dtype="float32")], [spec(64, 64)]),
            64 * 64 * 6,
        ),
        # Half of each row, as rotary embeddings cut it.
        (
            "strided_share",
            call("neg.default", [replace(spec(64, 32), stride=(64, 1))], [spec(64, 32)]),
            2 * 64 * 32 * 2,
        ),
        (
            "transposed_share",
            call("clone.default", [replace(spec(64, 32), stride=(1, 64))], [spec(64, 32)]),
            2 * 64 * 32 * 2,
        ),
    ],
)
def test_what_does_not_stream_gets_a_share_of_its_own(
    constant: str, signature: Signature, moved: int
) -> None:
    assert price(signature) == pytest.approx(moved / 1e12)
    assert price(signature, replace(PLAIN, **{constant: 0.25})) == pytest.approx(4 * moved / 1e12)
    assert price(signature, replace(PLAIN, memory_share=0.5)) == pytest.approx(2 * moved / 1e12)


def test_a_slow_host_is_slow_in_everything_but_the_launch() -> None:
    """Launching is the driver's and the bus's time."""
    usual, slow = host_of(PLAIN), host_of(replace(PLAIN, host_factor=3.0))
    for name in ("forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor"):
        assert getattr(slow, name) == pytest.approx(3 * getattr(usual, name))
    assert slow.launch == usual.launch == PLAIN.launch


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_known_device_can_be_priced(device: Device) -> None:
    """A product of 8192 cubed runs between 15 % (AMD's) and 110 % (a GeForce's clock) of the datasheet's."""
    dtype = "bfloat16" if "bf16" in device.flops else "float16"
    peak = device.flops[device.rate_of(dtype)]
    seconds = Roofline(device, constants_of(device)).price(matmul(8192, 8192, 8192, dtype)).seconds
    assert 0.14 < 2 * 8192**3 / seconds / peak <= 1.10


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
        ast.literal_eval(node.value)
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FITTED"
    )
    assert called == set(fitted)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("rtx-3090", "related_uncertainty"),  # what was not calibrated on a device whose other steps were
        ("rtx-a6000", "related_uncertainty"),  # an architecture that was
        ("t4", "uncalibrated_uncertainty"),
        ("mi250x", "foreign_uncertainty"),
        ("mi300x", "related_uncertainty"),  # an MI325X with less memory
        ("mi325x", "related_uncertainty"),
    ],
)
def test_what_is_not_calibrated_has_the_range_of_the_nearest_that_is(name: str, width: str) -> None:
    device = find_device(name)
    costs = roofline_costs(NOTHING, device)
    assert costs.uncalibrated_uncertainty == getattr(constants_of(device), width)
    assert costs.uncertainty == constants_of(device).uncertainty
    names = ("uncertainty", "related_uncertainty", "uncalibrated_uncertainty", "foreign_uncertainty")
    assert sorted(names, key=lambda name: float(getattr(CALIBRATED, name))) == list(names)


def test_what_nobody_compared_has_the_constants_of_its_nearest() -> None:
    """An MI250X as an MI325X, a B200 as an H100; how sure that is is not taken over."""
    for name, nearest in (("mi250x", "mi325x"), ("b200", "h200"), ("v100-sxm-32gb", "a100-sxm-80gb")):
        found, known = constants_of(find_device(name)), constants_of(find_device(nearest))
        assert found.in_step_share == known.in_step_share != CALIBRATED.in_step_share
        assert found.uncertainty == CALIBRATED.uncertainty
    assert constants_of(find_device("t4")) == CALIBRATED


def test_what_a_device_was_not_calibrated_on_is_known_by_kind() -> None:
    kinds = {"", "streams", "products in 16-bit", "products in float8"}
    assert uncalibrated_kinds(find_device("t4"), kinds) == kinds - {""}
    assert uncalibrated_kinds(find_device("rtx-3090"), kinds) == {"products in float8"}
    own = Device("mine", "cuda", 1 << 30, calibrated=True, constants={"stream_share": 0.8})
    assert uncalibrated_kinds(own, kinds) == {"products in 16-bit", "products in float8"}


def test_a_device_may_have_constants_of_its_own() -> None:
    """Half the bandwidth and a slow host: everything else stays as it is in general."""
    own = replace(DEVICE, constants={"stream_share": 0.4, "forward_op": 1e-3})
    assert constants_of(own) == replace(CALIBRATED, stream_share=0.4, forward_op=1e-3)
    costs = roofline_costs(NOTHING, own)
    assert costs.host.forward_op == 1e-3
    adding = call("add.Tensor", [spec(1000, 1000)] * 2, [spec(1000, 1000)])
    latency = CALIBRATED.kernel_seconds
    assert price(adding, constants_of(own), own) - latency == pytest.approx(3 * 2e6 / (0.4 * 1e12))
