"""What operators did when they ran alone is remembered on disk: for the same machine and switches only."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from captured_steps import Build, captured, training
from torch import nn

from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec, Trace
from trainfit.workspace import measured
from trainfit.workspace.conditions import this_processor
from trainfit.workspace.measured import QUICK, THOROUGH, Limits, measure_operators

pytestmark = pytest.mark.usefixtures("little_garbage")


class Machine:
    """Counts the operators that run alone, and starts new processes: only the file is left of the old."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch = patch
        self.file = folder / "costs.sqlite"
        self.ran: list[str] = []
        run = measured._run

        def counted(operator: Signature, *others: object) -> object:
            self.ran.append(operator.name)
            return run(operator, *others)  # type: ignore[arg-type]

        patch.setattr(measured, "_run", counted)
        patch.setenv("TRAINFIT_CACHE", str(folder))
        self.new_process()

    def new_process(self) -> None:
        self._patch.setattr(measured, "_known", {})
        self.ran.clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "cache")


def model() -> Build:
    # A convolution has a workspace, and the results of its backward lie differently than is thought.
    return training(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), 2, 3, 12, 12)


def product(name: str = "aten.mm.default") -> Signature:
    spec = TensorSpec("float32", (4, 4), (4, 1))
    text = arguments.encode([{"tensor": 0}, {"tensor": 1}], {})
    return Signature(name, (spec, spec), (spec,), text, view=False, in_place=False, random=False)


def test_a_second_process_runs_nothing_and_makes_the_same_trace(machine: Machine) -> None:
    first = captured(model())
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= set(machine.ran)
    assert any(signature.workspace_bytes for signature in first.signatures)
    machine.new_process()
    assert captured(model()) == first
    assert machine.ran == []


PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from trainfit.capturing.session import capture
from trainfit.steps.step import Step
from trainfit.traces.trace_store import save_trace
from trainfit.workspace import measured
run, ran = measured._run, []
measured._run = lambda operator, *others: ran.append(operator) or run(operator, *others)
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Dropout(0.5))
    return Step.of(model, torch.randn(2, 3, 12, 12), loss=lambda y: y.sum())
