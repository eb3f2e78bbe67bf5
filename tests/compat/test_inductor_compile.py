"""torch.compile with `compat.inductor_memory`: the scenarios of torch's own tests, on a CPU."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from scheduled_graphs import schedule
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor import memory as theirs
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from trainfit.compat import inductor_memory as ours
from trainfit.order_fronts.inductor import CompiledGraph, OrderPass
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

pytestmark = pytest.mark.filterwarnings("ignore")

FUNCTIONS = [name for name in ours.__all__ if callable(getattr(theirs, name, None))]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    # Other orders must not come out of the cache, and the tensors are too small for the usual fusions.
    with config.patch(fx_graph_cache=False, score_fusion_memory_threshold=1, reorder_for_peak_memory=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the C++ compiler: kernels that do nothing run in the same order."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *tensors: None)


class Branches(nn.Module):
    """Two branches of two products: one is wide in the middle, the other at its end."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((1, 10), (1, 1), (10, 1), (1, 10))
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        wide, thin, to_thin, to_wide = self.weights
        first, second = x @ wide, x @ thin
        third, fourth = first @ to_thin, second @ to_wide
        return third.sum() + fourth.sum()


def order_in_code(reorder: Callable[..., Any] | None = None) -> tuple[Tensor, list[str]]:
    """Compile and run the branches; return the result and the buffers in the order in which they are made."""
    torch._dynamo.reset()
    patched = mock.patch.object(theirs, "reorder_for_peak_memory", reorder or theirs.reorder_for_peak_memory)
    with patched:
        result, code = run_and_get_code(torch.compile(Branches()), torch.ones(2048, 1))
    call = code[0].split("def call(")[1]
    return result, list(dict.fromkeys(re.findall(r"^\s+(buf\d) = ", call, re.MULTILINE)))


ORDERS = {
    "lpmf": "buf1 buf0 buf2 buf4 buf3 buf5",
    "bfs": "buf0 buf1 buf2 buf3 buf4 buf5",
    "dfs": "buf0 buf2 buf4 buf1 buf3 buf5",
}


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.usefixtures("without_kernels")
def test_inductor_runs_the_order_of_a_method(method: str) -> None:
    only = partial(ours.reorder_for_peak_memory, methods=[getattr(ours, f"topological_sort_{method}")])
    known = partial(theirs.reorder_for_peak_memory, methods=[getattr(theirs, f"topological_sort_{method}")])
    order = order_in_code(only)[1]
    assert order == order_in_code(known)[1]
    assert [name for name in order if name in ORDERS[method]] == ORDERS[method].split()


@pytest.mark.usefixtures("without_kernels")
def test_inductor_runs_the_order_that_torch_does_not_find() -> None:
    _, expected = order_in_code()
    _, found = order_in_code(ours.reorder_for_peak_memory)
    assert expected[:3] == ["buf1", "buf0", "buf2"], "what is wide runs while the other branch is waiting"
    assert found[:2] == ["buf1", "buf3"], "the branch that ends wide is finished first"


@pytest.mark.slow
def test_compiled_code_computes_the_same_and_allocates_less() -> None:
    x = torch.ones(2048, 1)
    peaks = []
    for module in (theirs, ours):
        torch._dynamo.reset()
        with mock.patch.object(theirs, "reorder_for_peak_memory", module.reorder_for_peak_memory):
            compiled = torch.compile(Branches())
            compiled(x)
        with no_cycle_collection(), profile_allocations() as log, log.range("run"):
            result = compiled(x)
        assert torch.equal(result, Branches()(x))
        peaks.append(log.usage("run").peak_bytes)
    assert peaks == [172_040, 98_312], "allocated in a real run, and what both estimates say"


@torch.library.custom_op("trainfit_compat::narrow_into", mutates_args={"out"})
def narrow_into(x: Tensor, out: Tensor) -> None:
    """Write one tensor into another of a narrower type."""
    out.copy_(x)


def products_of_narrowed(tensors: list[Tensor], product: Tensor) -> Tensor:
    for tensor in tensors:
        narrow = torch.empty_like(tensor, dtype=torch.bfloat16)
        narrow_into(tensor, narrow)
        product = product @ narrow
    return product


@pytest.mark.usefixtures("without_kernels")
def test_a_changed_buffer_keeps_its_size_and_its_new_name_has_none() -> None:
    seen: dict[str, tuple[int, int, Any]] = {}
    renamed: dict[str, str] = {}

    def noting(nodes: Any, name_to_buf: Any, *rest: Any) -> Any:
        order = ours.reorder_for_peak_memory(nodes, name_to_buf, *rest)
        for name, buffer in name_to_buf.items():
            info = buffer.mpi_buffer
            seen[name] = (info.size_alloc, info.size_free, info.succ_nodes)
        renamed.update(V.graph.scheduler.mutation_real_name)
        return order

    with mock.patch.object(theirs, "reorder_for_peak_memory", noting):
        torch.compile(products_of_narrowed)(
            [torch.randn(32, 32) for _ in range(4)], torch.ones(32, 32, dtype=torch.bfloat16)
        )
    assert len(renamed) == 4
    for new, original in renamed.items():
        assert seen[original][:2] == (2048, 2048)
        assert seen[new][:2] == (0, 0)
        assert seen[new][2], "the product reads the new name"
        assert seen[new][2] <= seen[original][2], "and keeps the original alive"


