"""What scripts for a GPU do works without one: workers, loading, jagged tensors, DataParallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_steps import captured
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainfit
from trainfit.errors import CaptureError
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate

WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4
both_devices = pytest.mark.parametrize("device", ["cpu", "cuda"])


class Samples(Dataset[torch.Tensor]):
    """Says in every sample whether it was made by ordinary Python."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        made = torch.full((WIDTH,), float(index))
        assert _get_current_dispatch_mode() is None
        assert made.device.type == "cpu"
        assert torch.cuda.is_available() is False
        assert made.sum().item() == index * WIDTH
        return made


def _loading(device: str, **options: Any) -> Callable[[], Step]:
    def build() -> Step:
        model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
        loader = DataLoader(Samples(), batch_size=4, **options)
        batches: list[Any] = []

        def run() -> None:
            if not batches:
                batches.extend(reversed(list(loader)))
            batch = batches.pop()
            first = batch[0, 0].item()
            assert first % 4 == 0
            assert batch[:, 0].tolist() == [first, first + 1, first + 2, first + 3]
            model(batch.to(device, non_blocking=True)).square().mean().backward()
            model.zero_grad()

        return Step(model, None, run)

    return build


@both_devices
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 2}, {"num_workers": 2, "pin_memory": True, "persistent_workers": True}],
    ids=["workers", "pinned"],
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_workers_are_ordinary_python_and_send_host_memory(options: dict[str, Any], device: str) -> None:
    trace = captured(_loading(device, **options), device)
    # Batches that wait in shared memory are the host's; of each, the CPU counts 4 * 64 floats.
    waiting = trace.persistent_bytes - WEIGHT
    assert waiting == 0 if device == "cuda" else waiting in range(1024, 16 * 1024, 1024)


def test_a_step_with_workers_is_predicted_exactly() -> None:
    verification = trainfit.verify(_loading("cpu", num_workers=1), costs="roofline", force=True)
    assert verification.predicted_peak_bytes == verification.measured.peak_bytes


@pytest.mark.parametrize(
    "place",
    ["cuda", torch.device("cuda"), {"cpu": "cuda:0"}, lambda storage, location: storage.cuda(), None, "cpu"],
    ids=["name", "device", "dict", "function", "none", "cpu"],
)
def test_files_are_loaded_where_they_are_asked_for(place: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(WIDTH, WIDTH)}, path)
    on_gpu = place not in (None, "cpu")

    def build() -> Step:
        model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        loaded = torch.load(path, map_location=place)
        assert loaded["weight"].is_cuda == on_gpu
        assert loaded["weight"].sum().item() == WIDTH * WIDTH
        model.load_state_dict(loaded)
        model.kept = loaded
        return Step.of(model, torch.randn(4, WIDTH, device="cuda"), loss=torch.sum)

    trace = captured(build, "cuda")
    assert trace.persistent_bytes == WEIGHT * (2 if on_gpu else 1) + 4 * WIDTH * 4


class Jagged(nn.Module):
    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.attention:
            return torch.relu(self.project[0](x))
        q, k, v = (project(x).unflatten(-1, [2, WIDTH // 2]).transpose(1, 2) for project in self.project)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def _jagged(device: str, attention: bool, dtype: torch.dtype = torch.float32) -> Callable[[], Step]:
    def build() -> Step:
        model = Jagged(attention).to(device, dtype)
        rows = [torch.randn(length, WIDTH, dtype=dtype) for length in (5, 17, 30)]
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)

        def run() -> torch.Tensor:
            loss: torch.Tensor = model(batch).values().square().mean()
            loss.backward()
            model.zero_grad()
            return loss

        return Step(model, None, run)

    return build


def test_jagged_tensors_are_captured_for_a_gpu_as_for_the_cpu() -> None:
    for_cpu, for_gpu = (captured(_jagged(device, False), device) for device in ("cpu", "cuda"))
    largest = [max(storage.bytes for storage in trace.storages) for trace in (for_cpu, for_gpu)]
    assert largest == [WEIGHT, WEIGHT]
    assert simulate(for_gpu).peak_bytes < simulate(for_cpu).peak_bytes + 512 * 40


def test_a_step_with_jagged_tensors_is_predicted_exactly() -> None:
    verification = trainfit.verify(_jagged("cpu", False), costs="roofline", force=True)
    assert verification.predicted_peak_bytes == verification.measured.peak_bytes


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "_efficient_attention"), (torch.bfloat16, "_flash_attention")]
)
def test_attention_over_jagged_tensors_runs_the_gpus_kernel(dtype: torch.dtype, kernel: str) -> None:
    trace = captured(_jagged("cuda", True, dtype), "cuda")
    names = [trace.op_name(number) for number in range(len(trace.ops))]
    assert names.count(f"aten.{kernel}_forward.default") == 1
    assert names.count(f"aten.{kernel}_backward.default") == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_over_jagged_tensors_on_the_cpu_is_refused_with_a_reason() -> None:
    with pytest.raises(
        CaptureError, match=r"test_ordinary_gpu_code\.py:\d+ makes a nested tensor of the strided"
    ):
        captured(_jagged("cpu", True))


