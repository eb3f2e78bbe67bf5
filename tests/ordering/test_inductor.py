"""torch.compile with our order: same results, no higher peak, and nothing is left behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

import trainfit
from trainfit.order_fronts import inductor
from trainfit.order_fronts.inductor import CompiledGraph, OrderPass
from trainfit.order_fronts.scheduler_memory import _is_matrix_product
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert config._post_fusion_custom_pass is None


def heads(x: Tensor, weights: list[Tensor]) -> Tensor:
    # Matrix products are kernels of their own: nothing is fused over them, so that their order matters.
    wide = [x @ weight for weight in weights]
    return torch.stack([(w @ x).sum() for w in reversed(wide)])


def peak_of_compiled(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, int]:
    torch._dynamo.reset()
    compiled = torch.compile(heads)
    compiled(x, weights)
    with no_cycle_collection(), profile_allocations() as log, log.range("run"):
        result = compiled(x, weights)
    return result, log.usage("run").peak_bytes


def both(seen: list[CompiledGraph]) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Compile and run without our order and with it."""
    x, weights = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(4)]
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        theirs = peak_of_compiled(x, weights)
        with trainfit.order.compiled(seen.append):
            return theirs, peak_of_compiled(x, weights)


def test_the_scheduler_is_read_precisely(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes a minute; kernels that do nothing allocate as much.
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *tensors: None)
    seen: list[CompiledGraph] = []
    (_, theirs), (_, ours) = both(seen)
    assert len(seen) == 1
    assert seen[0].inductor_peak_bytes == theirs
    assert seen[0].peak_bytes == ours <= theirs
    assert seen[0].order.lower_bound_bytes <= seen[0].order.peak_bytes <= seen[0].peak_bytes


@pytest.mark.slow
def test_compiled_code_computes_the_same() -> None:
    (expected, theirs), (found, ours) = both([])
    assert torch.equal(found, expected)
    assert ours <= theirs


def test_installing_and_uninstalling_leaves_no_trace() -> None:
    trainfit.order.install()
    assert isinstance(config._post_fusion_custom_pass, OrderPass)
    trainfit.order.install()
    assert config._post_fusion_custom_pass.before is None, "a second time changes nothing"
    trainfit.order.uninstall()
    assert config._post_fusion_custom_pass is None
    trainfit.order.uninstall()


def test_a_pass_that_was_there_already_runs_first_and_comes_back() -> None:
    def theirs(nodes: list[object]) -> list[object]:
        return nodes

    with config.patch(_post_fusion_custom_pass=theirs):
        with trainfit.order.compiled():
            present = config._post_fusion_custom_pass
            assert isinstance(present, OrderPass)
            assert present.before is theirs
            assert present.uuid() is None, "unknown code cannot be cached"
        assert config._post_fusion_custom_pass is theirs
    with pytest.raises(ZeroDivisionError), trainfit.order.compiled():
        raise ZeroDivisionError


def test_the_pass_is_known_to_the_cache_of_compiled_code() -> None:
    assert OrderPass().uuid() == OrderPass().uuid()
    assert OrderPass(before=OrderPass()).uuid() != OrderPass().uuid()


def files_behind(start: Path) -> set[Path]:
    """Return a file of the package and all that it imports from the package, directly or not."""
    package = Path(trainfit.__file__).parent
    found: set[Path] = set()
    pending = [start]
    while pending:
        file = pending.pop()
        if file in found or not file.exists():
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trainfit."):
                module = package.joinpath(*str(node.module).split(".")[1:])
                pending += [module.with_suffix(".py"), *(module / f"{name.name}.py" for name in node.names)]
    return found


def test_all_code_of_the_pass_is_in_its_hash() -> None:
    found = files_behind(Path(inductor.__file__))
    assert {"inductor.py", "reuse.py", "maximum_flow.py", "graph.py"} <= {file.name for file in found}
    assert found <= set(inductor.code_files())


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        *((f"{module}.{name}", True) for module in ("extern_kernels", "aten") for name in ("mm", "baddbmm")),
        ("torch.ops.aten.addmm.default", True),
        ("extern_kernels.mm_with_workspace", False),
        ("torch.ops.aten.convolution.default", False),
        ("mine.mm", False),
    ],
)
def test_matrix_products_of_inductor_are_known_by_their_names(kernel: str, expected: bool) -> None:
    assert _is_matrix_product(kernel) is expected
