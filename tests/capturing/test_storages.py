"""Storages: what shares memory, what is counted once, what is resized, what a tensor consists of."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from captured_steps import (
    assert_exact,
    bytes_of,
    captured,
    held,
    of_category,
    only_op,
    op_names,
    ops,
    owned_bytes,
    result,
    result_of,
    show,
    signature,
    training,
)
from torch import nn
from torch.utils._pytree import tree_map

from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")


def using(function: Any, width: int = 4, optimizer: Any = torch.optim.SGD) -> Any:
    """Return a build whose model applies `function` to the result of a linear layer."""

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.layer(x))

    return training(Using, 3, width, optimizer=optimizer)


# Views and writes in place --------------------------------------------------------------------------------


def test_views_share_the_storage_of_their_base() -> None:
    def many_views(y: torch.Tensor) -> torch.Tensor:
        left, right = y.chunk(2, dim=-1)
        rows = torch.stack(y.t().unsqueeze(0).squeeze(0)[1:].unbind(0))
        return left.exp() + right.exp() + rows.sum() + y.view(-1)[::2].sum()

    trace = captured(using(many_views))
    layer = only_op(trace, "addmm")
    views = [op for op in ops(trace, phase="forward") if signature(trace, op).view]
    assert {"split", "t", "unsqueeze", "squeeze", "slice", "unbind", "view"} <= set(op_names(trace, views))
    for view in views:
        assert trace.ops[view].creates == (), show(trace)
    # Both halves are read as the storage of the whole.
    for exponential in ops(trace, "exp"):
        assert trace.ops[exponential].reads == (result_of(trace, layer),)


def test_a_view_keeps_its_whole_base_alive() -> None:
    # GIVEN one row of a layer's result that exp's backward does not need, kept in a variable
    def build() -> Step:
        model, inputs, kept = nn.Linear(4, 4), torch.randn(3, 4), []

        def run() -> None:
            kept.clear()
            output = model(inputs)
            kept.append(output.detach()[0])
            output.sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(build)
    assert result(trace, only_op(trace, "addmm")).end is None
    assert result(trace, only_op(trace, "addmm")).bytes == 3 * 4 * 4
    # What was kept in the step before was there at the beginning, and is let go before the first op.
    (before,) = [s for s in trace.storages if s.persistent and s.end == 0]
    assert before.bytes == 3 * 4 * 4


def test_a_write_in_place_allocates_nothing_and_names_what_it_wrote() -> None:
    trace = captured(using(lambda y: y.cos().mul_(2).add_(1)))
    cosine = only_op(trace, "cos")
    for name in ("mul_", "add_"):
        write = only_op(trace, name, phase="forward")
        assert trace.ops[write].writes == (result_of(trace, cosine),)
        assert trace.ops[write].creates == ()
        assert signature(trace, write).in_place


def test_a_write_through_a_view_writes_the_base() -> None:
    def write(y: torch.Tensor) -> torch.Tensor:
        copy = y.clone()
        copy[:, 1:3] = 0
        return copy

    trace = captured(using(write))
    written = [op for op in ops(trace, phase="forward") if trace.ops[op].writes]
    assert written
    base = result_of(trace, only_op(trace, "clone", phase="forward"))
    assert all(trace.ops[op].writes == (base,) for op in written)


def test_an_op_with_an_out_argument_writes_into_it() -> None:
    # GIVEN a buffer of the right size and an empty one, which torch makes large enough
    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.randn(3, 4)
        right_size = torch.empty(3, 4)

        def run() -> torch.Tensor:
            loss = model(inputs).sum()
            loss.backward()
            model.zero_grad()
            with torch.no_grad():
                torch.mm(inputs, model.weight, out=right_size)
                empty = torch.empty(0)
                torch.mm(inputs, model.weight, out=empty)
                assert empty.shape == (3, 4)
            return loss

        return Step(model, None, run)

    trace = captured(build)
    first, second = [op for op in ops(trace, "mm") if trace.op_name(op) == "aten.mm.out"]
    assert trace.ops[first].creates == ()
    assert simulate(trace).live_bytes[second] - simulate(trace).live_bytes[first] == 48
    assert_exact(build)


# Several results ------------------------------------------------------------------------------------------


def test_an_op_with_several_results_makes_a_storage_for_each() -> None:
    trace = captured(training(lambda: nn.LayerNorm(4), 3, 4))
    norm = only_op(trace, "native_layer_norm")
    # The result, and a mean and a deviation per row.
    assert [trace.storages[number].bytes for number in trace.ops[norm].creates] == [48, 12, 12]
    backward = only_op(trace, "native_layer_norm_backward")
    assert set(trace.ops[norm].creates[1:]) <= set(trace.ops[backward].reads)


def test_results_that_are_not_used_die_at_once() -> None:
    trace = captured(using(lambda y: y.max(dim=-1).values, optimizer=torch.optim.SGD))
    values, indices = [trace.storages[number] for number in trace.ops[only_op(trace, "max")].creates]
    assert (values.bytes, indices.bytes) == (3 * 4, 3 * 8)
    # The indices are saved for backward, the values only pass through.
    assert held(values, "autograd") == []
    assert len(held(indices, "autograd")) == 1


def test_a_list_of_results_makes_a_storage_for_each_item() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.randn(3, 4)

        def run() -> None:
            model(inputs).sum().backward()
            torch._foreach_mul([parameter.grad for parameter in model.parameters()], 2.0)
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(build)
    product = only_op(trace, "_foreach_mul")
    assert [trace.storages[number].bytes for number in trace.ops[product].creates] == [64, 16]


# Tied weights ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def tied_step() -> Step:
    model, tokens = Tied(), torch.tensor([[1, 2, 3]])
    optimizer = torch.optim.Adam(model.parameters())
    return Step.of(model, tokens, loss=torch.sum, optimizer=optimizer)


def test_tied_weights_are_counted_once() -> None:
    trace = captured(tied_step)
    weight = 10 * 4 * 4
    assert bytes_of(trace, "parameter") == weight
    assert sum(owned_bytes(trace, module.parameters) for module in trace.modules) == weight
    # One pair of averages, one step counter.
    assert bytes_of(trace, "optimizer_state") == 2 * weight + 4
    # The head's gradient and the embedding's are added up into one.
    assert [gradient.bytes for gradient in of_category(trace, "gradient")] == [weight]
    assert_exact(tied_step)


# Tensor subclasses ----------------------------------------------------------------------------------------


class Pair(torch.Tensor):
    """Two tensors that compute side by side: a wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(
            cls, left.shape, strides=left.stride(), dtype=left.dtype, device=left.device
        )

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left = left
        self.right = right

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(side: str) -> Any:
            unwrap = lambda value: getattr(value, side) if isinstance(value, Pair) else value  # noqa: E731
            return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))

        left, right = run("left"), run("right")
        if func._schema.is_mutable:
            return args[0]
        return Pair(left, right) if isinstance(left, torch.Tensor) else left


