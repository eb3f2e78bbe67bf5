"""What kernels of a GPU allocate inside themselves: formulas, against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from captured_steps import captured, only_op, ops, signature, training
from torch import nn

from trainfit.basics.units import format_bytes
from trainfit.devices.device_table import Device, find_device
from trainfit.steps.step import Step
from trainfit.traces import arguments
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Signature, TensorSpec, Trace
from trainfit.workspace.formulas import gpu_workspace
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces
from trainfit.workspace.kernel_workspace import KernelWorkspace

V100, A100, H100 = (find_device(name) for name in ("v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm-80gb"))
RTX_3090 = find_device("rtx-3090")


def spec(dtype: str, *shape: int, last: bool = False) -> TensorSpec:
    """A tensor in one piece; `last` puts the channels last."""
    order = [0, *range(2, len(shape)), 1] if last else [*range(len(shape))]
    strides, expected = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = expected
        expected *= shape[dimension]
    return TensorSpec(dtype, shape, tuple(strides))


def call(name: str, *given: Any, outputs: tuple[TensorSpec, ...] = (), **keywords: Any) -> Signature:
    """A recorded call with these arguments."""
    inputs: list[TensorSpec] = []

    def written(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            inputs.append(value)
            return {"tensor": len(inputs) - 1}
        return [written(one) for one in value] if isinstance(value, list) else value

    text = arguments.encode([written(value) for value in given], {k: written(v) for k, v in keywords.items()})
    full = f"aten.{name}.default"
    return Signature(full, tuple(inputs), outputs, text, view=False, in_place=False, random=False)


def workspace(found: Signature, device: Device = A100, tf32: bool = False) -> int:
    known = gpu_workspace(found, device, tf32)
    assert known is not None
    return known.likely_bytes


# Attention ------------------------------------------------------------------------------------------------


def heads(dtype: str, batch: int, number: int, rows: int, width: int) -> TensorSpec:
    """Query, key or value as a linear layer makes it: heads lie between rows and values."""
    strides = (rows * number * width, width, number * width, 1)
    return TensorSpec(dtype, (batch, number, rows, width), strides)


def attention(kind: str, query: TensorSpec, key: TensorSpec) -> Signature:
    name = f"_scaled_dot_product_{kind}_attention_backward"
    return call(name, query, query, key, key, query)


def test_flash_backward_sums_the_gradient_of_the_query_in_fp32() -> None:
    # GIVEN 2 sequences, 4 heads of 64, 256 rows: nothing has to be padded
    query = heads("bfloat16", 2, 4, 256, 64)
    # THEN there are 64 fp32 sums and one more value for each row of each head
    expected = 2 * 4 * 256 * 64 * 4 + 2 * 4 * 256 * 4
    assert workspace(attention("flash", query, query)) == expected


def test_flash_backward_pads_rows_to_128_and_heads_to_32() -> None:
    query = heads("float16", 1, 3, 100, 40)
    assert workspace(attention("flash", query, query)) == 3 * 128 * 64 * 4 + 3 * 128 * 4
    large = heads("float16", 1, 3, 100, 200)
    assert workspace(attention("flash", large, large)) == 3 * 128 * 256 * 4 + 3 * 128 * 4


def test_flash_backward_makes_gradients_for_every_query_head_where_heads_are_grouped() -> None:
    query, key = heads("bfloat16", 1, 8, 128, 64), heads("bfloat16", 1, 2, 128, 64)
    sums = 8 * 128 * 64 * 4 + 8 * 128 * 4
    assert workspace(attention("flash", query, key)) == sums + 2 * (8 * 128 * 64 * 2)


def test_flash_backward_copies_a_gradient_whose_heads_lie_elsewhere() -> None:
    query = heads("bfloat16", 2, 4, 256, 64)
    whole = spec("bfloat16", 2, 4, 256, 64)
    found = call("_scaled_dot_product_flash_attention_backward", whole, query, query, query, query)
    assert workspace(found) - workspace(attention("flash", query, query)) == 2 * 4 * 256 * 64 * 2


def test_flash_forward_divides_the_keys_where_rows_are_too_few_for_the_chip() -> None:
    # GIVEN 1 sequence with 4 heads of 64 and 128 rows: 8 blocks on 2 x 108 places, and 4096 keys in 16 blocks
    query, keys = heads("float16", 1, 4, 128, 64), heads("float16", 1, 4, 4096, 64)
    name = "_scaled_dot_product_flash_attention"
    # THEN 16 parts use 128 of 216 places, the most that there are; 14 and 15 would leave parts as long
    assert workspace(call(name, query, keys, keys, 0.0, False)) == 16 * 4 * 128 * (64 + 1) * 4
    assert workspace(call(name, query, keys, keys, 0.1, False)) == 0  # not with dropout
    many = heads("float16", 16, 12, 1024, 64)
    assert workspace(call(name, many, many, many, 0.0, True)) == 0


def test_efficient_backward_in_16_bits_sums_keys_and_values_in_registers() -> None:
    low = heads("bfloat16", 2, 4, 256, 64)
    # 4 tiles of 64 x 64 sums for each head, each with 16 bytes for its lock; and a value per row
    tiles = 2 * 4 * 4 * (64 * 64 * 4 + 16)
    assert workspace(attention("efficient", low, low)) == tiles + 2 * 4 * 256 * 4


def test_efficient_backward_in_float32_multiplies_result_and_gradient_first() -> None:
    full = heads("float32", 2, 4, 256, 64)
    product, per_row, tiles = 2 * 4 * 256 * 64 * 4, 2 * 4 * 256 * 4, 2 * 4 * 4 * (64 * 64 * 4 + 16)
    assert workspace(attention("efficient", full, full)) == max(product, tiles) + per_row


def test_efficient_backward_of_large_heads_needs_memory_for_keys_and_values_on_a_desktop_chip() -> None:
    low = heads("float16", 8, 16, 512, 128)
    # 128 x 128 tiles on an A100, whose registers hold what 128 keys get
    a100 = 8 * 16 * 4 * (128 * 128 * 4 + 16) + 8 * 16 * 512 * 4
    assert workspace(attention("efficient", low, low)) == a100
    # 64 x 64 tiles on an RTX 3090, two in a row; keys in one part (200 // 128), each padded to two tiles
    tiles = 8 * 16 * (8 * 2 * (64 * 64 * 4 + 16) + 1 * 64 * 2 * 128 * 4)
    assert workspace(attention("efficient", low, low), RTX_3090) == tiles + 8 * 16 * 512 * 4


# Embeddings, indices, sorting -----------------------------------------------------------------------------


def embedding(tokens: int, rows: int, width: int, dtype: str = "float32") -> Signature:
    gradient, indices = spec(dtype, tokens, width), spec("int64", tokens)
    return call("embedding_dense_backward", gradient, indices, rows, -1, False)


def test_few_tokens_are_added_up_without_sorting() -> None:
    assert workspace(embedding(3072, 50257, 768)) == 0


def test_the_gradient_of_an_embedding_has_room_for_a_float32_row_per_token() -> None:
    # GIVEN 8192 tokens of 50257: at most 8192 different ones, and 819 parts of ten rows
    parts = 819 + 8192
    sorted_tokens, offsets = 2 * 8 * 8192, 8 * (8192 + 2 * 8192 + parts)
    for dtype in ("float32", "bfloat16"):
        assert workspace(embedding(8192, 50257, 768, dtype)) == sorted_tokens + offsets + parts * 768 * 4


def test_a_small_table_limits_the_rows() -> None:
    parts = 1638 + 1024
    expected = 2 * 8 * 16384 + 8 * (16384 + 2 * 1024 + parts) + parts * 768 * 4
    assert workspace(embedding(16384, 1024, 768)) == expected


def test_a_table_too_small_to_fill_the_chip_is_added_to_directly() -> None:
    # GIVEN 400 rows of 1024, one block each on 108 multiprocessors, and 10000 + 400 parts
    sorted_tokens, offsets = 2 * 8 * 100000, 8 * (100000 + 2 * 400 + 10400)
    # THEN parts have a number each, and 16-bit rows a float32 copy of the table
    expected = sorted_tokens + offsets + 8 * 10400 + 400 * 1024 * 4
    assert workspace(embedding(100000, 400, 1024, "float16")) == expected
    assert workspace(embedding(100000, 400, 1024)) == 5 * 8 * 100000  # the sort needs more


def test_adding_to_indexed_rows_sorts_the_indices() -> None:
    target, index, values = spec("float32", 100, 16), spec("int64", 5000), spec("float32", 5000, 16)
    # places, sorted places and origins, numbers, and the sort's own buffers: 6 x 8 bytes
    assert workspace(call("index_put_", target, [index], values, True)) == 48 * 5000
    assert workspace(call("index_put_", target, [index], values, False)) == 0
    narrow = spec("int32", 5000)
    assert workspace(call("index_put_", target, [narrow], values, True)) == 48 * 5000 + 8 * 5000


def test_a_value_for_many_places_is_written_out() -> None:
    target, index, value = spec("float32", 100, 16), spec("int64", 5000), spec("float32", 16)
    assert workspace(call("index_put_", target, [index], value, True)) == 48 * 5000 + 5000 * 16 * 4


def test_long_rows_are_sorted_by_radix_with_their_positions() -> None:
    assert workspace(call("sort", spec("float32", 64, 4096), -1, True)) == 0
    # one row: positions, and the sort's second buffer of keys and positions
    assert workspace(call("sort", spec("float32", 50000), -1, True)) == 50000 * (8 + 4 + 8)
    assert workspace(call("sort", spec("float32", 200, 5000), -1, True)) == 10**6 * (16 + 4 + 12)


def test_the_largest_of_short_rows_are_found_without_memory_and_of_long_ones_nobody_knows() -> None:
    assert gpu_workspace(call("topk", spec("float32", 8192, 64), 2, -1)) == KernelWorkspace(0, 0)
    assert gpu_workspace(call("topk", spec("float32", 4, 50000), 2, -1)) is None


# Reductions and norms -------------------------------------------------------------------------------------


def test_the_gradient_of_a_bias_is_summed_by_many_blocks() -> None:
    # GIVEN the sum of 8192 rows of 768 on an A100: 4 sums per thread, so blocks of 32 x 4 threads, and 6 of
    # them over the columns; 8192 / 4 = 2048 values each. 108 x 16 blocks have room, but a block should have
    # 16 values or more: 128 blocks; 256 at most: 8. 1728 / 6 = 288 is more, so it is 128.
    found = call("sum", spec("float32", 8192, 768), [0], outputs=(spec("float32", 768),))
    # THEN each of them has 32 x 4 places for every one of the 768 sums, and each column of blocks a counter
    assert workspace(found) == 768 * 128 * (32 * 4) * 4 + 6 * 4


def test_a_small_or_wide_reduction_needs_nothing() -> None:
    for shape, where in (((64, 768), [0]), ((8192, 768), [1]), ((4, 50000), [0])):
        outputs = (spec("float32", shape[1 - where[0]]),)
        assert workspace(call("sum", spec("float32", *shape), where, outputs=outputs)) == 0


def test_a_sum_of_everything_has_one_value_per_block() -> None:
    # GIVEN 2^24 values in blocks of 512 threads, 4 loads each: 32768 values per thread, 4 x 108 blocks
    found = call("sum", spec("float32", 2**24), outputs=(spec("float32"),))
    assert workspace(found) == 4 * 432 + 4
    halves = call("sum", spec("float16", 2**24), outputs=(spec("float16"),))
    assert workspace(halves) == 4 * 432 + 4  # sums are in float32
    largest = call("argmax", spec("float32", 2**24), outputs=(spec("int64"),))
    assert workspace(largest) == 16 * 432 + 4


def test_layer_norm_divides_the_rows_where_there_are_many_short_ones() -> None:
    def backward(rows: int, columns: int) -> Signature:
        hidden, per_row, weight = (
            spec("float16", rows, columns),
            spec("float32", rows, 1),
            spec("float16", columns),
        )
        return call("native_layer_norm_backward", hidden, hidden, [columns], per_row, per_row, weight, weight)

    # GIVEN 100000 rows of 96 columns, 3 warps wide: at most 32768 / 3 parts, 3125 of 32 rows
    assert workspace(backward(100000, 96)) == 2 * 3125 * 96 * 2
    assert workspace(backward(65536, 96)) == 0
    assert workspace(backward(100000, 4096)) == 0


def test_batch_norm_hands_statistics_over_where_channels_are_last() -> None:
    images = spec("float16", 64, 256, 56, 56, last=True)
    # 256 channels, 200704 positions: blocks of 32 x 16 threads with 16 positions each, 128 of them at most
    assert workspace(call("native_batch_norm", images)) == 4 * 256 * 128 * 4
    assert workspace(call("native_batch_norm_backward", images, images)) == 2 * 256 * 128 * 4
    assert workspace(call("native_batch_norm", spec("float16", 64, 256, 56, 56))) == 0


def test_a_loss_that_is_a_mean_writes_its_terms_first() -> None:
    terms = spec("float32", 64, 1000)
    assert workspace(call("mse_loss", terms, terms)) == 64 * 1000 * 4
    assert workspace(call("mse_loss", terms, terms, 0)) == 0


def test_norms_of_a_list_have_a_value_per_chunk_of_the_largest() -> None:
    tensors = [spec("bfloat16", 200000), spec("bfloat16", 10)]
    # 200000 values are four chunks of 65536
    assert workspace(call("_foreach_norm", tensors, 2)) == 2 * 4 * 4


# Convolutions ---------------------------------------------------------------------------------------------


def convolution(
    dtype: str, images: tuple[int, ...], width: int, size: int, step: int = 1, dilation: int = 1,
    groups: int = 1, last: bool = False, backward: tuple[bool, bool] | None = None,
) -> Signature:  # fmt: skip
    """A convolution that keeps the resolution (or halves it), or its gradients of (images, weights)."""
    batch, channels, *length = images
    out = spec(dtype, batch, width, *(side // step for side in length), last=last)
    weight = spec(dtype, width, channels // groups, size, size, last=last)
    given = spec(dtype, *images, last=last)
    rest = [[step] * 2, [dilation * (size // 2)] * 2, [dilation] * 2, False, [0, 0], groups]
    if backward is None:
        return call("convolution", given, weight, None, *rest, outputs=(out,))
    return call("convolution_backward", out, given, weight, None, *rest, [*backward, False])


def test_winograd_keeps_transformed_filters() -> None:
    # GIVEN the 3x3 of ResNet-50's first stage in float32: it is known to need 256 KiB
    found = convolution("float32", (32, 64, 56, 56), 64, 3)
    assert workspace(found, V100) == 256 * 1024
    assert (
        workspace(convolution("float32", (32, 64, 56, 56), 64, 3, backward=(True, False)), V100) == 256 * 1024
    )


def test_other_convolutions_without_tensor_cores_keep_nothing() -> None:
    for size, step, dilation in ((1, 1, 1), (3, 2, 1), (3, 1, 2), (7, 2, 1)):
        found = convolution("float32", (32, 64, 56, 56), 64, size, step, dilation)
        assert workspace(found, V100) == 0


def test_the_gradient_of_3x3_weights_writes_tiles_of_images_and_results() -> None:
    # GIVEN the largest convolution of FCN-R50's decoder, 2560 to 512 channels, 2 images of 64 x 128 pixels
    found = convolution("float32", (2, 2560, 64, 128), 512, 3, backward=(True, True))
    # THEN there are 2 x 16 x 32 tiles of 36 values per channel, and 36 per pair of channels
    tiles = 2 * 16 * 32
    assert workspace(found, V100) == 4 * 36 * (tiles * 2560 + tiles * 512 + 2560 * 512)


def test_tensor_cores_want_channels_last() -> None:
    images, results = 32 * 64 * 56 * 56 * 2, 32 * 128 * 56 * 56 * 2
    assert workspace(convolution("float16", (32, 64, 56, 56), 128, 3, last=True)) == 0
    assert workspace(convolution("float16", (32, 64, 56, 56), 128, 3)) == images + results
    assert workspace(convolution("float32", (32, 64, 56, 56), 128, 3), tf32=True) == 2 * (images + results)
    assert workspace(convolution("float32", (32, 64, 56, 56), 128, 3), V100, tf32=True) == 4 * 16 * 64 * 128


def test_tensor_cores_want_whole_vectors_of_channels() -> None:
    # GIVEN images with 3 channels in 16 bits, which become 8
    found = convolution("bfloat16", (32, 3, 224, 224), 64, 7, 2, last=True)
    assert workspace(found) == 32 * 8 * 224 * 224 * 2


def test_the_gradient_of_weights_is_summed_in_parts_that_fill_the_chip() -> None:
    # GIVEN 1x1 weights of 256 x 64: 2 blocks of 128 x 128 on 108 multiprocessors
    found = convolution("float16", (64, 64, 56, 56), 256, 1, last=True, backward=(False, True))
    assert workspace(found) == 54 * 256 * 64 * 4
    # 3x3 of 512 x 512 have 4 x 36 blocks, more than the chip holds at once
    large = convolution("float16", (64, 512, 7, 7), 512, 3, last=True, backward=(False, True))
    assert workspace(large) == 0


def test_depthwise_convolutions_have_kernels_without_memory() -> None:
    found = convolution("float16", (32, 64, 56, 56), 64, 3, groups=64)
    assert gpu_workspace(found, A100) == KernelWorkspace(0, 0)


def test_torch_copies_what_lies_differently() -> None:
    # GIVEN weights with channels last and images without
    found = convolution("float16", (32, 64, 56, 56), 128, 1, last=True)
    mixed = call(
        "convolution", spec("float16", 32, 64, 56, 56), spec("float16", 128, 64, 3, 3, last=True), None,
        [1, 1], [1, 1], [1, 1], False, [0, 0], 1, outputs=found.outputs,
    )  # fmt: skip
    assert workspace(mixed) == 32 * 64 * 56 * 56 * 2


def test_the_bound_is_the_largest_algorithm_that_applies() -> None:
    # GIVEN AlexNet's second layer: 64 to 192 channels, 5x5, 27 x 27 pixels, 256 images
    found = gpu_workspace(convolution("float32", (256, 64, 27, 27), 192, 5), V100)
    assert found is not None
    # THEN the Fourier transform has 32 x 17 complex values per image and channel (one tile), and per filter
    fourier = 8 * 32 * 17 * (256 * (64 + 192) + 64 * 192)
    matrix = 256 * 27 * 27 * 64 * 25 * 4
    assert (found.likely_bytes, found.most_bytes) == (0, max(fourier, matrix))


def test_a_transposed_convolution_is_the_gradient_of_an_ordinary_one() -> None:
    small, large = spec("float32", 8, 64, 28, 28), spec("float32", 8, 32, 28, 28)
    weight = spec("float32", 64, 32, 3, 3)
    found = call(
        "convolution", small, weight, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1, outputs=(large,)
    )
    assert workspace(found, V100) == 4 * 16 * 64 * 32


# Traces ---------------------------------------------------------------------------------------------------


def test_a_gpu_trace_takes_its_workspaces_from_the_formulas() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.query * 1
            return F.scaled_dot_product_attention(query, query, query)

    trace = captured(training(Attention, 1, loss=lambda y: y.float().sum()), "cuda")
    backward = signature(trace, only_op(trace, "_scaled_dot_product_flash_attention_backward"))
    assert backward.workspace_source == "formula"
    # gradient and result have their heads outside of rows, as the query has, and are copied
    assert backward.workspace_bytes == 2 * 4 * 256 * (64 + 1) * 4 + 2 * (2 * 4 * 256 * 64 * 2)
    assert {found.workspace_source for found in trace.signatures} == {"none", "formula"}


def convolving(size: int) -> Trace:
    def build() -> Step:
        torch.backends.cudnn.allow_tf32 = False
        model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
        return Step.of(model, torch.randn(8, 64, size, size), loss=lambda y: (y * y).sum())

    before = torch.backends.cudnn.allow_tf32
    try:
        return captured(build, "cuda")
    finally:
        torch.backends.cudnn.allow_tf32 = before  # a step may set it, and it stays set


def test_a_trace_says_how_much_more_cudnn_may_take() -> None:
    trace = convolving(64)
    likely = simulate(trace).peak_bytes
    (said,) = (one for one in trace.assumptions if one.kind == "workspace")
    assert said.text.startswith("cuDNN chooses the kernels of 4 convolutions when they run; with the largest")
    # The images as a matrix: 9 x 64 values for each of 8 x 64 x 64 pixels
    most = 8 * 64 * 64 * 9 * 64 * 4
    live = simulate(trace).live_bytes
    at_most = max(
        live[number] + most for number in (*ops(trace, "convolution"), *ops(trace, "convolution_backward"))
    )
    assert f"the peak would be {format_bytes(at_most - likely)} higher" in said.text


def test_a_trace_that_is_used_for_another_device_has_that_ones_workspaces() -> None:
    trace = convolving(64)
    forward = ops(trace, "convolution")[0]
    assert signature(trace, forward).workspace_bytes == 4 * 16 * 64 * 64
    rounded = with_gpu_workspaces(trace, A100)
    assert with_gpu_workspaces(rounded, V100) == with_gpu_workspaces(trace, V100)


def test_unknown_workspaces_are_named() -> None:
    def build() -> Step:
        model = nn.Linear(64, 64)
        return Step.of(model, torch.randn(64, 64), loss=lambda y: torch.linalg.cholesky(y @ y.T).sum())

    trace = captured(build, "cuda")
    (said,) = (one for one in trace.assumptions if one.kind == "workspace")
    names = "aten.linalg_cholesky_ex.default, aten.linalg_solve_triangular.default"
    assert said.text.endswith(f"is not known and counts as 0 for: {names}")
    assert signature(trace, only_op(trace, "linalg_cholesky_ex")).workspace_source == "unknown"


def test_what_a_norm_copies_to_read_its_rows_is_there_while_it_runs() -> None:
    rows = spec("float16", 64, 1500, 384)
    permuted = TensorSpec("float16", (64, 1500, 384), (1500 * 384, 1, 1500))
    assert workspace(call("native_layer_norm", rows, [384], None, None, 1e-5, outputs=(rows,))) == 0
    copied = call("native_layer_norm", permuted, [384], None, None, 1e-5, outputs=(rows,))
    assert workspace(copied) == 64 * 1500 * 384 * 2


def test_amds_library_gets_contiguous_images() -> None:
    """Whatever lies with channels last is copied: images and weight here."""
    images, weight = spec("float16", 8, 64, 28, 28, last=True), spec("float16", 32, 64, 3, 3, last=True)
    results = spec("float16", 8, 32, 28, 28)
    given = call(
        "convolution", images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, outputs=(results,)
    )
    assert workspace(given, find_device("mi325x")) == (8 * 64 * 28 * 28 + 32 * 64 * 9) * 2
    assert workspace(given) == 0
