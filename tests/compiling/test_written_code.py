"""Memory read off the code that inductor writes is that of the code that runs, to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainfit.compiling.compiled_model import compile as planned_compile
from trainfit.compiling.kernel_memory import handed_on, lowered
from trainfit.compiling.written_code import GivenStorage, WrittenCode, written_code
from trainfit.errors import BudgetTooSmall
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# One graph ------------------------------------------------------------------------------------------------

Graph = Callable[..., tuple[torch.Tensor, ...]]


def in_a_row(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two kernels that nothing lies between: one C++ function."""
    rows = x.sin().sum(1)
    return (y.cos() * rows.sum(), rows)


def around_a_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the first kernel makes is gone when the second one needs memory of another size."""
    product = (x * 2).relu() @ x.t()
    return ((product.exp() @ x).sum(0) + y.sum(),)


def written_over(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results that lie where others were."""
    product = x @ x.t()
    other = product.relu() @ x
    return ((other.sigmoid() @ other.t()).tanh(), y + 1)


def several_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A kernel of torch's own whose second result nobody takes."""
    values, _ = torch.median(x, 1)
    return (values * 2, y.sum())


def joined(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts of one buffer."""
    whole = torch.cat([x.sin(), x @ x.t(), x.cos()], 1)
    return (whole @ whole.t(), y * 2)


def of_parts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views that keep all of what they are views of."""
    first, second = (x @ x.t()).chunk(2, 1)
    return (first, second.relu() @ second.t(), y - 1)


GRAPHS: tuple[Graph, ...] = (in_a_row, around_a_product, written_over, several_results, joined, of_parts)
ROWS = 64


def traced(function: Graph) -> GraphModule:
    inputs = [torch.randn(ROWS, ROWS), torch.randn(8 * ROWS)]
    with FakeTensorMode() as mode:
        return make_fx(function, decomposition_table=select_decomp_table())(
            *[mode.from_tensor(value) for value in inputs]
        )


def code_of(function: Graph) -> WrittenCode:
    with lowered(traced(function), backward=False) as graph:
        return written_code(graph)


@pytest.mark.parametrize("function", GRAPHS, ids=lambda function: function.__name__)
def test_a_graph_needs_what_is_read_off(function: Graph) -> None:
    code = code_of(function)
    module = traced(function)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(fakes[0].fake_mode):
        compiled = compile_fx_inner(module, fakes)
    inputs = [torch.randn(ROWS, ROWS), torch.randn(8 * ROWS)]
    compiled([*inputs])
    with no_cycle_collection(), profile_allocations() as log, log.range("step"):
        results = compiled([*inputs])
    assert max(code.alive()) == log.usage("step").peak_bytes
    returned = {result.untyped_storage()._cdata: result.untyped_storage().nbytes() for result in results}
    kept = [storage for storage in code.storages if storage.end is None]
    assert sum(storage.bytes for storage in kept) == sum(returned.values()) == log.usage("step").end_bytes
    assert all(storage.start >= 0 for storage in code.storages)


def test_kernels_in_a_row_are_one_call_on_a_cpu() -> None:
    code = code_of(in_a_row)
    assert code.calls == 1
    assert len([call for call in code.called_at if call == 0]) >= 2


def test_a_call_between_kernels_ends_what_only_the_first_one_reads() -> None:
    code = code_of(around_a_product)
    assert code.calls == 5
    assert sorted(set(code.called_at) - {-1}) == list(range(code.calls))
    first = max((s for s in code.storages if s.start == 0), key=lambda storage: storage.bytes)
    assert first.end is not None and first.end < code.calls - 1


def test_what_is_handed_to_backward_is_the_memory_that_forward_made() -> None:
    sizes = {"buf0": 400, "buf1": 80}
    # Two results, the second of which backward gets, too; two views of one buffer; a parameter; a number.
    results = ("buf2", "buf1", "buf0", "buf0", "buf1", None, None)
    names = ("first", "second", "logits", "primals_1", "s0")
    assert handed_on(results, sizes, names) == [
        GivenStorage(("first", "second"), 400, stays=False),
        GivenStorage(("logits",), 80, stays=True),
    ]


# A step ---------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Views of one product, of which backward reads now one and now the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(48, 192) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(96, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            gate, value = up(x).chunk(2, -1)
            x = x + down(F.silu(gate) * value)
        return x.square().mean()


class Images(nn.Module):
    """Convolutions with batch norm: inductor lays out what they read, and their weights, otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3)).square().mean()


STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "views": (Gated, (256, 48)),
    "laid out anew": (Images, (4, 3, 16, 16)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_smallest_plan_of_a_step_needs_what_it_promises(name: str) -> None:
    make, shape = STEPS[name]
    batch = torch.linspace(-1, 1, math.prod(shape)).view(shape)
    with pytest.raises(BudgetTooSmall) as caught:
        planned_compile(make(), budget=1)(batch)
    torch._dynamo.reset()
    model = make()
    compiled = planned_compile(model, budget=caught.value.minimum_peak_bytes)
    for _ in range(2):
        compiled(batch).backward()
        model.zero_grad()
    with no_cycle_collection(), profile_allocations() as log, log.range("step"):
        compiled(batch).backward()
    standing = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batch))
    assert compiled.compile_plan.graphs[0].repeated
    assert standing + log.usage("step").peak_bytes == compiled.compile_plan.promised_bytes