def test_data_parallel_on_one_gpu_is_the_module_itself() -> None:
    def build(parallel: bool) -> Callable[[], Step]:
        def build_it() -> Step:
            model: nn.Module = nn.Linear(WIDTH, WIDTH).cuda()
            if parallel:
                model = nn.DataParallel(model)
            return Step.of(model, torch.randn(8, WIDTH, device="cuda"), loss=torch.sum)

        return build_it

    alone, parallel = captured(build(False), "cuda"), captured(build(True), "cuda")
    assert simulate(parallel).peak_bytes == simulate(alone).peak_bytes
    assert not hasattr(torch._C, "_scatter") or torch._C._cuda_getDeviceCount() >= 0


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_for_a_gpu_is_refused_in_one_line() -> None:
    def build() -> Step:
        from torch.nn.attention.flex_attention import flex_attention

        model = nn.Linear(WIDTH, WIDTH).cuda()
        batch = torch.randn(1, 2, 16, WIDTH, device="cuda")
        return Step.of(model, batch, loss=lambda x: flex_attention(x, x, x).sum())

    with pytest.raises(CaptureError, match=r"test_ordinary_gpu_code\.py:\d+ calls flex_attention") as refused:
        captured(build, "cuda")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "message",
    ["Torch not compiled with CUDA enabled", "Cannot access accelerator device when none is available."],
)
def test_where_the_pretended_gpu_is_seen_through_the_error_is_ours(message: str) -> None:
    def build() -> Step:
        model = nn.Linear(WIDTH, WIDTH).cuda()

        def run() -> None:
            raise AssertionError(message)

        return Step(model, None, run)

    with pytest.raises(CaptureError, match=r"test_ordinary_gpu_code\.py:\d+") as error:
        captured(build, "cuda")
    assert "stand-in for a GPU" in str(error.value)
    assert "not a mistake in the step" in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_step_that_wants_a_gpu_and_is_captured_for_the_cpu_says_what_to_do() -> None:
    def build() -> Step:
        return Step.of(nn.Linear(WIDTH, WIDTH).cuda(), torch.ones(2, WIDTH), loss=torch.sum)

    with pytest.raises(CaptureError, match=r"py:\d+ asks for a GPU.*for the CPU\. Name a GPU") as error:
        trainfit.estimate(build)
    assert "\n" not in str(error.value)


def test_graphs_of_cuda_are_a_limit_of_ours() -> None:
    def build() -> Step:
        torch.cuda.CUDAGraph()
        return Step.of(nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH), loss=torch.sum)

    with pytest.raises(CaptureError, match="This is a limit of the capture, not a mistake in the step"):
        trainfit.estimate(build, device="h100")


def test_distributed_data_parallel_is_refused_in_one_line(tmp_path: Path) -> None:
    import torch.distributed as distributed

    def build() -> Step:
        model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        return Step.of(model, torch.ones(2, WIDTH), loss=torch.sum)

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match="--world-size N") as error:
            trainfit.estimate(build)
    finally:
        distributed.destroy_process_group()
    assert "\n" not in str(error.value)


