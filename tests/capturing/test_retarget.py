"""Capturing for a GPU without one: code, optimizers, autocast and kernels behave as they do there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captured_steps import (
    bytes_of,
    captured,
    inside,
    of_category,
    only_op,
    op_names,
    ops,
    owned_bytes,
    result,
    show,
    signature,
    training,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trainfit.devices.device_table import find_device
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")

CUDA = torch.device("cuda", 0)
LOW = torch.bfloat16


def on_gpu(question: Callable[[], Any]) -> Any:
    """Return what `question` answers while a capture for a GPU runs."""
    return inside(question, "cuda")


def captured_on_gpu(make_model: Callable[[], nn.Module], *shape: int, **options: Any) -> Trace:
    """Capture the plainest step of a model for a GPU."""
    return captured(training(make_model, *shape, **options), "cuda")


# Where tensors are ----------------------------------------------------------------------------------------


def _in_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(3)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.zeros(3, device="cuda"), id="device=cuda"),
        pytest.param(lambda: torch.zeros(3, device="cuda:0"), id="device=cuda:0"),
        pytest.param(lambda: torch.zeros(3, device=torch.device("cuda")), id="device=torch.device"),
        pytest.param(lambda: torch.zeros(3, device=0), id="device=0"),
        pytest.param(lambda: torch.tensor([1.0], device="cuda"), id="torch.tensor"),
        pytest.param(lambda: torch.as_tensor([1.0], device="cuda"), id="torch.as_tensor"),
        pytest.param(lambda: torch.zeros(3).cuda(), id=".cuda()"),
        pytest.param(lambda: torch.zeros(3).cuda(0, non_blocking=True), id=".cuda(0)"),
        pytest.param(lambda: torch.zeros(3).to("cuda"), id=".to(cuda)"),
        pytest.param(lambda: torch.zeros(3).to(0), id=".to(0)"),
        pytest.param(lambda: torch.zeros(3).to("cuda", torch.float16), id=".to(cuda, dtype)"),
        pytest.param(lambda: torch.zeros(3).to(device="cuda", dtype=torch.float16), id=".to(device=cuda)"),
        pytest.param(lambda: torch.zeros(3).to(torch.ones(1, device="cuda")), id=".to(tensor)"),
        pytest.param(lambda: torch.zeros(3).pin_memory().to("cuda", non_blocking=True), id="pinned"),
        pytest.param(lambda: torch.zeros_like(torch.ones(2, device="cuda")), id="zeros_like"),
        pytest.param(lambda: torch.ones(2, device="cuda").new_zeros(3), id="new_zeros"),
        pytest.param(lambda: nn.Linear(2, 2).cuda().weight, id="module.cuda()"),
        pytest.param(lambda: nn.Linear(2, 2).to("cuda").weight, id="module.to(cuda)"),
        pytest.param(lambda: nn.Linear(2, 2).to("cuda", torch.bfloat16).weight, id="module.to(cuda, dtype)"),
        pytest.param(lambda: nn.Linear(2, 2, device="cuda").weight, id="module(device=cuda)"),
        pytest.param(lambda: copy.deepcopy(nn.Linear(2, 2).cuda()).weight, id="deepcopy"),
        pytest.param(_in_context, id="with torch.device"),
        pytest.param(
            lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(3)),
            id="generator",
        ),
    ],
)
def test_a_tensor_put_on_the_gpu_says_that_it_is_there(make: Callable[[], torch.Tensor]) -> None:
    def question() -> tuple[Any, ...]:
        tensor = make()
        return tensor.device, tensor.is_cuda, tensor.is_cpu, tensor.get_device(), tensor.device.type

    assert on_gpu(question) == (CUDA, True, False, 0, "cuda")


@pytest.mark.parametrize(
    ("move", "place"),
    [
        pytest.param(lambda tensor: tensor.cuda(), "cuda", id=".cuda()"),
        pytest.param(lambda tensor: tensor.to("cuda"), "cuda", id=".to(cuda)"),
        pytest.param(lambda tensor: tensor.to(device=0, dtype=LOW), "cuda", id=".to(0, dtype)"),
        pytest.param(lambda tensor: tensor.to(torch.ones(2)), "cuda", id=".to(tensor)"),
        pytest.param(lambda tensor: tensor.to(torch.ones(2, device="cpu")), "cpu", id=".to(host's tensor)"),
        pytest.param(lambda tensor: torch.as_tensor(tensor, device="cuda"), "cuda", id="as_tensor"),
        pytest.param(lambda tensor: torch.zeros_like(tensor, device="cuda"), "cuda", id="zeros_like"),
        pytest.param(lambda tensor: tensor.new_zeros(3, device="cuda"), "cuda", id="new_zeros"),
        pytest.param(lambda tensor: tensor.half() + 1, "cpu", id="not moved"),
    ],
)
@pytest.mark.parametrize("origin", ["cpu", "cuda"])
def test_a_tensor_is_where_it_was_moved_to(
    move: Callable[[torch.Tensor], torch.Tensor], place: str, origin: str, request: pytest.FixtureRequest
) -> None:
    moved = on_gpu(lambda: move(torch.zeros(300, 300, device=origin)).device.type)
    assert moved == (origin if "not moved" in request.node.name else place)


def test_a_batch_moved_to_the_gpu_in_each_step_takes_memory_there() -> None:
    def build() -> Step:
        model, batch = nn.Linear(300, 300), torch.ones(64, 300, device="cpu")

        def run() -> None:
            model(batch.to("cuda")).sum().backward()

        return Step(model, None, run)

    trace = captured(build, "cuda")
    copied = trace.ops[only_op(trace, "_to_copy")]
    assert [trace.storages[number].bytes for number in copied.creates] == [64 * 300 * 4]


class Twice(torch.autograd.Function):
    """Doubles, and asks for devices in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        assert saved.is_cuda
        assert gradients[0].device == CUDA
        return gradients[0] * torch.full((), 2.0, device="cuda")


