"""`Device`: what a step would run on. A built-in table, this machine, or a JSON file of the user's own."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from trainfit.errors import DeviceError, OptionError
from trainfit.units import parse_size

Kind = Literal["cuda", "cpu"]
Verdict = Literal["fits", "too close to call", "does not fit"]

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")

_RATES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}
_RATES |= {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "complex64": "fp32", "complex128": "fp64"}

# Chips with 64 float32 lanes per multiprocessor; all later ones have 128.
_NARROW_MULTIPROCESSORS = ("sm_60", "sm_70", "sm_75", "sm_80")

CONTEXT_BYTES = 450 * 2**20
"""What the CUDA context and the loaded kernels take of a GPU before the first tensor; 0.3 to 0.6 GiB,
depending on the driver and on how many kernels the process has loaded."""

MARGIN_SHARE = 0.15
"""The share of a GPU's usable memory that is left for what is not simulated: how torch's caching allocator
cuts memory up, and the workspaces of cuBLAS and cuDNN.

Of six training steps whose allocations were replayed through the real allocator (GPT-2, ResNet-50 and Llama,
with plans and without), the worst needed 16.7 % more memory than it asked for. That is 14.3 % of what it
needed; the rest is for the libraries, which take 8 to 32 MiB per stream. With
`PYTORCH_ALLOC_CONF=expandable_segments:True` the worst needed 1.4 % more."""

_LARGEST_SHARE = 1.5

# Words that drivers and shops put around a model's name and that tell no two devices apart.
_VENDOR_WORDS = {"nvidia", "amd", "tesla", "geforce", "instinct", "quadro", "gpu", "graphics", "radeon"}


@dataclass(frozen=True)
class Device:
    """Memory and speed of one device. Rates are per second; links count one direction; None is unknown."""

    name: str
    kind: Kind
    memory_bytes: int
    """All of its memory, as the driver or the operating system reports it."""
    bandwidth_bytes_per_second: float | None = None
    flops: dict[str, float] = field(default_factory=dict, hash=False)
    """Dense peak FLOP/s by dtype (`DTYPES`)."""
    matmul_share: float | None = None
    """The share of the peak FLOP/s that the fastest matrix product reaches, where somebody measured it. More
    than 1 on cards that clock above what their datasheet lists."""
    cache_bytes: int | None = None
    """The last-level cache."""
    sm_count: int | None = None
    """Streaming multiprocessors, compute units, or the cores of a CPU."""
    architecture: str = ""
    nvlink_bytes_per_second: float | None = None
    """To the next device in the same node."""
    pcie_bytes_per_second: float | None = None
    """To the host."""
    source: str = ""
    """Where the figures come from."""
    aliases: tuple[str, ...] = ()

    @property
    def clock(self) -> float:
        """Cycles per second that the float32 peak implies: two FLOPs per lane and cycle."""
        lanes = 64 if self.architecture in _NARROW_MULTIPROCESSORS else 128
        return self.flops.get("fp32", 0.0) / (2 * lanes * (self.sm_count or 1))

    @property
    def has_speed(self) -> bool:
        """Whether enough is known to predict time. This machine's own processor is measured when needed."""
        known = self.bandwidth_bytes_per_second and self.flops and self.sm_count
        return bool(known) or self.kind == "cpu"

    def rate_of(self, dtype: str, tf32: tuple[str, ...] = (), kind: str = "matmul") -> str:
        """Return the rate (one of `DTYPES`) at which products of a torch dtype run.

        `tf32` are the kinds of float32 products that may be rounded. What the device has no rate for, it
        does in float32.
        """
        if dtype == "float32" and kind in tf32 and "tf32" in self.flops:
            return "tf32"
        rate = _RATES.get(dtype, "fp32")
        return rate if rate in self.flops else "fp32"

    @property
    def usable_bytes(self) -> int:
        """What is left for tensors: on a GPU the CUDA context takes its part first."""
        if self.kind == "cuda":
            return max(self.memory_bytes - CONTEXT_BYTES, 0)
        return self.memory_bytes

    @property
    def margin_bytes(self) -> int:
        """What of the usable memory is left free where nobody names a budget; nothing on a CPU."""
        return math.ceil(MARGIN_SHARE * self.usable_bytes) if self.kind == "cuda" else 0

    @property
    def default_budget_bytes(self) -> int:
        """The largest peak that is said to fit."""
        return self.usable_bytes - self.margin_bytes

    def verdict(self, peak_bytes: int) -> Verdict:
        """Say whether a peak fits: beyond the margin surely, within it nobody knows."""
        if peak_bytes <= self.default_budget_bytes:
            return "fits"
        return "too close to call" if peak_bytes <= self.usable_bytes else "does not fit"


def find_device(name: str) -> Device:
    """Return the device that `name` means: a name as people or drivers write it, `cpu`, `cuda`, or a file."""
    text = name.strip()
    lowered = text.lower()
    if lowered == "cpu":
        return this_cpu()
    if lowered == "cuda" or re.fullmatch(r"cuda:[0-9]+", lowered):
        return present_gpu(int(lowered.partition(":")[2] or 0))
    if lowered.endswith(".json") or "/" in text or os.sep in text:
        return read_device(Path(text).expanduser())
    found = _match(text)
    if len(found) == 1:
        return found[0]
    if found:
        raise DeviceError(
            f"{name!r} could be any of {', '.join(device.name for device in found)}; name one of them."
        )
    raise DeviceError(_unknown(name))