def test_two_reductions_of_large_products_do_not_need_both_at_once() -> None:
    long, short = 1024 * 32, 16

    def reduced(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a @ c).sum(dim=-1) + (b @ c).sum(dim=-1)

    graph = schedule(reduced, (long, short), (long, short), (short, long))
    with graph.active():
        order = ours.reorder_for_peak_memory(*graph.arguments)
        _, inputs = ours.prepare_planning_info(*graph.arguments)
        peak, _ = ours.estimate_peak_memory(order, inputs, graph.outputs)
    product = 4 * long * long
    assert product < peak < 2 * product


@pytest.mark.parametrize("threshold", [float("inf"), 12 * 128**2, 128**2])
def test_sums_of_products_are_counted_as_fused(threshold: float) -> None:
    """How many reads inductor collects before it adds them up decides how many products are alive at once."""

    def added(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        result = torch.zeros_like(x[0])
        for step in range(4):
            result = result + (torch.matmul(x + step, y) + z)
        return result

    with config.patch(realize_acc_reads_size_threshold=threshold):
        graph = schedule(added, (128, 128), (128, 128), (128, 128))
    with graph.active():
        _, inputs = theirs.prepare_planning_info(*graph.arguments)
        peaks = [
            theirs.estimate_peak_memory(reorder(*graph.arguments), inputs, graph.outputs)[0]
            for reorder in (ours.reorder_for_peak_memory, theirs.reorder_for_peak_memory)
        ]
    assert peaks[0] <= peaks[1]
    assert peaks[0] >= 4 * 4 * 128 * 128


def one_memory_changed_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    whole = (x @ x).view(2, -1, 64)
    first, second = torch._foreach_add([whole[0], whole[1]], 1.0)
    return first.sum(), second.sum(dim=-1), y @ y


def add_in_place(graph: Any) -> None:
    """Put the addition that changes its arguments, which are parts of one memory, where the other one was."""
    added = next(node for node in graph.nodes if node.target is torch.ops.aten._foreach_add.Scalar)
    with graph.inserting_before(added):
        graph.call_function(torch.ops.aten._foreach_add_.Scalar, added.args)
    for taken in tuple(added.users):
        _, number = taken.args
        taken.replace_all_uses_with(added.args[0][number])
        graph.erase_node(taken)
    graph.erase_node(added)


@pytest.mark.slow
def test_two_changes_of_one_memory_allocate_it_once() -> None:
    """The generated code checks, kernel by kernel, that what is allocated and freed is what was planned."""
    own = {name: getattr(ours, name) for name in FUNCTIONS}
    settings = {
        "post_grad_custom_post_pass": add_in_place,
        "test_configs.track_memory_lifecycle": "assert",
        "allow_buffer_reuse": False,
        "reorder_for_peak_memory": False,
    }
    x, y = torch.rand(64, 64), torch.rand(64, 64)
    with mock.patch.multiple(theirs, **own), config.patch(settings):
        result, code = run_and_get_code(torch.compile(one_memory_changed_twice), x, y)
    assert "allocated=['buf0']" in code[0]
    for found, expected in zip(result, one_memory_changed_twice(x, y)):
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("combined", [False, True])
def test_inductor_can_live_on_our_functions_alone(combined: bool) -> None:
    """Whatever asks torch's module gets ours: reordering, kernels that are combined, reuse of buffers."""
    own = {name: getattr(ours, name) for name in FUNCTIONS}
    calls: set[str] = set()
    for name in FUNCTIONS:
        if inspect.isfunction(own[name]):
            own[name] = counted(name, own[name], calls)

    def several(x: Tensor) -> tuple[Tensor, ...]:
        return *((x @ x * number).sin() for number in range(1, 4)), (x @ x).cos()

    with mock.patch.multiple(theirs, **own), config.patch(combo_kernels=combined):
        torch.compile(several)(torch.randn(64, 64))
    assert {"reorder_for_peak_memory", "get_freeable_input_buf", "estimate_peak_memory"} <= calls
    assert ("live_memory_before_steps_from_buf_info_list" in calls) is combined


def counted(name: str, function: Any, calls: set[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.add(name)
        return function(*args, **kwargs)

    return call


@pytest.mark.usefixtures("without_kernels")
def test_one_line_installs_our_order_and_one_takes_it_away() -> None:
    seen: list[CompiledGraph] = []
    ours.install(seen.append)
    try:
        assert isinstance(config._post_fusion_custom_pass, OrderPass)
        _, order = order_in_code()
    finally:
        ours.uninstall()
    assert config._post_fusion_custom_pass is None
    assert len(seen) == 1
    assert seen[0].order.optimal
    assert seen[0].peak_bytes < seen[0].inductor_peak_bytes
    assert order[:2] == ["buf1", "buf3"]
    with ours.installed():
        assert isinstance(config._post_fusion_custom_pass, OrderPass)
        assert order_in_code()[1] == order
    assert config._post_fusion_custom_pass is None
    assert order_in_code()[1] != order
