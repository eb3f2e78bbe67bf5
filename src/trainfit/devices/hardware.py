"""What this machine says about itself: its memory, what of it is free, and the statistics of its GPU.

`Cuda` is everything that is asked of a real GPU while a step or an operator is measured. No GPU has run this
code yet: tests have a stand-in for it, and check what is computed from its answers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class GpuProperties:
    """What the driver says about a GPU."""

    name: str
    memory_bytes: int
    cache_bytes: int
    """Its L2 cache."""
    multiprocessors: int
    architecture: str


class Cuda:
    """The GPUs of this machine, by `torch.cuda`; memory and time are those of the current one."""

    @property
    def _torch(self) -> Any:
        import torch  # only now: the device table must answer without torch

        return torch.cuda

    def count(self) -> int:
        """Return how many there are."""
        return int(self._torch.device_count()) if self._torch.is_available() else 0

    def properties(self, number: int = 0) -> GpuProperties:
        """Describe one of them."""
        found = self._torch.get_device_properties(number)
        return GpuProperties(
            found.name,
            found.total_memory,
            int(found.L2_cache_size),
            found.multi_processor_count,
            f"sm_{found.major}{found.minor}",
        )

    def free_bytes(self) -> int:
        """Return the memory that is free now; what torch's allocator has cached is not."""
        return int(self._torch.mem_get_info()[0])

    def allocated_bytes(self) -> int:
        """Return what tensors take now."""
        return int(self._torch.memory_allocated())

    def peak_bytes(self) -> int:
        """Return the most that tensors took since `restart_peak`."""
        return int(self._torch.max_memory_allocated())

    def restart_peak(self) -> None:
        """Let the peak begin at what is allocated now."""
        self._torch.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was launched; nothing to wait for if it was never used."""
        if self._torch.is_initialized():
            self._torch.synchronize()

    def event(self) -> torch.cuda.Event:
        """Return a mark that knows the time at which the GPU reaches it."""
        event: torch.cuda.Event = self._torch.Event(enable_timing=True)
        return event

    def sleep(self, cycles: int) -> None:
        """Keep the GPU busy for this many cycles."""
        self._torch._sleep(cycles)

    def current(self) -> int:
        """Return the number of the GPU that is used where none is named."""
        return int(self._torch.current_device())

    def use(self, number: int) -> None:
        """Make this GPU the current one."""
        self._torch.set_device(number)

    def place(self) -> str:
        """Return where tensors of the current GPU are made, as torch names it."""
        return "cuda"

    def used_bytes(self) -> int:
        """Return what all programs take of the GPU's memory, as its driver counts it."""
        free, total = self._torch.mem_get_info()
        return int(total) - int(free)

    def reserved_bytes(self) -> int:
        """Return what torch's allocator has taken from the driver."""
        return int(self._torch.memory_reserved())

    def let_go(self) -> None:
        """Give the driver back what the allocator keeps for later."""
        self._torch.empty_cache()

    def driver(self) -> str:
        """Return the version of the driver; nothing where the system does not say."""
        try:
            first = _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        except OSError:
            return ""
        found = re.search(r"\b[0-9]{3,}(?:\.[0-9]+)+\b", first)
        return found[0] if found else ""


CUDA = Cuda()


def host_bytes() -> int:
    """Return the memory of this machine, or of the container it runs in if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def free_bytes(kind: str, cuda: Cuda = CUDA) -> int:
    """Return the memory that is free now: the GPU's (`cuda`), or the host's without swapping (`cpu`)."""
    if kind == "cuda":
        return cuda.free_bytes()
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next((line for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        available = None
    return host_bytes() if available is None else int(available.split()[1]) * 1024