def test_in_backward_tensors_are_on_the_gpu_too() -> None:
    def question() -> list[Any]:
        seen: list[Any] = []
        leaf = torch.ones(3, requires_grad=True)
        leaf.register_hook(lambda gradient: seen.append(gradient.device))
        Twice.apply(leaf).sum().backward()
        torch.autograd.grad(Twice.apply(leaf).sum(), leaf)
        return seen

    assert on_gpu(question) == [CUDA, CUDA]


def test_a_checkpoint_within_a_checkpoint_finds_the_same_devices_again() -> None:
    def inner(tensor: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: Twice.apply(x).exp(), tensor, use_reentrant=False).sin()

    class Nested(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, super().forward(x), use_reentrant=False)

    assert len(ops(captured_on_gpu(lambda: Nested(4, 4), 3, 4), "exp")) == 3


@pytest.mark.parametrize("pin_memory", [False, True])
def test_activations_saved_on_the_host_take_no_gpu_memory(pin_memory: bool) -> None:
    class Offloaded(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory):
                return super().forward(x)

    def peak(kind: type[nn.Module]) -> int:
        layers = [nn.Tanh() for _ in range(9)]
        trace = captured_on_gpu(lambda: kind(nn.Linear(4, 4), *layers), 40000, 4)
        return simulate(trace).peak_bytes

    activation = 40000 * 4 * 4
    # In backward there are a gradient, the one before it, and the activation that came back.
    assert peak(nn.Sequential) >= 10 * activation
    assert peak(Offloaded) <= 5 * activation


def test_moving_to_a_dtype_as_well_changes_the_dtype() -> None:
    assert on_gpu(lambda: torch.zeros(3).to("cuda", torch.float16).dtype) is torch.float16
    assert on_gpu(lambda: torch.zeros(3).to(device=0, dtype=torch.float16).dtype) is torch.float16
    assert on_gpu(lambda: nn.Linear(2, 2).to("cuda", torch.bfloat16).weight.dtype) is torch.bfloat16


def test_the_default_device_can_be_the_gpu() -> None:
    def question() -> tuple[Any, ...]:
        torch.set_default_device("cuda")
        try:
            return nn.Linear(2, 2).weight.device, torch.arange(3).is_cuda, torch.get_default_device().type
        finally:
            torch.set_default_device(None)

    assert on_gpu(question) == (CUDA, True, "cuda")


def test_code_that_branches_on_the_device_takes_the_gpus_branch() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            y = y.exp() if x.is_cuda else y.sin()
            y = y.tanh() if x.device.type == "cuda" else y.sin()
            return y.sigmoid() if torch.cuda.is_available() else y.sin()

    trace = captured_on_gpu(Branching, 3, 4)
    forward = op_names(trace, ops(trace, phase="forward"))
    assert {"exp", "tanh", "sigmoid"} <= set(forward)
    assert "sin" not in forward
    on_cpu = captured(training(Branching, 3, 4))
    assert {"exp", "tanh"}.isdisjoint(op_names(on_cpu, ops(on_cpu, phase="forward")))


def test_values_can_be_read_back_from_the_gpu() -> None:
    assert on_gpu(lambda: torch.arange(3, device="cuda").sum().item()) == 3
    assert on_gpu(lambda: torch.arange(3, device="cuda").cpu().numpy().tolist()) == [0, 1, 2]
    assert on_gpu(lambda: torch.arange(3, device="cuda").tolist()) == [0, 1, 2]


