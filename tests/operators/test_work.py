"""FLOPs and bytes of operators against torch's registry and against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import trainfit
from trainfit import Step
from trainfit.operators.fused_attention import FusedAttention
from trainfit.operators.matrix_products import Product, products_of
from trainfit.operators.recorded_calls import nbytes
from trainfit.operators.traffic import moved_bytes
from trainfit.operators.work import known_flops
from trainfit.traces.trace import Signature, TensorSpec, Trace


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= length
    return TensorSpec(dtype, shape, tuple(strides) if stride is None else stride)


def call(
    name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], arguments: str = "[[],{}]"
) -> Signature:
    return Signature(name, tuple(inputs), tuple(outputs), arguments, False, False, False)


class Everything(nn.Module):
    """Products of every kind: linear, batched, convolutions (grouped, transposed, strided), attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, groups=4)
        self.wider = nn.ConvTranspose2d(16, 6, 4, stride=2)
        self.line = nn.Conv1d(6, 12, 5)
        self.linear = nn.Linear(12, 24)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.line(self.wider(self.grouped(self.first(images))).flatten(2))
        query, key = self.linear(hidden.transpose(1, 2)).chunk(2, -1)
        heads = [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (query, key)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[1], is_causal=True)
        return (query @ key.transpose(1, 2)).mean() + mixed.square().mean()