class PairLayer(nn.Module):
    """A product with a parameter that is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Pair(torch.randn(4, 4), torch.randn(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def pair_step() -> Step:
    model, inputs = PairLayer(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def run() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Step(model, optimizer, run)


@pytest.fixture(scope="module")
def pair() -> Trace:
    return captured(pair_step)


def test_a_tensor_subclass_is_flattened_into_what_it_consists_of(pair: Trace) -> None:
    assert [storage.bytes for storage in of_category(pair, "parameter")] == [64, 64]
    assert [storage.bytes for storage in of_category(pair, "gradient")] == [64, 64]
    assert [storage.bytes for storage in of_category(pair, "optimizer_state")] == [64, 64]
    assert [owned_bytes(pair, module.parameters) for module in pair.modules] == [128]
    assert all(len(held(gradient, "gradient")) == 1 for gradient in of_category(pair, "gradient"))
    assert_exact(pair_step)


def test_each_op_on_a_tensor_subclass_runs_once_per_part(pair: Trace) -> None:
    forward = op_names(pair, ops(pair, phase="forward"))
    assert forward == ["mm", "mm", "tanh", "tanh", "sum", "sum", "ones_like", "ones_like"]
    assert {pair.module_name(pair.ops[op].module) for op in ops(pair, "tanh_backward")} == {"PairLayer"}


# Sparse gradients -----------------------------------------------------------------------------------------


def sparse_step(optimizer: Any) -> Any:
    def build() -> Step:
        model, tokens = nn.Embedding(100, 8, sparse=True), torch.tensor([[1, 2, 3], [4, 4, 1]])
        chosen = optimizer(model.parameters(), lr=0.1)
        scale = torch.randn(2, 3, 8)

        def run() -> torch.Tensor:
            loss = (model(tokens) * scale).sum()
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            return loss

        return Step(model, chosen, run)

    return build


def test_a_sparse_gradient_is_its_values_and_its_indices() -> None:
    trace = captured(sparse_step(torch.optim.SGD))
    # Six tokens of eight values; nothing of the size of the whole table is made.
    (values,) = [storage for storage in of_category(trace, "gradient") if storage.bytes == 6 * 8 * 4]
    assert held(values, "gradient")[0][1] == len(trace.ops)
    assert max(storage.bytes for storage in trace.storages if not storage.persistent) == 6 * 8 * 4
    update = ops(trace, "add_", phase="optimizer")[-1]
    (table,) = of_category(trace, "parameter")
    assert [trace.storages[number] for number in trace.ops[update].writes] == [table]


def test_the_indices_of_a_sparse_gradient_are_the_tokens_themselves_which_stay_an_input() -> None:
    trace = captured(sparse_step(torch.optim.SGD))
    (tokens,) = [storage for storage in trace.storages if storage.persistent and storage.bytes == 6 * 8]
    assert tokens.category == "input"
    # The gradient ends with zero_grad, at the end of the step; the tokens stay.
    assert all(end == len(trace.ops) for _, end in held(tokens, "gradient"))


def test_coalescing_uses_the_real_number_of_distinct_tokens() -> None:
    trace = captured(sparse_step(torch.optim.SparseAdam))
    coalesce = only_op(trace, "_coalesce")
    assert [trace.storages[number].bytes for number in trace.ops[coalesce].creates] == [6 * 8, 6 * 8 * 4]
    # Tokens 1, 2, 3, 4: four rows of each average are gathered.
    gathered = [result(trace, op).bytes for op in ops(trace, "sparse_mask")]
    assert gathered == [4 * 8 * 4, 4 * 8 * 4]


def sparse_loop(times: int, to_none: bool) -> Any:
    """Rows that are chosen by values, gradients of several backwards, and gradients that are set to zero."""

    def build() -> Step:
        first, table = nn.Linear(16, 32), nn.Embedding(7, 32, sparse=True)
        model, inputs = nn.ModuleList((first, table)), torch.randn(64, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            for _ in range(times):
                hidden = first(inputs)
                chosen = (hidden.detach().abs().sum(-1) * 3).long() % 7
                (hidden + table(chosen)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        return Step(model, optimizer, run)

    return build


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_sparse_gradients_are_added_in_new_memory_and_cleared_to_nothing(times: int, to_none: bool) -> None:
    assert_exact(sparse_loop(times, to_none))


# Resizes --------------------------------------------------------------------------------------------------


def resizing_step() -> Step:
    """Frees the weight between forward and backward and between steps, as sharded training does."""
    model, inputs = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    memory = model.weight.untyped_storage()

    def run() -> int:
        memory.resize_(64)
        output = model(inputs)
        memory.resize_(0)
        assert model.weight.untyped_storage().nbytes() == 0
        loss = output.sum()
        memory.resize_(64)
        assert model.weight.untyped_storage().nbytes() == len(memory) == 64
        loss.backward()
        model.weight.grad = None
        memory.resize_(0)
        return memory.size()

    return Step(model, None, run)


def test_a_storage_that_is_freed_and_restored_is_seen_as_resized() -> None:
    trace = captured(resizing_step)
    names = ["t", "mm", "sum", "ones_like", "expand", "t", "mm", "t", "t"]
    assert op_names(trace) == names
    # GIVEN that the weight is empty before the step
    (weight,) = of_category(trace, "parameter")
    assert (weight.bytes, weight.start, weight.end) == (0, -1, None)
    # THEN it is restored before op 0, freed before op 2, restored before op 3, freed after the last
    assert weight.resizes == ((0, 64), (2, 0), (3, 64), (9, 0))
    # AND the timeline is: input 48, weight 64 or 0, output 48, loss 4, seed 4, gradient 64
    assert simulate(trace).live_bytes == (
        48 + 64,
        48 + 64 + 48,
        48 + 48 + 4,
        *[48 + 64 + 48 + 4 + 4] * 3,
        *[48 + 64 + 48 + 4 + 4 + 64] * 3,
    )
    assert trace.persistent_bytes == 48
    assert_exact(resizing_step)


def test_resizing_a_tensor_beyond_its_memory_makes_new_memory() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.randn(3, 4)

        def run() -> None:
            buffer = torch.empty(2)
            buffer.resize_(1000)
            buffer.resize_(10)
            assert buffer.shape == (10,)
            model(inputs).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(build)
    # Growing allocates while the old memory is still there; shrinking keeps the memory.
    grown = only_op(trace, "resize_")
    assert result(trace, grown).bytes == 4000
    assert result(trace, grown).end == len(trace.ops)
    (old,) = [trace.storages[number] for number in trace.ops[grown].reads]
    assert (old.bytes, old.end) == (8, grown + 1)
    assert_exact(build)


# Copies ---------------------------------------------------------------------------------------------------


def ema_step() -> Step:
    """Keeps an averaged copy of the model."""
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(3, 4)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.1)

    return Step(model, optimizer, run)


def test_a_deep_copy_counts_a_second_time() -> None:
    trace = captured(ema_step)
    parameters = (8 * 4 + 8 + 8 + 8) * 4
    buffers = (8 + 8) * 4 + 8
    assert bytes_of(trace, "parameter") + bytes_of(trace, "buffer") == parameters + buffers
    assert trace.persistent_bytes == 2 * (parameters + buffers) + 3 * 4 * 4
    # The copies are written by the averaging, which is part of the optimizer's phase.
    averaging = ops(trace, "lerp_")
    assert len(averaging) == 4
    assert {trace.ops[op].phase for op in averaging} == {"optimizer"}
    assert_exact(ema_step)


def test_a_deep_copy_of_a_tensor_that_is_no_parameter_copies_its_storage_and_values() -> None:
    answers = []

    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.randn(3, 4)
        mask = torch.tensor([True, False, True, True])

        def run() -> None:
            copied = copy.deepcopy({"mask": mask, "again": mask[1:]})
            answers.append(copied["mask"].tolist() + copied["again"].tolist())
            model(inputs).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(build)
    assert set(map(tuple, answers)) == {(True, False, True, True, False, True, True)}
    # Both views are of one storage, which is copied once.
    cloned = only_op(trace, "storage.clone")
    assert result(trace, cloned).bytes == 4
    assert_exact(build)


def test_memory_that_numpy_owns_is_not_the_allocators() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.from_numpy(numpy.ones((3, 4), dtype=numpy.float32))
        return Step.of(model, inputs, loss=torch.sum)

    trace = captured(build)
    assert trace.persistent_bytes == (4 * 4 + 4) * 4
    assert_exact(build)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchs_zero_tensors_and_views_of_them_have_no_memory(device: str) -> None:
    # GIVEN what forward-mode gradients use for "no tangent": a tensor of zeros without any memory
    def adds_zeros(y: torch.Tensor) -> torch.Tensor:
        zeros = torch._efficientzerotensor((1024, 1024))
        assert zeros.t()[1:].view(1023, 1024)._is_zerotensor()
        return y

    with_zeros, without = captured(using(adds_zeros), device), captured(using(lambda y: y), device)
    assert simulate(with_zeros).peak_bytes == simulate(without).peak_bytes


def test_a_batch_norm_of_data_makes_no_gradient_of_the_data_on_a_cpu() -> None:
    build = training(lambda: nn.BatchNorm1d(64), 200, 64, 50)
    assert_exact(build)
    trace = captured(build)
    created = trace.ops[only_op(trace, "native_batch_norm_backward")].creates
    assert [trace.storages[number].bytes for number in created] == [256, 256]


def test_a_gpu_makes_the_gradient_of_known_data_that_the_cpu_leaves_out() -> None:
    """Where values are known, the CPU's kernel runs, and returns nothing where the GPU's returns a tensor."""

    def build() -> Step:
        model = nn.BatchNorm1d(4).cuda()
        return Step.of(model, torch.ones(8, 4, device="cuda"), loss=torch.sum)

    trace = captured(build, "cuda")
    assert len(trace.ops[only_op(trace, "native_batch_norm_backward")].creates) == 3