def test_a_whole_training_script_for_the_gpu_is_captured_without_one() -> None:
    def build() -> Step:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        assert device.type == "cuda"
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=4)

        def run() -> None:
            for (batch,) in loader:
                model(batch.to(device, non_blocking=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()

        return Step(model, optimizer, run)

    trace = captured(build, "cuda")
    assert trace.device == "cuda"
    assert bytes_of(trace, "parameter") == 2 * 512


def test_the_counter_of_a_batch_norm_is_on_the_gpu_but_a_plain_scalar_is_not() -> None:
    def question() -> list[str]:
        return [t.device.type for t in (nn.BatchNorm1d(4).num_batches_tracked, torch.tensor(0))]

    assert on_gpu(question) == ["cuda", "cpu"]


def test_what_stays_on_the_host_takes_no_gpu_memory() -> None:
    # GIVEN a model that is explicitly on the host, too large for its values to be known, but for one factor
    class Mostly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(300, 300, device="cpu"), nn.Tanh(), nn.Linear(300, 300, device="cpu")]
            self.on_host = nn.Sequential(*layers)
            self.factor = nn.Parameter(torch.ones(1, device="cuda"))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.on_host(inputs).sum().cuda() * self.factor

    def build() -> Step:
        return Step.of(Mostly(), torch.randn(8, 300, device="cpu"), loss=torch.sum)

    # THEN it is captured, backward included, and only the factor is on the GPU: one block of its allocator
    trace = captured(build, "cuda")
    assert only_op(trace, "tanh_backward")
    assert bytes_of(trace, "parameter") == bytes_of(trace, "gradient") == 512


def test_inside_vmap_a_tensor_is_where_the_one_outside_is() -> None:
    def question() -> list[str]:
        seen = []

        def look(on_gpu: torch.Tensor, on_host: torch.Tensor) -> torch.Tensor:
            seen.extend([on_gpu.device.type, on_host.device.type, on_host.cuda().device.type])
            return on_gpu.new_ones(2)

        torch.vmap(torch.vmap(look))(torch.ones(3, 2), torch.ones(3, 2, device="cpu"))
        return seen

    assert on_gpu(question) == ["cuda", "cpu", "cuda"]


# torch.cuda -----------------------------------------------------------------------------------------------


def test_torch_cuda_answers_as_if_there_were_one_modern_gpu() -> None:
    def question() -> list[Any]:
        cuda = torch.cuda
        return [
            cuda.is_available(),
            cuda.device_count(),
            cuda.current_device(),
            cuda.is_bf16_supported(),
            cuda.get_device_capability() >= (8, 0),
            isinstance(cuda.get_device_name(0), str),
            cuda.get_device_properties(0).total_memory > 2**30,
            cuda.mem_get_info()[1] > 2**30,
            cuda.memory_allocated() >= 0,
            cuda.max_memory_allocated() >= 0,
            torch.accelerator.current_accelerator().type,
        ]

    assert on_gpu(question) == [True, 1, 0, True, *[True] * 6, "cuda"]


def _stream() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.ones(2, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    tensor.record_stream(side)


def _timing() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _device() -> None:
    with torch.cuda.device(0):
        torch.ones(2, device="cuda")


def _marks() -> None:
    torch.cuda.nvtx.range_push("forward")
    torch.cuda.nvtx.range_pop()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda: torch.cuda.synchronize(), id="synchronize"),
        pytest.param(lambda: torch.cuda.empty_cache(), id="empty_cache"),
        pytest.param(lambda: torch.cuda.reset_peak_memory_stats(), id="reset_peak_memory_stats"),
        pytest.param(lambda: torch.cuda.manual_seed(1), id="manual_seed"),
        pytest.param(lambda: torch.cuda.set_rng_state(torch.cuda.get_rng_state()), id="rng state"),
        pytest.param(lambda: torch.cuda.ipc_collect(), id="ipc_collect"),
        pytest.param(lambda: torch.cuda.memory_summary(), id="memory_summary"),
        pytest.param(lambda: torch.random.fork_rng(devices=[0]).__enter__(), id="fork_rng"),
        pytest.param(_stream, id="streams"),
        pytest.param(_timing, id="events"),
        pytest.param(_device, id="device context"),
        pytest.param(_marks, id="nvtx ranges"),
    ],
)
def test_what_scripts_do_to_the_gpu_itself_works_without_one(use: Callable[[], Any]) -> None:
    on_gpu(use)


# Autocast -------------------------------------------------------------------------------------------------


