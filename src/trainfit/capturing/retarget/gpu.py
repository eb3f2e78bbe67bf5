"""The GPU that a capture simulates, and what `torch.cuda` says about it.

The figures are those of the device that the step is captured for. Its memory is what the capture has counted
so far, without what torch's allocator keeps in reserve and without kernels' workspaces.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from trainfit.capturing.asked_device import note_question
from trainfit.capturing.ledger import Ledger
from trainfit.capturing.own_gpu import gpus_of_node, own_device, own_number, refuse_second_gpu
from trainfit.capturing.retarget.streams import Streams, answers_about_streams
from trainfit.devices.architectures import FLASH_CAPABILITY, Capability, capability_of, is_amd
from trainfit.devices.device_table import Device
from trainfit.traces.assumptions import Assumption

_RECENT: Capability = (9, 0)


class Gpu:
    """One GPU: its memory is what the ledger counts. It remembers what the step has asked about it."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        """Pretend to be `device`."""
        self.device = device
        self.ledger = ledger
        self.architecture_mattered = False
        """Whether the step, or a kernel in it, depends on the architecture."""
        self.named = False
        """Whether the step has put anything on a GPU."""

    @property
    def is_amd(self) -> bool:
        """Whether the GPU is one of AMD's."""
        self.architecture_mattered = True
        return is_amd(self.device.architecture)

    @property
    def capability(self) -> Capability:
        """The compute capability; a device without one counts as recent."""
        self.architecture_mattered = True
        note_question("architecture")
        return capability_of(self.device.architecture) or _RECENT

    @property
    def name(self) -> str:
        """Roughly the name that a driver reports."""
        note_question("device")
        vendor = "AMD" if is_amd(self.device.architecture) else "NVIDIA"
        return f"{vendor} {self.device.name.upper().replace('-', ' ')}"

    def has_bfloat16(self, including_emulation: bool = True) -> bool:
        """Whether bfloat16 works, as `torch.cuda.is_bf16_supported` answers: older chips emulate it."""
        return including_emulation or self.is_amd or self.capability >= FLASH_CAPABILITY

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free now, and all bytes."""
        note_question("device")
        return max(self.device.usable_bytes - self.ledger.live_bytes, 0), self.device.memory_bytes

    def properties(self) -> SimpleNamespace:
        """Return those of torch's device properties that are known."""
        note_question("device")
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            total_memory=self.device.memory_bytes,
            multi_processor_count=self.device.sm_count or 1,
            L2_cache_size=self.device.cache_bytes or 0,
            warp_size=64 if self.is_amd else 32,
            gcnArchName=self.device.architecture,
            is_integrated=0,
            is_multi_gpu_board=0,
        )

    def assumptions(self) -> tuple[Assumption, ...]:
        """Return what had to be assumed about the GPU."""
        if not self.architecture_mattered or capability_of(self.device.architecture) is not None:
            return ()
        given = self.device.architecture or "not given"
        text = (
            f"the architecture of {self.device.name} ({given}) is not known: "
            "kernels were chosen as on a recent NVIDIA GPU; write it like sm_90 or gfx942"
        )
        return (Assumption("device", text),)

    def statistics(self) -> dict[str, int]:
        """Return the entries of `memory_stats` that a capture knows."""
        now, most = self.ledger.live_bytes, self.ledger.most_bytes
        kinds = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
        return {
            f"{kind}.all.{when}": value
            for kind in kinds
            for when, value in (("current", now), ("peak", most))
        }


class Inert:
    """A handle that does nothing, such as the choice of a device for a while."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for place in (*args, *kwargs.values()):
            refuse_second_gpu(place)
        self.device = own_device()

    def __enter__(self) -> Inert:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None


def answers_of_cuda(gpu: Gpu, streams: Streams) -> dict[str, Any]:
    """Return functions of `torch.cuda` that answer for `gpu`, by name."""
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": gpus_of_node,
        "current_device": own_number,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": gpu.has_bfloat16,
        "get_device_name": _about_one(lambda: gpu.name),
        "get_device_capability": _about_one(lambda: gpu.capability),
        "get_device_properties": _about_one(gpu.properties),
        "mem_get_info": _about_one(gpu.memory),
        "memory_stats": _about_one(gpu.statistics),
        "memory_summary": lambda *args, **kwargs: "",
        "set_device": _about_one(lambda: None),
        # The state of a GPU's generator is kept on the host and takes no device memory.
        "get_rng_state": _host_state,
        "get_rng_state_all": lambda: [_host_state()],
        "device": Inert,
        **answers_about_streams(streams),
        **_answers_about_memory(gpu),
    }
    for name in ("init", "empty_cache", "manual_seed", "manual_seed_all", "ipc_collect"):
        found[name] = _silent()
    for name in ("set_rng_state", "set_rng_state_all", "_lazy_init"):
        found[name] = _silent()
    return found


def answers_of_accelerator(gpu: Gpu, streams: Streams) -> dict[str, Any]:
    """Return functions of `torch.accelerator` that answer for `gpu`, by name."""
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda *args, **kwargs: own_device(),
        "device_count": gpus_of_node,
        "current_device_index": own_number,
        "set_device_index": _about_one(lambda: None),
        "set_device_idx": _about_one(lambda: None),
        "current_stream": streams.current,
        "set_stream": streams.enter,
        "empty_cache": _silent(),
        "get_memory_info": _about_one(gpu.memory),
        "memory_stats": _about_one(gpu.statistics),
        **_answers_about_memory(gpu),
    }


def _answers_about_memory(gpu: Gpu) -> dict[str, Any]:
    ledger = gpu.ledger
    return {
        "memory_allocated": _about_one(lambda: ledger.live_bytes),
        "memory_reserved": _about_one(lambda: ledger.live_bytes),
        "max_memory_allocated": _about_one(lambda: ledger.most_bytes),
        "max_memory_reserved": _about_one(lambda: ledger.most_bytes),
        "reset_peak_memory_stats": _about_one(ledger.forget_most),
    }


def _about_one(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function of an optional device, which must not be a second GPU."""

    def ask(device: Any = None) -> Any:
        refuse_second_gpu(device)
        return answer()

    return ask


def _silent() -> Callable[..., None]:
    """Return a function that does nothing, a new one each time: torch.compile keeps rules by function."""
    return lambda *args, **kwargs: None


def _host_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.zeros(16, dtype=torch.uint8)