def build() -> Step:
    model = Everything()
    images = torch.randn(2, 3, 18, 18)
    return Step.of(model, {"images": images}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture(build)


def test_a_whole_step_has_the_flops_that_torch_counts(trace: Trace) -> None:
    """Without attention, which torch does not count on the CPU.

    torch 2.13 counts the weight gradient of a grouped convolution `groups` times: here 4 instead of 1.
    """
    step = build()
    with FlopCounterMode(display=False) as counter:
        step.run()
    ours = sum(
        signature.flops
        for op in trace.ops
        if products_of(signature := trace.signatures[op.signature]) and not signature.view
    )
    # 2 images of 7 x 7 positions, 16 channels from 2 each in a 3 x 3 window, a multiply and an add
    grouped = 2 * 7 * 7 * 16 * 2 * 9 * 2
    assert ours == counter.get_total_flops() - 3 * grouped


def test_our_formulas_agree_with_the_registry(trace: Trace) -> None:
    """Every product of the step: the shapes that we tile multiply out to what the registry says."""
    checked = 0
    for signature in trace.signatures:
        if signature.work_source == "registry":
            assert known_flops(signature) == signature.flops, signature.name
            checked += 1
    assert checked >= 10


def test_nothing_in_the_step_is_without_a_formula(trace: Trace) -> None:
    assert [s.name for s in trace.signatures if s.work_source not in ("registry", "formula")] == []


def test_attention_on_the_cpu_has_a_formula_of_ours(trace: Trace) -> None:
    """Two products forward, five backward: 2 * batch * heads * queries * keys * head each."""
    forward = next(s for s in trace.signatures if s.name.endswith("flash_attention_for_cpu.default"))
    backward = next(s for s in trace.signatures if s.name.endswith("for_cpu_backward.default"))
    batch, heads, tokens, head = forward.inputs[0].shape
    assert forward.flops == 2 * 2 * batch * heads * tokens * tokens * head
    assert backward.flops == 5 * 2 * batch * heads * tokens * tokens * head


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("target", ["gpt2", "resnet-18", "bert-base", "vit-b-16"])
def test_a_models_backward_is_twice_its_forward(target: str, device: str) -> None:
    """Each product has two gradients, for input and weight; the first layer's input needs none."""
    options = trainfit.StepOptions(batch=1, seq=64) if target in ("gpt2", "bert-base") else None
    options = options or trainfit.StepOptions(batch=1)
    trace = trainfit.capture(target, device=device, options=options)
    flops = dict.fromkeys(("forward", "backward", "optimizer"), 0)
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        if products_of(signature):
            flops[op.phase] += signature.flops
    assert flops["optimizer"] == 0
    assert 1.85 < flops["backward"] / flops["forward"] <= 2.0


def test_causal_attention_skips_what_is_above_the_diagonal() -> None:
    """Of 4 x 4 pairs 10 are on or below the diagonal."""
    square = FusedAttention("flash", 1, 1, 4, 4, 8, 8, causal=True, backward=False)
    assert square.executed_share == 10 / 16
    assert FusedAttention("flash", 1, 1, 4, 4, 8, 8, causal=False, backward=False).executed_share == 1.0


def test_grouped_products_count_every_row_once() -> None:
    """6 rows for 3 experts, each a 4 x 5 matrix: 2 * 6 * 4 * 5."""
    grouped = call("aten._grouped_mm.default", [spec(6, 4), spec(3, 4, 5)], [spec(6, 5)])
    assert products_of(grouped) == (Product(3, 2, 5, 4),)
    assert known_flops(grouped) == 240


def test_bytes_of_plain_operators() -> None:
    added = call("aten.add.Tensor", [spec(10, 4), spec(4)], [spec(10, 4)])
    assert moved_bytes(added, ()) == 160 + 16 + 160
    in_place = call("aten.add_.Tensor", [spec(10, 4), spec(10, 4)], [])
    assert moved_bytes(in_place, (0,)) == 160 + 160 + 160
    filled = call("aten.fill_.Scalar", [spec(10, 4)], [])
    assert moved_bytes(filled, (0,), overwrites_first=True) == 160
    assert moved_bytes(call("aten.empty.memory_format", [], [spec(10, 4)]), ()) == 0


def test_an_expanded_tensor_is_read_once() -> None:
    assert nbytes(spec(10, 4, stride=(0, 1))) == 16
    assert nbytes(spec(10, 4, dtype="bfloat16")) == 80
    assert nbytes(spec(10, 4, dtype="bool")) == 40
    assert nbytes(spec(0, 4)) == 0


def test_an_embedding_reads_only_the_rows_it_returns() -> None:
    looked_up = call("aten.embedding.default", [spec(50000, 8), spec(3, dtype="int64")], [spec(3, 8)])
    assert moved_bytes(looked_up, ()) == 2 * 3 * 8 * 4 + 3 * 8


def test_batch_norm_passes_over_its_input_twice() -> None:
    small = [spec(5)] * 4
    norm = call("aten.native_batch_norm.default", [spec(2, 5, 7), *small], [spec(2, 5, 7), spec(5), spec(5)])
    assert moved_bytes(norm, ()) == 3 * 2 * 5 * 7 * 4 + 6 * 5 * 4


def test_a_long_softmax_row_is_read_twice() -> None:
    def softmax(length: int) -> int:
        arguments = '[[{"tensor":0},-1,false],{}]'
        return moved_bytes(call("aten._softmax.default", [spec(4, length)], [spec(4, length)], arguments), ())

    assert softmax(1000) == 2 * 4 * 1000 * 4
    assert softmax(100_000) == 3 * 4 * 100_000 * 4


def test_a_fused_optimizer_reads_four_lists_and_writes_three() -> None:
    def step() -> Step:
        own = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.AdamW(own.parameters(), fused=True)
        return Step.of(own, {"input": torch.randn(2, 8)}, loss=lambda out: out.mean(), optimizer=optimizer)

    fused = next(s for s in trainfit.capture(step).signatures if "_fused_adamw_" in s.name)
    tensor, count = 8 * 8 * 4, 4
    # Parameter, gradient and two moments are read; parameter and moments written; steps are one number.
    assert abs(fused.moved_bytes - 7 * tensor) <= 4 * count


def test_an_operator_of_the_users_own_is_priced_by_its_traffic() -> None:
    unknown = call("mine.twist.default", [spec(4, 4)], [spec(4, 4)])
    assert known_flops(unknown) is None
    assert moved_bytes(unknown, ()) == 128


def test_an_operator_of_the_users_own_is_not_taken_for_torchs_of_the_same_name() -> None:
    """It may do anything: what torch's `dot` multiplies and what `empty` leaves out is not known of it."""
    alone = call("mine.dot.default", [spec(4, 4)], [spec(4, 4)])
    assert products_of(alone) == ()
    assert known_flops(alone) is None
    assert moved_bytes(call("mine.empty.default", [spec(4, 4)], [spec(4, 4)]), ()) == 128


def test_what_is_given_as_out_is_written_and_not_read() -> None:
    """FSDP copies what it gathered into parameters: 80 bytes are read, and written to two tensors."""
    whole, half = spec(2, 10), spec(2, 5)
    arguments = '[[{"tensor":0},[5,5],1],{"out":[{"tensor":1},{"tensor":2}]}]'
    copied = Signature(
        "aten.split_with_sizes_copy.out", (whole, half, half), (), arguments, False, True, False
    )
    assert moved_bytes(copied, (1, 2)) == 160
    filled = Signature(
        "aten.add.out", (half, half), (), '[[{"tensor":0}],{"out":{"tensor":1}}]', False, True, False
    )
    assert moved_bytes(filled, (1,)) == 80
