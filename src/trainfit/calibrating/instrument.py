"""What measures: the device of this machine that is calibrated, its clock, and where its tensors are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from trainfit.calibrating.probes import ProbeSizes
from trainfit.devices.architectures import FLASH_CAPABILITY, capability_of, is_amd
from trainfit.devices.device_table import Device, Kind, present_gpu, this_cpu
from trainfit.devices.hardware import CUDA, Cuda, free_bytes
from trainfit.devices.measured_cache import processor_name
from trainfit.timing.clocks import Timed, timed_on
from trainfit.timing.locality import this_machines_caches
from trainfit.workspace.processor_faults import kernels_die

GPU_SIZES = ProbeSizes(side=8192, stream_bytes=1 << 30, images=32, pixels=56, sequences=16, tokens=1024)
CPU_SIZES = ProbeSizes(side=1024, stream_bytes=1 << 24, images=2, pixels=28, sequences=1, tokens=256)
_MEMORY_SHARE = 0.5
"""Of the free memory, for the tensors of one group of probes."""
_TENSORS_OF_A_GROUP = 20
"""About how many tensors of `stream_bytes` there are at once."""
_LEAST_STREAM_BYTES = 1 << 16
_FAR = 4
"""What is as many times as large as the last cache has left it when it is read again."""


@dataclass(frozen=True)
class Instrument:
    """The device that is measured."""

    device: Device
    """As it is known before: a GPU of the table with its datasheet, or only its memory."""
    place: str
    """Where its tensors are made, as torch names it."""
    timed: Timed
    sizes: ProbeSizes
    rates: tuple[str, ...]
    """The products that it has."""
    cuda: Cuda = CUDA

    @property
    def kind(self) -> Kind:
        """The kind of the device."""
        return self.device.kind

    @property
    def known(self) -> bool:
        """Whether the table has a datasheet for it."""
        return self.device.bandwidth_bytes_per_second is not None

    @property
    def rate_of_steps(self) -> str:
        """The products that mixed precision uses here."""
        return next((rate for rate in ("bf16", "fp16") if rate in self.rates), "fp32")

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.kind == "cuda":
            self.cuda.synchronize()

    def free_bytes(self) -> int:
        """Return the memory that is free now."""
        return free_bytes(self.kind, self.cuda)

    def let_go(self) -> None:
        """Give back what torch's allocator keeps for later."""
        if self.kind == "cuda":
            self.cuda.let_go()

    def wall(self) -> float:
        """Return the time on the wall when the device has done everything."""
        self.synchronize()
        return time.perf_counter()


def cpu_instrument() -> Instrument:
    """Return what measures this machine's processor, with as many threads as torch uses now."""
    caches = this_machines_caches()
    device = replace(
        this_cpu(),
        name=processor_name(),
        sm_count=torch.get_num_threads(),
        cache_bytes=caches.last_bytes,
    )
    rates = ("fp32",) if kernels_die("bfloat16") else ("fp32", "bf16")
    sizes = replace(CPU_SIZES, cache_bytes=caches.last_bytes)
    return Instrument(device, "cpu", timed_on("cpu"), _that_fit(sizes, free_bytes("cpu")), rates)


@contextlib.contextmanager
def gpu_instrument(number: int, cuda: Cuda = CUDA) -> Iterator[Instrument]:
    """Return what measures a GPU of this machine, which is the current one meanwhile."""
    device = present_gpu(number, cuda)
    found = cuda.properties(number)
    device = replace(device, cache_bytes=device.cache_bytes or found.cache_bytes or None)
    cache = device.cache_bytes or 0
    sizes = replace(GPU_SIZES, cache_bytes=cache, stream_bytes=max(GPU_SIZES.stream_bytes, _FAR * cache))
    before = cuda.current()
    cuda.use(number)
    try:
        fitting = _that_fit(sizes, cuda.free_bytes())
        yield Instrument(device, cuda.place(), timed_on("cuda", cuda), fitting, _gpu_rates(device), cuda)
    finally:
        cuda.use(before)


def _gpu_rates(device: Device) -> tuple[str, ...]:
    if is_amd(device.architecture):
        return ("fp32", "bf16", "fp16")
    capability = capability_of(device.architecture)
    if capability is not None and capability < FLASH_CAPABILITY:
        return ("fp32", "fp16")
    return ("fp32", "tf32", "bf16", "fp16")


def _that_fit(sizes: ProbeSizes, free: int) -> ProbeSizes:
    """Return sizes for as much memory as is free: it is what only moves memory that needs most of it."""
    most = int(_MEMORY_SHARE * free) // _TENSORS_OF_A_GROUP
    return replace(sizes, stream_bytes=min(sizes.stream_bytes, max(most, _LEAST_STREAM_BYTES)))