def _full(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


def _low(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to(LOW)


_IN_LOWER_PRECISION: dict[str, Callable[[], torch.Tensor]] = {
    "matmul": lambda: _full(4, 4) @ _full(4, 4),
    "linear": lambda: F.linear(_full(2, 4), _full(3, 4), _full(3)),
    "conv2d": lambda: F.conv2d(_full(1, 2, 8, 8), _full(3, 2, 3, 3)),
    "bmm": lambda: torch.bmm(_full(2, 3, 4), _full(2, 4, 3)),
    "addmm": lambda: torch.addmm(_full(3), _full(2, 4), _full(4, 3)),
    "mv": lambda: _full(3, 4) @ _full(4),
    "einsum": lambda: torch.einsum("ab,bc->ac", _full(2, 3), _full(3, 4)),
    "prelu": lambda: F.prelu(_full(2, 3), _full(3)),
    "lstm cell": lambda: nn.LSTMCell(4, 4)(_full(2, 4))[0],
}
_IN_FULL_PRECISION: dict[str, Callable[[], torch.Tensor]] = {
    "softmax": lambda: _low(2, 4).softmax(-1),
    "log_softmax": lambda: F.log_softmax(_low(2, 4), -1),
    "layer_norm": lambda: F.layer_norm(_low(2, 4), (4,)),
    "group_norm": lambda: F.group_norm(_low(2, 4, 3), 2),
    "sum": lambda: _low(2, 4).sum(),
    "sum over a dimension": lambda: _low(2, 4).sum(-1),
    "cumsum": lambda: _low(4).cumsum(0),
    "prod": lambda: _low(4).prod(),
    "norm": lambda: _low(4).norm(),
    "vector_norm": lambda: torch.linalg.vector_norm(_low(4)),
    "exp": lambda: _low(2).exp(),
    "log": lambda: _low(2).log(),
    "pow": lambda: _low(2).pow(2),
    "rsqrt": lambda: _low(2).rsqrt(),
    "softplus": lambda: F.softplus(_low(4)),
    "mse_loss": lambda: F.mse_loss(_low(4), _low(4)),
    "cross_entropy": lambda: F.cross_entropy(_low(2, 4), torch.tensor([1, 2])),
    "cosine_similarity": lambda: F.cosine_similarity(_low(2, 4), _low(2, 4)),
    "embedding of fp32 weights": lambda: F.embedding(torch.tensor([1]), _full(3, 4)),
}
_AS_IT_COMES: dict[str, Callable[[], torch.Tensor]] = {
    "gelu": lambda: F.gelu(_low(4)),
    "silu": lambda: F.silu(_low(4)),
    "mean": lambda: _low(4).mean(),
    "dropout": lambda: F.dropout(_low(4)),
    "product": lambda: _low(4) * _low(4),
    "max_pool2d": lambda: F.max_pool2d(_low(1, 1, 4, 4), 2),
    "batch_norm": lambda: F.batch_norm(_low(4, 3), None, None, training=True),
    "rms_norm": lambda: F.rms_norm(_low(2, 4), (4,)),
    "addcdiv": lambda: torch.addcdiv(_low(4), _low(4), _low(4)),
    # On the CPU's list of fp32 operators, but not on the GPU's:
}
_WIDEST: dict[str, Callable[[], torch.Tensor]] = {
    "sum of two": lambda: _low(4) + _full(4),
    "cat": lambda: torch.cat([_low(4), _full(4)]),
    "stack": lambda: torch.stack([_low(4), _full(4)]),
    "addcmul": lambda: torch.addcmul(_low(4), _full(4), _low(4)),
    "dot": lambda: torch.dot(_low(4), _full(4)),
    "scatter_add": lambda: torch.scatter_add(_low(4), 0, torch.tensor([0, 1]), _full(2)),
}


def _autocast_cases() -> list[Any]:
    found = []
    for dtype, table in (
        (LOW, _IN_LOWER_PRECISION),
        (torch.float32, _IN_FULL_PRECISION),
        (LOW, _AS_IT_COMES),
        (torch.float32, _WIDEST),
    ):
        found += [pytest.param(function, dtype, id=name) for name, function in table.items()]
    return found


@pytest.mark.parametrize(("function", "dtype"), _autocast_cases())
def test_autocast_follows_the_gpus_lists(function: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
    def question() -> torch.dtype:
        with torch.autocast("cuda", LOW):
            return function().dtype

    assert on_gpu(question) is dtype


def test_autocast_for_the_gpu_is_float16_unless_told_otherwise() -> None:
    def question() -> list[Any]:
        with torch.autocast("cuda"):
            product = (_full(2, 2) @ _full(2, 2)).dtype
            return [product, torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")]

    assert on_gpu(question) == [torch.float16, torch.float16, True]


def test_outside_of_autocast_its_dtype_is_the_gpus_default() -> None:
    assert on_gpu(lambda: torch.get_autocast_dtype("cuda")) is torch.float16
    assert on_gpu(lambda: torch.is_autocast_enabled("cuda")) is False


def test_asking_for_autocast_without_a_device_means_the_gpu() -> None:
    def question() -> bool:
        with torch.autocast("cuda", LOW):
            return torch.is_autocast_enabled()

    assert on_gpu(question) is True


def test_autocast_can_be_switched_off_inside() -> None:
    def question() -> torch.dtype:
        with torch.autocast("cuda", LOW), torch.autocast("cuda", enabled=False):
            return (_full(2, 2) @ _full(2, 2)).dtype

    assert on_gpu(question) is torch.float32


def test_autocast_casts_a_weight_once_per_step() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", LOW):
                return self.layer(self.layer(x)).float()

    trace = captured_on_gpu(Shared, 3, 4)
    (weight,) = [n for n, storage in enumerate(trace.storages) if storage.category == "parameter"]
    casts = [op for op in ops(trace, "_to_copy", phase="forward") if weight in trace.ops[op].reads]
    assert len(casts) == 1, show(trace)


# Optimizers and sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_work_on_lists_of_tensors_by_default_on_a_gpu_only(optimizer: Any) -> None:
    build = training(lambda: nn.Linear(4, 4), 3, 4, optimizer=optimizer)
    on_gpu, on_cpu = captured(build, "cuda"), captured(build, "cpu")
    assert any(name.startswith("_foreach_") for name in op_names(on_gpu, ops(on_gpu, phase="optimizer")))
    assert not any(name.startswith("_foreach_") for name in op_names(on_cpu, ops(on_cpu, phase="optimizer")))


def test_clipping_gradients_moves_nothing_to_the_host() -> None:
    def build() -> Step:
        model = nn.Linear(300, 300)

        def run() -> None:
            model(torch.ones(3, 300)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        return Step(model, None, run)

    trace = captured(build, "cuda")
    assert only_op(trace, "_foreach_norm")
    assert "_to_copy" not in op_names(trace)


def test_a_fused_optimizer_is_one_op() -> None:
    def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr, fused=True)

    trace = captured_on_gpu(lambda: nn.Linear(4, 4, device="cuda"), 3, 4, optimizer=adam)
    names = op_names(trace, ops(trace, phase="optimizer"))
    assert names.count("_fused_adam_") == 1
    # It needs no memory of its own.
    fused = only_op(trace, "_fused_adam_")
    assert trace.ops[fused].creates == ()


def test_sizes_are_rounded_up_to_the_gpu_allocators_blocks() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            lengths = (1, 128, 129, 0)
            self.parameters_ = nn.ParameterList(nn.Parameter(torch.ones(n, device="cuda")) for n in lengths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(p.sum() for p in self.parameters_)

    trace = captured_on_gpu(Sizes, 1)
    sizes = [trace.memory.occupied(storage.bytes) for storage in of_category(trace, "parameter")]
    assert sizes == [512, 512, 1024, 0]
    assert {byte % 512 for byte in trace.occupied_bytes} == {0} != {s.bytes % 512 for s in trace.storages}
    # Modules count what is allocated for them.
    assert sum(owned_bytes(trace, module.parameters) for module in trace.modules) == sum(sizes)


def test_the_memory_of_a_small_bf16_model_with_adam_is_what_one_computes_by_hand() -> None:
    # GIVEN a bf16 layer of 512 x 512 with a bias, a batch of 256 rows, and Adam
    rows, width, item = 256, 512, 2

    def build() -> Step:
        model = nn.Linear(width, width, device="cuda", dtype=LOW)
        inputs = torch.randn(rows, width, device="cuda", dtype=LOW)
        optimizer = torch.optim.Adam(model.parameters())

        def run() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = captured(build, "cuda")
    # THEN parameters and gradients are the weight and the bias, both multiples of 512 bytes
    parameters = width * width * item + width * item
    assert bytes_of(trace, "parameter") == bytes_of(trace, "gradient") == parameters
    # AND Adam keeps two averages of each, and a step counter per parameter, a block each
    state = 2 * parameters
    assert bytes_of(trace, "optimizer_state") == state
    inputs = rows * width * item
    assert trace.persistent_bytes == parameters + state + inputs
    # AND at the end of backward there are also the gradients, the loss and the gradient of the loss
    timeline = simulate(trace)
    first_of_optimizer = min(ops(trace, phase="optimizer"))
    assert timeline.live_bytes[first_of_optimizer] - trace.persistent_bytes == parameters
    output = result(trace, only_op(trace, "addmm"))
    assert output.bytes == rows * width * item


# Kernels --------------------------------------------------------------------------------------------------


def test_dropout_keeps_a_mask_of_one_byte_per_element() -> None:
    trace = captured_on_gpu(lambda: nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5)), 256, 512)
    values, mask = [trace.storages[n] for n in trace.ops[only_op(trace, "native_dropout")].creates]
    assert (values.bytes, mask.bytes) == (256 * 512 * 4, 256 * 512)
    mask_number = trace.ops[only_op(trace, "native_dropout")].creates[1]
    assert mask_number in trace.ops[only_op(trace, "native_dropout_backward")].reads


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)], ids=["p=0", "evaluation"])
def test_dropout_that_drops_nothing_runs_nothing(p: float, train: bool) -> None:
    trace = captured_on_gpu(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(p).train(train)), 3, 4)
    assert "native_dropout" not in op_names(trace)


@pytest.mark.parametrize("rows", [2, 4096], ids=["known values", "unknown values"])
def test_rms_norm_is_one_kernel_that_keeps_one_value_per_row(rows: int) -> None:
    trace = captured_on_gpu(lambda: nn.RMSNorm(64), rows, 64)
    norm = only_op(trace, "_fused_rms_norm")
    values, deviations = [trace.storages[number] for number in trace.ops[norm].creates]
    assert values.bytes == rows * 64 * 4
    assert deviations.bytes == rows * 4
    assert only_op(trace, "_fused_rms_norm_backward")


def test_rms_norm_with_weights_of_another_dtype_runs_as_a_formula() -> None:
    def build() -> Step:
        model, inputs = nn.RMSNorm(64), torch.randn(8, 64, dtype=LOW)
        return Step.of(model, inputs, loss=torch.sum)

    trace = captured(build, "cuda")
    assert "_fused_rms_norm" not in op_names(trace)
    assert "rsqrt" in op_names(trace)


@pytest.mark.parametrize("width", [3, 300], ids=["known values", "unknown values"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_as_one_cudnn_kernel(kind: type[nn.RNNBase], width: int) -> None:
    trace = captured_on_gpu(
        lambda: kind(width, width, num_layers=2), 5, 4, width, loss=lambda output: output[0].sum()
    )
    forward = only_op(trace, "_cudnn_rnn")
    assert signature(trace, forward).outputs[0].shape == (5, 4, width)
    backward = only_op(trace, "_cudnn_rnn_backward")
    assert trace.ops[backward].forward_op == forward
    # Every weight and bias of both layers gets a gradient.
    assert bytes_of(trace, "gradient") >= bytes_of(trace, "parameter")
    assert {"mm", "addmm"}.isdisjoint(op_names(trace))


def test_a_histogram_of_integers_is_counted_as_on_a_gpu() -> None:
    def counts(values: list[int], **options: Any) -> list[int]:
        histogram = torch.histc(torch.tensor(values, dtype=torch.int32), **options)
        assert histogram.dtype is torch.int32
        return histogram.tolist()

    # The tokens of each of four experts; the fifth does not exist.
    assert on_gpu(lambda: counts([3, 0, 1, 3, 3, 4], bins=4, min=0, max=3)) == [1, 1, 0, 3]
    assert on_gpu(lambda: counts([2, 7, 6], bins=5)) == [1, 0, 0, 0, 2]
    assert on_gpu(lambda: counts([5, 5], bins=2)) == [0, 2]
    assert on_gpu(lambda: torch.histc(torch.tensor([0.5, 2.5]), bins=3, max=3).tolist()) == [1, 0, 1]
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.histc(torch.tensor([1, 2]))


@pytest.mark.parametrize("rows", [64, 4096], ids=["known values", "unknown values"])
def test_results_have_the_form_that_the_gpus_kernels_give_them(rows: int) -> None:
    # GIVEN operators that keep other things for backward on the CPU
    def build() -> Step:
        model = nn.Sequential(nn.LayerNorm(64, dtype=LOW), nn.BatchNorm1d(64, dtype=LOW), nn.LogSigmoid())
        return Step.of(model, torch.randn(rows, 64, dtype=LOW), loss=torch.sum)

    trace = captured(build, "cuda")
    # THEN norms keep their statistics in fp32
    for norm in ("native_layer_norm", "native_batch_norm"):
        statistics = signature(trace, only_op(trace, norm)).outputs[1:]
        assert [spec.dtype for spec in statistics] == ["float32", "float32"]
    # AND the logarithm keeps nothing besides its input
    assert signature(trace, only_op(trace, "log_sigmoid_forward")).outputs[1].shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "stride"),
    [
        pytest.param(torch.float32, (1024, 1, 64, 4), id="fp32"),
        pytest.param(LOW, (1024, 1, 64, 4), id="bf16"),
        pytest.param(torch.float64, (1024, 256, 16, 1), id="fp64"),
    ],
)
def test_convolutions_keep_channels_last_except_in_fp64(dtype: torch.dtype, stride: tuple[int, ...]) -> None:
    def build() -> Step:
        model = nn.Conv2d(8, 4, 3, padding=1, dtype=dtype)
        inputs = torch.randn(64, 8, 16, 16, dtype=dtype).to(memory_format=torch.channels_last)
        return Step.of(model, inputs, loss=torch.sum)

    trace = captured(build, "cuda")
    assert signature(trace, only_op(trace, "convolution")).outputs[0].stride == stride