save_trace(capture(build), Path(sys.argv[1]))
print(len(ran))
"""


def test_another_process_writes_the_same_bytes(machine: Machine, tmp_path: Path) -> None:
    counts, files = [], [tmp_path / "first.trace", tmp_path / "second.trace"]
    for file in files:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(file)],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        counts.append(int(done.stdout))
    assert counts[0] > 5 and counts[1] == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_nothing_is_run_twice_in_one_process(machine: Machine) -> None:
    captured(model())
    machine.ran.clear()
    captured(model())
    assert machine.ran == []


def test_what_was_measured_within_wider_limits_is_known_within_narrower_ones(machine: Machine) -> None:
    nothing = Limits(nbytes=0, products=0, convolutions=0)
    assert measure_operators([product()], nothing) == [None]
    (found,) = measure_operators([product()], THOROUGH)
    machine.new_process()
    assert measure_operators([product()], nothing) == [found] and found is not None
    assert machine.ran == []


# What it holds for ----------------------------------------------------------------------------------------


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def matmul_precision() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@contextmanager
def without_onednn() -> Iterator[None]:
    # Not `torch.backends.mkldnn.flags`, which also sets what only Intel's GPUs have, with a warning.
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@contextmanager
def torch_version() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        yield


@contextmanager
def processor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainfit.workspace.conditions.processor_name", lambda: "another processor")
        yield


@contextmanager
def instructions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        yield


@pytest.mark.parametrize(
    "changed",
    [
        threads,
        deterministic,
        default_dtype,
        matmul_precision,
        torch_version,
        processor,
        instructions,
        without_onednn,
        lambda: torch.autocast("cpu"),
    ],
    ids=lambda changed: changed.__name__.replace("<lambda>", "autocast"),
)
def test_under_other_conditions_it_is_measured_again(
    machine: Machine, changed: Callable[[], AbstractContextManager[object]]
) -> None:
    measure_operators([product()], QUICK)
    machine.ran.clear()
    # In the same process, and in another one.
    with changed():
        measure_operators([product()], QUICK)
        assert machine.ran == ["aten.mm.default"]
        machine.new_process()
        measure_operators([product()], QUICK)
        assert machine.ran == []
    measure_operators([product()], QUICK)
    assert machine.ran == []


def test_another_version_of_ours_measures_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_operators([product()], QUICK)
    machine.new_process()
    monkeypatch.setattr("trainfit.__version__", "99.0")
    measure_operators([product()], QUICK)
    assert machine.ran == ["aten.mm.default"]


def test_convolutions_have_the_workspace_of_the_switch_that_is_set(machine: Machine) -> None:
    """GIVEN a switch that makes torch take other kernels, THEN both traces are right, in either order."""

    def workspace(trace: Trace) -> int:
        return max(found.workspace_bytes for found in trace.signatures)

    with_onednn = captured(model())
    with without_onednn():
        without = captured(model())
    assert workspace(with_onednn) != workspace(without)
    machine.new_process()
    with without_onednn():
        assert captured(model()) == without
    assert captured(model()) == with_onednn
    assert machine.ran == []


# What is not remembered, and failures ---------------------------------------------------------------------


def test_what_cannot_be_run_alone_is_not_tried_again(machine: Machine) -> None:
    opaque = product("aten.quantized_lstm.default")
    assert measure_operators([opaque], QUICK) == [None]
    assert machine.ran == [opaque.name]
    machine.new_process()
    assert measure_operators([opaque, product()], QUICK)[0] is None
    assert machine.ran == ["aten.mm.default"]


def test_an_operator_that_failed_as_memory_ran_out_is_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(measured, "_run", lambda *_: RuntimeError("not enough memory"))
        assert measure_operators([product()], QUICK) == [None]
    assert measure_operators([product()], QUICK) != [None]


def test_operators_of_the_user_are_neither_run_nor_remembered(machine: Machine) -> None:
    assert measure_operators([product("mine.product.default"), product("all_reduce")], QUICK) == [None, None]
    assert machine.ran == [] and not machine.file.exists()


def test_workspaces_of_the_steps_own_values_are_not_remembered(machine: Machine) -> None:
    """GIVEN a kernel whose workspace depends on values, THEN the next step has that of its own ones."""

    def exponential(size: float) -> Trace:
        class Exponential(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.matrix = nn.Parameter(torch.eye(16) * size)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ torch.matrix_exp(self.matrix)

        return captured(training(Exponential, 4, 16, loss=lambda y: y.mean() * 1e-9))

    def workspace(trace: Trace) -> int:
        name = "aten.linalg_matrix_exp.default"
        return min(found.workspace_bytes for found in trace.signatures if found.name == name)

    small = exponential(1e-2)
    machine.new_process()
    assert workspace(exponential(2.0)) > workspace(small)
    assert workspace(exponential(1e-2)) == workspace(small)


def no_database(file: Path) -> None:
    file.write_bytes(b"this is not a database " * 1000)


def no_folder(file: Path) -> None:
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("not a folder")


def half_of_it(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("spoil", [no_database, no_folder, half_of_it])
def test_a_file_that_cannot_be_used_does_not_stop_a_capture(
    machine: Machine, spoil: Callable[[Path], None]
) -> None:
    first = captured(model())
    count = len(machine.ran)
    machine.new_process()
    spoil(machine.file)
    assert captured(model()) == first
    assert len(machine.ran) == count


NONSENSE = (
    *("", "[1]", "{}", "[-1, []]", "[true, []]", "[0.5, []]", "[" * 100_000, '[0, [["4", [1], 0, 16, 0]]]'),
    *("[0, [[[4], [1, 1], 0, 16, 0]]]", "[0, [[[4], [1], 0, 16]]]", "[0, [[[4], [1], 0, -16, 0]]]"),
)


@pytest.mark.parametrize("text", NONSENSE)
def test_an_entry_that_makes_no_sense_is_measured_again(machine: Machine, text: str) -> None:
    first = measure_operators([product()], QUICK)
    with sqlite3.connect(machine.file) as connection:
        assert connection.execute("UPDATE workspaces SET found = ?", (text,)).rowcount == 1
    connection.close()
    machine.new_process()
    assert measure_operators([product()], QUICK) == first
    assert machine.ran == ["aten.mm.default"]


def test_what_stands_in_the_file(machine: Machine) -> None:
    measure_operators([product()], QUICK)
    connection = sqlite3.connect(machine.file)
    ((found, where),) = connection.execute("SELECT found, machine FROM workspaces")
    connection.close()
    # A product of 4 x 4 has no workspace, and one result of 64 bytes.
    assert json.loads(found) == [0, [[[4, 4], [4, 1], 0, 64, 0]]]
    assert where == this_processor().text