@both_devices
def test_exporting_a_model_is_a_limit_of_ours(device: str) -> None:
    def build() -> Step:
        model = nn.Linear(WIDTH, WIDTH)
        torch.export.export(model, (torch.ones(2, WIDTH),))
        return Step.of(model, torch.ones(2, WIDTH), loss=torch.sum)

    with pytest.raises(CaptureError, match=r"py:\d+ follows the operators .* limit of the capture") as error:
        captured(build, device)
    assert "\n" not in str(error.value)


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "by name": lambda model: model.to("cuda"),
    "by keyword": lambda model: model.to(device="cuda"),
    "with a dtype": lambda model: model.to(device=torch.device("cuda"), dtype=torch.float32),
    "by number": lambda model: model.to(0),
    "by number and keyword": lambda model: model.to(device=0),
    "cuda()": lambda model: model.cuda(0),
    "like a tensor": lambda model: model.to(torch.ones(1, device="cuda")),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_model_is_on_the_gpu_however_it_was_moved_there(move: str) -> None:
    def build() -> Step:
        model = MOVES[move](nn.Linear(WIDTH, WIDTH, bias=False))
        assert next(model.parameters()).is_cuda
        return Step.of(model, torch.ones(4, WIDTH).to(0), loss=torch.sum)

    trace = captured(build, "cuda")
    assert trace.persistent_bytes == WEIGHT + 4 * WIDTH * 4 and not trace.warnings


def test_the_second_gpu_by_its_number_is_refused() -> None:
    def build() -> Step:
        return Step.of(nn.Linear(WIDTH, WIDTH).to(1), torch.ones(4, WIDTH), loss=torch.sum)

    with pytest.raises(CaptureError, match="uses a second GPU, cuda:1"):
        captured(build, "cuda")


def test_data_parallel_takes_a_batch_from_the_host() -> None:
    def build() -> Step:
        model = nn.DataParallel(nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
        return Step.of(model, torch.ones(4, WIDTH), loss=torch.sum)

    trace = captured(build, "cuda")
    assert trace.persistent_bytes == WEIGHT and not trace.warnings


@pytest.mark.parametrize("parts", ["chunk", "split"])
def test_what_backward_makes_of_a_jagged_tensor_is_on_the_gpu(parts: str) -> None:
    def build(device: str) -> Step:
        model = nn.Linear(WIDTH, 3 * WIDTH).to(device)
        rows = [torch.randn(count, WIDTH, device=device) for count in (30, 70)]

        def run() -> None:
            made = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
            q, k, v = made.chunk(3, -1) if parts == "chunk" else made.split(WIDTH, -1)
            (q * k + v).values().sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(lambda: build("cuda"), "cuda")
    assert not trace.warnings
    # but for the blocks of 512 bytes in which a GPU hands out memory
    on_cpu = simulate(captured(lambda: build("cpu"))).peak_bytes
    assert on_cpu <= simulate(trace).peak_bytes <= on_cpu + 16 * 512


def test_a_kernel_that_a_gpu_has_not_is_the_error_of_a_real_run() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def build(kind: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Step:
        model = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        inputs = torch.ones(1, 2, 8, WIDTH, dtype=torch.bfloat16, device="cuda")

        def run() -> None:
            made = model(inputs)
            with sdpa_kernel(kind):
                F.scaled_dot_product_attention(made, made, made).sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        names = {trainfit.capture(lambda: build(kind), device="h100").op_name(n) for n in range(12)}  # noqa: B023
        assert "aten._scaled_dot_product_flash_attention.default" in names
    with pytest.raises(trainfit.TrainfitError, match=r"No available kernel.*t4 has none of the allowed ones"):
        trainfit.capture(build, device="t4")
    assert trainfit.capture(lambda: build(SDPBackend.MATH), device="t4").ops


def test_graphs_are_named_in_the_refusal() -> None:
    def build() -> Step:
        torch.cuda.CUDAGraph()
        return Step.of(nn.Linear(WIDTH, WIDTH).cuda(), torch.ones(4, WIDTH, device="cuda"), loss=torch.sum)

    with pytest.raises(CaptureError, match=r"calls torch\.cuda\.CUDAGraph, which trainfit's stand-in"):
        captured(build, "cuda")