@pytest.mark.parametrize("rows", [2, 64])
def test_amds_convolutions_are_contiguous_whatever_was_captured_before(rows: int) -> None:
    """Also where the values are known, and where torch's fake tensors remember NVIDIA's answer."""

    def build() -> Step:
        model = nn.Conv2d(8, 4, 3, padding=1)
        inputs = torch.randn(rows, 8, 16, 16).to(memory_format=torch.channels_last)
        return Step.of(model, inputs, loss=torch.sum)

    for name, stride in (("h100", (1024, 1, 64, 4)), ("mi325x", (1024, 256, 16, 1))):
        trace = captured(build, find_device(name))
        assert signature(trace, only_op(trace, "convolution")).outputs[0].stride == stride
        # WHEN a result is read, it lies as it was made
        assert signature(trace, only_op(trace, "sum")).inputs[0].stride == stride
        assert trace.architecture == find_device(name).architecture


def test_group_norm_makes_channels_last_contiguous() -> None:
    """The copy is the program's until backward: the norm keeps it."""

    def build() -> Step:
        model = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.GroupNorm(2, 4))
        inputs = torch.randn(64, 8, 16, 16)
        return Step.of(model.to(memory_format=torch.channels_last), inputs, loss=torch.sum)

    trace = captured(build, "cuda")
    norm = signature(trace, only_op(trace, "native_group_norm"))
    assert norm.inputs[0].stride == norm.outputs[0].stride == (1024, 256, 16, 1)
    copied = next(op for op in range(len(trace.ops)) if trace.op_name(op) == "aten.clone.default")
    assert signature(trace, copied).inputs[0].stride == (1024, 1, 64, 4)
    (copy,) = trace.ops[copied].creates
    assert any(trace.op_name(op) == "aten.native_group_norm_backward.default" for op in trace.readers[copy])


