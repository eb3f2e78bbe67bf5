"""torch's `context_parallel`, captured for a GPU: what goes around the ring, and what it holds meanwhile.

torch divides no attention kernel of processors. What is captured of its rings is compared with real ranks in
`benchmarks/cluster_truth.py`, by cases that tell it how; here the bytes are worked out by hand.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional

from trainfit.capturing import capture
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import CaptureError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

TOKENS, HEADS, WIDTH = 64, 2, 64
"""Of one rank, whose sequence is the only one."""
PART = 2 * TOKENS * HEADS * WIDTH
"""Bytes of queries in bfloat16; keys, values, results and their gradients are as large."""
WIDE = 2 * PART
"""In float32, which gradients are summed in."""


class Attention(nn.Module):
    def __init__(self, device: str, dtype: torch.dtype, tokens: int = TOKENS) -> None:
        super().__init__()
        shape = (1, HEADS, tokens, WIDTH)
        self.query, self.key, self.value = (
            nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) for _ in range(3)
        )

    def forward(self) -> torch.Tensor:
        return functional.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)


def attention_step(
    ranks: int,
    method: str,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    fails: bool = False,
    tokens: int = TOKENS,
) -> Step:
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))
    _attention.set_rotate_method(method)
    model = Attention(device, dtype, tokens)
    places = torch.zeros(ranks * tokens, device=device)

    def run() -> None:
        with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
            assert places.shape == (tokens,)
            result = model()
            if fails:
                raise ValueError("as the step pleases")
            result.backward(torch.ones_like(result))
        assert places.shape == (ranks * tokens,)
        model.zero_grad()

    return Step(model=model, optimizer=None, run=run)


def captured(
    ranks: int, rank: int, method: str = "allgather", gpu: str | Device = "cuda", **options: Any
) -> Trace:
    return capture(
        partial(attention_step, ranks, method, **options), cluster=Cluster(ranks, rank), device=gpu
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_keys_and_values_go_around_and_so_do_their_gradients(ranks: int, method: str) -> None:
    for rank in (0, ranks - 1):
        trace = captured(ranks, rank, method)
        found = Counter(
            (op.phase, one.kind, one.bytes)
            for op in trace.ops
            if (one := trace.signatures[op.signature].collective)
        )
        gradients = {("backward", "permute", 2 * WIDE): ranks}
        if method == "allgather":
            values = {(phase, "all_gather", ranks * 2 * PART): 1 for phase in ("forward", "backward")}
        else:
            values = {(phase, "permute", 2 * PART): ranks - 1 for phase in ("forward", "backward")}
        assert found == gradients | values
        names = Counter(trace.op_name(number) for number in range(len(trace.ops)))
        # With the halves of the sequence shared out, every rank has something to do in every round.
        assert names["aten._scaled_dot_product_flash_attention.default"] == ranks
        assert names["aten._scaled_dot_product_flash_attention_backward.default"] == ranks
        assert not trace.warnings


def test_what_the_ring_holds_when_the_last_gradients_are_sent() -> None:
    trace = captured(2, 1)
    last = max(
        number
        for number, op in enumerate(trace.ops)
        if (one := trace.signatures[op.signature].collective) and one.kind == "permute"
    )
    wide = (
        1  # the gradient of queries
        + 2  # of keys and values, as added up here
        + 2  # the same in one piece, to be sent
        + 2  # what comes back
        + 2  # what came in the round before
    )
    parts = (
        2  # the result, and its gradient
        + 2 * 2  # keys and values of both ranks, gathered
        + 2  # those of this rank in one piece, as sent
        + 1  # the gradient of queries from the last round
        + 2 * 0.5  # of keys and values: of half of them, as the other half is masked
    )
    small = (
        1  # the log of the sums of each row
        + 2  # the state of random numbers, and a place for an older one
        + 3  # positions: the copy to be restored, in the order of the ranks, and this rank's
    )
    held = simulate(trace).live_bytes[last] - trace.persistent_bytes
    assert held == wide * WIDE + parts * PART + small * 512


def test_kernels_for_float32_take_part_in_rings() -> None:
    trace = captured(2, 0, dtype=torch.float32)
    names = Counter(trace.op_name(number) for number in range(len(trace.ops)))
    assert names["aten._scaled_dot_product_efficient_attention.default"] == 2
    assert names["aten._scaled_dot_product_efficient_attention_backward.default"] == 2
    assert not trace.warnings


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("tokens", [16, 32, 96])
def test_rows_that_the_kernel_for_float32_rounds_up_are_refused_on_every_rank(rank: int, tokens: int) -> None:
    """The kernel makes 32 rows of 16, and torch cannot put rounds together.

    The last rank alone would not notice that of 32 tokens the other ranks need the last 16 by themselves.
    """
    wanted = rf"test_context_parallel\.py:\d+ calls attention on {tokens} tokens of each of 4 ranks"
    with pytest.raises(CaptureError, match=rf"{wanted}.*multiple of 64 tokens.*multiple of 256, or use bf"):
        captured(4, rank, dtype=torch.float32, tokens=tokens)


def test_kernels_of_amd_do_not_round_rows_up() -> None:
    """Nor does flash attention, on any GPU."""
    trace = captured(2, 0, gpu=find_device("mi300x"), dtype=torch.float32, tokens=16)
    (first, *_) = (
        op
        for number, op in enumerate(trace.ops)
        if trace.op_name(number) == "aten._scaled_dot_product_efficient_attention.default"
    )
    assert [trace.storages[made].bytes for made in first.creates[:2]] == [
        4 * HEADS * 16 * WIDTH,
        4 * HEADS * 16,
    ]
    assert captured(2, 0, tokens=16).ops


def test_rows_of_a_step_of_one_process_are_rounded_up_on_nvidia_alone() -> None:
    """16 tokens have 32 rows of sums there; the trace is not one for GPUs of the other maker."""

    def build() -> Step:
        model = Attention("cuda", torch.float32, 16)
        return Step.of(model, (), loss=torch.Tensor.sum, optimizer=None)

    for name, rows in (("h100", 32), ("mi300x", 16)):
        trace = capture(build, device=find_device(name))
        (op,) = (
            op
            for number, op in enumerate(trace.ops)
            if trace.op_name(number) == "aten._scaled_dot_product_efficient_attention.default"
        )
        made = [trace.storages[one].bytes for one in op.creates[:2]]
        assert made == [4 * HEADS * 16 * WIDTH, 4 * HEADS * rows]
        assert trace.architecture


def test_processors_are_refused_as_torch_refuses_them() -> None:
    build = partial(attention_step, 2, "allgather", "cpu", torch.float32)
    with pytest.raises(
        CaptureError, match=r"for GPUs only, and raises on a CPU, too .*for_cpu.*--device h100"
    ):
        capture(build, cluster=Cluster(2))


def switches() -> tuple[Any, ...]:
    options = _attention._cp_options
    return (
        functional.scaled_dot_product_attention,
        DTensor._op_dispatcher._custom_op_handlers,
        dict(DTensor._op_dispatcher._custom_op_handlers),
        dict(_attention.custom_ops),
        dict(_attention._replaced_functions),
        options.rotate_method,
        options.enable_load_balance,
        _attention._dispatch_mode,
        torch.ops.aten._scaled_dot_product_flash_attention.default
        in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs,
        dist.is_initialized(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_it_is_left_behind(fails: bool) -> None:
    before = switches()
    if fails:
        with pytest.raises(UserCodeError, match="as the step pleases"):
            captured(2, 1, "alltoall", fails=True)
    else:
        captured(2, 1, "alltoall")
    assert switches() == before


def test_what_a_step_leaves_switched_on_is_switched_off() -> None:
    def build() -> Step:
        step = attention_step(2, "alltoall")
        _attention._enable_context_parallel_dispatcher()
        return step

    before = switches()
    capture(build, cluster=Cluster(2), device="cuda")
    assert switches() == before


def test_a_copy_below_autograd_is_not_taken_for_a_view() -> None:
    """`contiguous` says that it returns a view; in rings torch calls it where only operators are seen."""

    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                return tensor.t().contiguous()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0].t()

    def build() -> Step:
        model = nn.Linear(256, 256, bias=False)

        def run() -> None:
            Copies.apply(model.weight).sum().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

        return Step(model=model, optimizer=None, run=run)

    names = [trace.op_name(number) for trace in (capture(build),) for number in range(len(trace.ops))]
    assert "aten.clone.default" in names and "aten.contiguous.default" not in names