@cache
def known_devices() -> tuple[Device, ...]:
    """Return the built-in table."""
    text = resources.files("trainfit").joinpath("devices.json").read_text(encoding="utf-8")
    return tuple(_device(entry, "devices.json") for entry in json.loads(text)["devices"])


def this_cpu() -> Device:
    """Describe the processor and the memory of this machine."""
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=_host_memory_bytes(),
        sm_count=os.cpu_count(),
        architecture=os.uname().machine,
        source="this machine",
    )


def present_gpu(number: int = 0) -> Device:
    """Describe a GPU of this machine: its memory from the driver, its speed from the table if it is there."""
    import torch  # only here: the device table must answer without torch

    if not torch.cuda.is_available():
        raise DeviceError("no CUDA GPU in this machine; name one, e.g. --device h100.")
    if number >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{number}; this machine has {torch.cuda.device_count()} GPU(s).")
    properties = torch.cuda.get_device_properties(number)
    matches = _match(properties.name)
    known = matches[0] if len(matches) == 1 else Device(properties.name, "cuda", 0)
    return replace(
        known,
        memory_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        architecture=known.architecture or f"sm_{properties.major}{properties.minor}",
        source=f"this machine; {known.source}" if known.source else "this machine",
    )


def read_device(path: Path) -> Device:
    """Read a device from a JSON file that has the fields of `Device`, sizes as bytes or as `24GiB`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DeviceError(f"the device file {str(path)!r} cannot be read: {reason}.") from None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"the device file {str(path)!r} is not JSON: {error}.") from None
    return _device(entry, str(path))


def _unknown(name: str) -> str:
    known = [device.name for device in known_devices()]
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close:
        return (
            f"there is no device {name!r}. Did you mean {' or '.join(close)}? `trainfit devices` lists all."
        )
    return (
        f"there is no device {name!r}. Write cpu (this machine), cuda (the GPU in it), a JSON file of your "
        f"own, or one of {', '.join(known)}."
    )


def _match(name: str) -> tuple[Device, ...]:
    """Return the devices whose name or alias is `name`, else those whose words include all of its words."""
    words = _words(name)
    squashed = "".join(words)
    if not squashed:
        return ()
    for device in known_devices():
        if any("".join(_words(known)) == squashed for known in (device.name, *device.aliases)):
            return (device,)
    return tuple(device for device in known_devices() if set(words) <= _vocabulary(device))


def _vocabulary(device: Device) -> set[str]:
    return {word for known in (device.name, *device.aliases) for word in _words(known)}


def _words(name: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [word for word in words if word not in _VENDOR_WORDS]


def _device(entry: Any, place: str) -> Device:
    """Make a Device of a JSON object, or say which field is wrong."""
    if not isinstance(entry, dict):
        raise DeviceError(f"{place}: a device is a JSON object, got {type(entry).__name__}.")
    allowed = [known.name for known in fields(Device)]
    for key in entry:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else f" The fields are {', '.join(allowed)}."
            raise DeviceError(f"{place}: a device has no field {key!r}.{meant}")
    for required in ("name", "memory_bytes"):
        if required not in entry:
            raise DeviceError(f"{place}: the field {required!r} is missing.")
    values = {"kind": "cuda", "source": place, **entry}
    return Device(**{key: _CHECKS[key](value, f"{place}: {key!r}") for key, value in values.items()})


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or (what.endswith("'name'") and not value.strip()):
        raise DeviceError(f"{what} must be a text, got {value!r}.")
    return value


def _kind(value: Any, what: str) -> str:
    if value not in get_args(Kind):
        raise DeviceError(f"{what} must be one of {', '.join(get_args(Kind))}, got {value!r}.")
    return str(value)


def _size(value: Any, what: str) -> int:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except OptionError as error:
            raise DeviceError(f"{what}: {error}") from None
    return _whole(value, what)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise DeviceError(f"{what} must be a whole number above zero, got {value!r}.")
    return value


def _rate(value: Any, what: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails both comparisons; no device does 10^30 of anything in a second.
    if not is_number or not 0 < value < 1e30:
        raise DeviceError(f"{what} must be a number above zero, got {value!r}.")
    return float(value)


def _share(value: Any, what: str) -> float:
    if _rate(value, what) > _LARGEST_SHARE:
        raise DeviceError(f"{what} is a share of the peak, at most {_LARGEST_SHARE}, got {value!r}.")
    return float(value)


def _flops(value: Any, what: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise DeviceError(f"{what} must be an object of dtype: FLOP/s, got {value!r}.")
    for dtype in value:
        if dtype not in DTYPES:
            raise DeviceError(f"{what}: {dtype!r} is no dtype; they are {', '.join(DTYPES)}.")
    return {dtype: _rate(rate, f"{what}: {dtype!r}") for dtype, rate in value.items()}


def _aliases(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
        raise DeviceError(f"{what} must be a list of texts, got {value!r}.")
    return tuple(value)


def _or_unknown(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, what: None if value is None else check(value, what)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "kind": _kind,
    "memory_bytes": _size,
    "bandwidth_bytes_per_second": _or_unknown(_rate),
    "flops": _flops,
    "matmul_share": _or_unknown(_share),
    "cache_bytes": _or_unknown(_size),
    "sm_count": _or_unknown(_whole),
    "architecture": _text,
    "nvlink_bytes_per_second": _or_unknown(_rate),
    "pcie_bytes_per_second": _or_unknown(_rate),
    "source": _text,
    "aliases": _aliases,
}


def _host_memory_bytes() -> int:
    """Return the memory of this machine, or of the container it runs in if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory
