"""Capturing for one GPU or another: its architecture decides, and `torch.cuda` answers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_steps import captured, inside, op_names, training
from torch import nn

import trainfit
from trainfit.devices.architectures import capability_of, same_kernels
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import CaptureError, StepError
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
FORMULA = "bmm"


# Which architecture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "capability"),
    [
        ("sm_70", (7, 0)),
        ("sm_89", (8, 9)),
        ("sm_90a", (9, 0)),
        ("sm_120", (12, 0)),
        ("gfx90a", (9, 0)),
        ("gfx942", (9, 4)),
        ("gfx1100", (11, 0)),
        ("Hopper", None),
        ("", None),
    ],
)
def test_an_architecture_has_a_capability(architecture: str, capability: tuple[int, int] | None) -> None:
    assert capability_of(architecture) == capability


def test_generations_choose_the_same_kernels() -> None:
    assert same_kernels("sm_80", "sm_90")
    assert same_kernels("sm_70", "sm_75")
    assert not same_kernels("sm_75", "sm_80")
    assert not same_kernels("sm_90", "gfx942")


# Attention ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, head: int, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(2, 4, 256, head, dtype=dtype))
        self.rows = options.pop("rows", 256)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.query[:, :, : self.rows]
        return F.scaled_dot_product_attention(self.query * 1, key * 1, key * 2, **self.options)


def attention_step(head: int, dtype: torch.dtype, **options: Any) -> Callable[[], Step]:
    return training(lambda: Attention(head, dtype, **options), 1, loss=lambda y: y.float().sum())


def kernel_of(trace: Trace) -> str:
    (kernel,) = {FLASH, EFFICIENT, FORMULA} & set(op_names(trace))
    return kernel


def gpu(architecture: str) -> Device:
    return Device("some-gpu", "cuda", 16 << 30, architecture=architecture, sm_count=40)


@pytest.mark.parametrize(
    ("architecture", "head", "dtype", "options", "kernel"),
    [
        # Before Ampere there is no flash attention, and no fused kernel at all for bfloat16.
        ("sm_70", 64, torch.bfloat16, {}, FORMULA),
        ("sm_75", 64, torch.bfloat16, {}, FORMULA),
        ("sm_70", 64, torch.float16, {}, EFFICIENT),
        ("sm_75", 64, torch.float16, {"is_causal": True}, EFFICIENT),
        ("sm_75", 64, torch.float32, {}, EFFICIENT),
        ("sm_80", 64, torch.bfloat16, {}, FLASH),
        ("sm_90", 64, torch.float16, {}, FLASH),
        ("sm_120", 64, torch.bfloat16, {}, FLASH),
        # Tensor cores want heads that are multiples of 16 bytes; in fp32 they came with Ampere.
        ("sm_75", 62, torch.float32, {}, EFFICIENT),
        ("sm_80", 62, torch.float32, {}, FORMULA),
        ("sm_75", 60, torch.float16, {}, FORMULA),
        # Large heads on chips for desktops.
        ("sm_80", 208, torch.bfloat16, {}, FLASH),
        ("sm_86", 208, torch.bfloat16, {}, EFFICIENT),
        ("sm_89", 256, torch.bfloat16, {}, FLASH),
        ("sm_89", 256, torch.bfloat16, {"dropout_p": 0.1}, EFFICIENT),
        ("sm_120", 208, torch.bfloat16, {}, EFFICIENT),
        # A causal mask that is not square.
        ("sm_90", 64, torch.bfloat16, {"is_causal": True, "rows": 128}, EFFICIENT),
        ("gfx942", 64, torch.bfloat16, {}, FLASH),
        ("gfx90a", 512, torch.float16, {}, FLASH),
        ("gfx942", 64, torch.float32, {}, EFFICIENT),
        ("gfx1100", 64, torch.bfloat16, {}, FORMULA),
    ],
)
def test_the_architecture_decides_about_the_attention_kernel(
    architecture: str, head: int, dtype: torch.dtype, options: dict[str, Any], kernel: str
) -> None:
    trace = captured(attention_step(head, dtype, **options), gpu(architecture))
    assert kernel_of(trace) == kernel


def test_attention_in_bfloat16_needs_the_scores_on_a_v100() -> None:
    # GIVEN the same step on both cards
    build = attention_step(64, torch.bfloat16)
    old, new = (trainfit.estimate(build, device=name) for name in ("v100-sxm-16gb", "a100-sxm-40gb"))
    # THEN the older one makes the scores, twice, in fp32: softmax keeps its result, backward has its gradient
    scores = 2 * 4 * 256 * 256 * 4
    assert old.peak_bytes - new.peak_bytes > 2 * scores


def test_a_device_without_an_architecture_counts_as_recent_and_says_so() -> None:
    trace = captured(attention_step(64, torch.bfloat16), gpu(""))
    assert kernel_of(trace) == FLASH
    (warning,) = trace.warnings
    assert "the architecture of some-gpu (not given) is not known" in warning


# Traces are for devices that choose the same --------------------------------------------------------------


def test_a_trace_is_refused_on_a_device_that_would_run_other_kernels() -> None:
    trace = captured(attention_step(64, torch.bfloat16), find_device("h100-sxm-80gb"))
    assert trace.architecture == "sm_90"
    assert trainfit.estimate(trace, device="a100-sxm-80gb").peak_bytes > 0
    with pytest.raises(StepError, match=r"captured for sm_90, .* other kernels on v100-sxm-16gb \(sm_70\)"):
        trainfit.estimate(trace, device="v100-sxm-16gb")


def test_a_trace_in_which_nothing_depends_on_the_architecture_is_for_every_gpu() -> None:
    for build in (attention_step(64, torch.float32), training(lambda: nn.Linear(4, 4), 3, 4)):
        trace = captured(build, find_device("h100-sxm-80gb"))
        assert trace.architecture == ""
        assert trainfit.estimate(trace, device="v100-sxm-16gb").peak_bytes > 0


def test_a_step_that_asks_for_the_architecture_depends_on_it() -> None:
    def half() -> Step:
        model = nn.Linear(
            4, 4, dtype=torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
        )
        inputs = torch.ones(2, 4, dtype=model.weight.dtype)
        return Step.of(model, inputs, loss=lambda y: y.float().sum())

    dtypes = [
        captured(half, find_device(name)).signatures[0].inputs[0].dtype
        for name in ("t4", "v100-sxm-32gb", "a100-sxm-40gb", "mi300x")
    ]
    assert dtypes == ["float16", "float16", "bfloat16", "bfloat16"]
    assert captured(half, find_device("t4")).architecture == "sm_75"


# What torch.cuda says -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t4", "v100-sxm-32gb", "rtx-4090", "h100-sxm-80gb", "mi300x"])
def test_torch_cuda_answers_for_the_device_that_was_named(name: str) -> None:
    device = find_device(name)

    def question() -> Any:
        properties = torch.cuda.get_device_properties(0)
        return (
            torch.cuda.get_device_capability("cuda:0"),
            (properties.major, properties.minor),
            properties.total_memory,
            properties.multi_processor_count,
            torch.cuda.mem_get_info()[1],
            torch.cuda.get_device_name(),
        )

    capability, version, memory, count, total, shown = inside(question, device)
    assert capability == version == capability_of(device.architecture)
    assert memory == total == device.memory_bytes
    assert count == device.sm_count
    assert name.split("-")[0].upper() in shown
    assert shown.startswith("AMD" if name.startswith("mi") else "NVIDIA")


def test_torch_cuda_says_what_is_allocated_and_what_is_left() -> None:
    device = find_device("t4")

    def question() -> list[int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = torch.empty(1000, device="cuda")
        large = torch.empty(1 << 20, device="cuda")
        del large
        on_host = torch.empty(5000, device="cpu")
        free, _ = torch.cuda.mem_get_info()
        answers = [
            torch.cuda.memory_allocated() - before,
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before,
            device.usable_bytes - free - before,
        ]
        del kept, on_host
        return answers

    rounded = 4096  # 4,000 bytes in blocks of 512
    assert inside(question, device) == [rounded, rounded + (4 << 20), rounded + (4 << 20), rounded]


# One GPU --------------------------------------------------------------------------------------------------


def _layer_on_second() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1"))


USES_OF_A_SECOND_GPU: dict[str, Callable[[], Any]] = {
    "a layer": _layer_on_second,
    "to a name": lambda: torch.ones(3).to("cuda:1"),
    "to a device": lambda: torch.ones(3).to(torch.device("cuda", 1)),
    "to a number": lambda: torch.ones(3).to(1),
    "cuda with a number": lambda: torch.ones(3).cuda(1),
    "cuda of a module": lambda: nn.Linear(2, 2).cuda(1),
    "set_device": lambda: torch.cuda.set_device(1),
    "with device": lambda: torch.cuda.device(1),
    "default device": lambda: torch.set_default_device("cuda:1"),
    "properties": lambda: torch.cuda.get_device_properties(1),
}


@pytest.mark.parametrize("use", USES_OF_A_SECOND_GPU.values(), ids=USES_OF_A_SECOND_GPU.keys())
def test_a_second_gpu_is_refused_by_name_and_line(use: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match=r"second GPU, cuda:1 \(.*test_gpus.py:\d+\)"):
        inside(use, find_device("h100-sxm-80gb"))


def test_a_model_over_two_gpus_is_not_added_up_on_one() -> None:
    with pytest.raises(CaptureError, match="second GPU, cuda:1"):
        trainfit.estimate(training(_layer_on_second, 3, 4), device="h100-sxm-80gb")


def test_the_first_gpu_may_be_named_with_its_number() -> None:
    def question() -> bool:
        torch.cuda.set_device(0)
        with torch.cuda.device("cuda:0"), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.Event(enable_timing=True).record()
            return torch.ones(3).cuda(0).to("cuda:0").is_cuda

    assert inside(question, find_device("h100-sxm-80gb"))


def test_torch_compile_may_be_loaded_while_a_capture_for_a_gpu_runs() -> None:
    # It keeps rules by function, so that no two names of torch.cuda may have the same function.
    def question() -> list[str]:
        functions = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
        by_function: dict[int, list[str]] = {}
        for name, function in functions.items():
            if callable(function) and not isinstance(function, type):
                by_function.setdefault(id(function), []).append(name)
        return [" ".join(names) for names in by_function.values() if len(names) > 1]

    assert inside(question, find_device("h100-sxm-80gb")) == []