def test_a_kernel_that_the_cpu_lacks_in_16_bits_is_captured_with_small_values_too() -> None:
    def build() -> Step:
        model = nn.Sequential(nn.Conv3d(2, 2, 1), nn.AvgPool3d(2)).to(LOW)
        return Step.of(model, torch.randn(1, 2, 4, 4, 4, dtype=LOW), loss=torch.sum)

    trace = captured(build, "cuda")
    assert signature(trace, only_op(trace, "avg_pool3d")).outputs[0].shape == (1, 2, 2, 2, 2)


# Attention ------------------------------------------------------------------------------------------------

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
FORMULA = "bmm"


class Attention(nn.Module):
    """Attention between two parameters."""

    def __init__(
        self, query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(query, dtype=dtype))
        self.key = nn.Parameter(torch.zeros(key, dtype=dtype))
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {name: value() if callable(value) else value for name, value in self.options.items()}
        return F.scaled_dot_product_attention(self.query * 1, self.key * 1, self.key * 2, **options)


def attention_kernels(
    query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, **options: Any
) -> Trace:
    return captured_on_gpu(lambda: Attention(query, key, dtype, **options), 1, loss=lambda y: y.float().sum())


_SHAPE = (2, 4, 256, 64)


def _boolean_mask() -> torch.Tensor:
    return torch.ones(256, 256, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kernel", "query", "key", "dtype", "options"),
    [
        pytest.param(FLASH, _SHAPE, _SHAPE, torch.bfloat16, {}, id="bf16"),
        pytest.param(FLASH, _SHAPE, _SHAPE, torch.float16, {}, id="fp16"),
        pytest.param(FLASH, _SHAPE, _SHAPE, torch.bfloat16, {"is_causal": True}, id="causal"),
        pytest.param(FLASH, _SHAPE, _SHAPE, torch.bfloat16, {"dropout_p": 0.1}, id="dropout"),
        pytest.param(FLASH, (1, 4, 256, 256), (1, 4, 256, 256), torch.bfloat16, {}, id="head of 256"),
        pytest.param(FLASH, (2, 8, 256, 60), (2, 8, 256, 60), torch.bfloat16, {}, id="head of 60, padded"),
        pytest.param(FLASH, (2, 8, 256, 64), (2, 2, 256, 64), LOW, {"enable_gqa": True}, id="grouped heads"),
        pytest.param(FLASH, (2, 4, 256, 64), (2, 4, 100, 64), LOW, {}, id="cross attention"),
        pytest.param(EFFICIENT, _SHAPE, _SHAPE, torch.float32, {}, id="fp32"),
        pytest.param(EFFICIENT, _SHAPE, _SHAPE, torch.float32, {"dropout_p": 0.1}, id="fp32 with dropout"),
        pytest.param(EFFICIENT, _SHAPE, _SHAPE, LOW, {"attn_mask": _boolean_mask}, id="boolean mask"),
        pytest.param(
            EFFICIENT, _SHAPE, _SHAPE, LOW, {"attn_mask": lambda: torch.zeros(256, 256, dtype=LOW)}, id="bias"
        ),
        pytest.param(EFFICIENT, (1, 2, 256, 512), (1, 2, 256, 512), LOW, {}, id="head of 512"),
        pytest.param(FORMULA, _SHAPE, _SHAPE, torch.float64, {}, id="fp64"),
        pytest.param(FORMULA, (2, 8, 256, 62), (2, 8, 256, 62), torch.float32, {}, id="fp32, head of 62"),
        pytest.param(
            FORMULA,
            (2, 8, 256, 64),
            (2, 2, 256, 64),
            torch.float32,
            {"enable_gqa": True},
            id="fp32 with grouped heads",
        ),
    ],
)
def test_the_attention_kernel_is_the_one_that_a_gpu_chooses(
    kernel: str, query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    trace = attention_kernels(query, key, dtype, **options)
    names = set(op_names(trace))
    chosen = {name for name in (FLASH, EFFICIENT, FORMULA) if name in names}
    assert chosen == {kernel}
    if kernel != FORMULA:
        assert only_op(trace, f"{kernel}_backward")
        # Nothing of the size of the scores is made, where that is more than a query.
        scores = query[0] * query[1] * query[2] * key[2] * dtype.itemsize
        if key[2] >= 4 * query[3] and "attn_mask" not in options:
            assert all(storage.bytes < scores for storage in trace.storages)


@pytest.mark.parametrize(
    ("backend", "kernel"), [(SDPBackend.MATH, FORMULA), (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT)]
)
def test_a_backend_that_the_user_chose_is_used(backend: SDPBackend, kernel: str) -> None:
    class Chosen(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return super().forward(x)

    trace = captured_on_gpu(lambda: Chosen(_SHAPE, _SHAPE, LOW), 1, loss=lambda y: y.float().sum())
    assert kernel in op_names(trace)
    assert FLASH not in op_names(trace)


@pytest.mark.parametrize("dtype", [LOW, torch.float32], ids=["flash", "efficient"])
def test_attention_of_a_model_small_enough_to_be_known_is_captured(dtype: torch.dtype) -> None:
    # There is no such kernel on the CPU to compute the known values with.
    trace = attention_kernels((1, 2, 16, 16), (1, 2, 16, 16), dtype)
    assert only_op(trace, FLASH if dtype is LOW else EFFICIENT)


def test_flash_attention_keeps_one_value_per_row() -> None:
    trace = attention_kernels(_SHAPE, _SHAPE, LOW)
    batch, heads, rows, head = _SHAPE
    sizes = [trace.storages[number].bytes for number in trace.ops[only_op(trace, FLASH)].creates]
    assert sizes[0] == batch * heads * rows * head * 2
    assert sizes[1] == batch * heads * rows * 4
    assert sum(sizes[2:]) <= 2 * 512  # the generator's state


def test_the_gradient_of_a_maximum_does_not_wait_for_a_value_on_a_gpu() -> None:
    build = training(lambda: nn.Linear(4, 4), 3, 4, loss=torch.max)
    on_host, on_gpu = captured(build), captured(build, "cuda")
    backward = [set(op_names(trace, ops(trace, phase="backward"))) for trace in (on_host, on_gpu)]
    assert {"new_zeros", "masked_fill_"} <= backward[0]
    assert {"logical_and_", "logical_or_"} <= backward[1]
    assert not {"logical_and", "masked_fill_"} & backward[1]


# On the host or on the GPU --------------------------------------------------------------------------------

SAMPLES, FEATURES, BATCH = 4096, 64, 8


def _from_dataset(make: Callable[[], torch.Tensor], device: str = "cuda") -> Callable[[], Step]:
    """Return a build whose dataset is made by `make`, without a word about where, and moved by the batch."""

    def build() -> Step:
        data = make()
        model = nn.Linear(FEATURES, 1, bias=False).to(device)

        def run() -> None:
            batch = data[torch.randint(0, SAMPLES, (BATCH,))].to(device)
            model(batch).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    return build


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(SAMPLES, FEATURES), id="randn"),
        pytest.param(lambda: torch.zeros(SAMPLES, FEATURES, device=None), id="device=None"),
        pytest.param(lambda: torch.normal(0.0, 1.0, (SAMPLES, FEATURES)), id="normal"),
        pytest.param(lambda: torch.tensor([[0.0] * FEATURES] * SAMPLES), id="tensor"),
        pytest.param(lambda: torch.FloatTensor([[0.0] * FEATURES] * SAMPLES), id="FloatTensor"),
        pytest.param(lambda: torch.from_numpy(np.zeros((SAMPLES, FEATURES), np.float32)), id="from_numpy"),
        pytest.param(lambda: torch.as_tensor(np.zeros((SAMPLES, FEATURES), np.float32)), id="as_tensor"),
        pytest.param(lambda: torch.zeros(1).new_tensor([[0.0] * FEATURES] * SAMPLES), id="new_tensor"),
        pytest.param(lambda: torch.zeros(SAMPLES, FEATURES).exp().clone(), id="computed"),
    ],
)
def test_a_dataset_in_host_memory_is_not_on_the_gpu(make: Callable[[], torch.Tensor]) -> None:
    trace = captured(_from_dataset(make), "cuda")
    # the weight, its gradient, the batch and the result, each in blocks of 512 bytes; no byte of the dataset
    batch, weight, result = BATCH * FEATURES * 4, 512, 512
    assert trace.persistent_bytes == weight
    assert simulate(trace).peak_bytes <= 2 * weight + batch + 4 * result
    assert not trace.warnings


def test_a_step_that_names_no_device_is_on_the_gpu_as_a_whole() -> None:
    def build() -> Step:
        model, data = nn.Linear(FEATURES, 1, bias=False), torch.randn(SAMPLES, FEATURES)

        def run() -> None:
            model(data).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    assert captured(build, "cuda").persistent_bytes == 512 + SAMPLES * FEATURES * 4


@pytest.mark.parametrize("way", ["context", "default"])
def test_the_default_device_decides_about_what_is_made_without_one(way: str) -> None:
    def build() -> Step:
        data = torch.randn(SAMPLES, FEATURES)
        if way == "default":
            torch.set_default_device("cuda")
        with torch.device("cuda") if way == "context" else contextlib.nullcontext():
            model, more = nn.Linear(FEATURES, 1, bias=False), torch.zeros(FEATURES, FEATURES)
        torch.set_default_device(None)

        def run() -> None:
            model(data[:BATCH].cuda() @ more).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    assert captured(build, "cuda").persistent_bytes == 512 + FEATURES * FEATURES * 4


def test_a_tensor_that_was_not_moved_is_told_with_its_line() -> None:
    # GIVEN a mask that torch would refuse to multiply with what is on the GPU
    def build() -> Step:
        model, mask = nn.Linear(FEATURES, 1).cuda(), torch.ones(BATCH, 1)

        def run() -> None:
            (model(torch.ones(BATCH, FEATURES, device="cuda")) * mask).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    (warning,) = captured(build, "cuda").warnings
    assert warning.startswith("aten.mul gets a tensor on the host and one on the GPU, which torch refuses")
    assert "test_retarget.py" in warning
