"""`Device`: what a step would run on. A built-in table, this machine, or a JSON file of the user's own."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trainfit.basics.decoding import Malformed, decode, expected, parse_json
from trainfit.basics.units import parse_size
from trainfit.devices.efficiency import Constants
from trainfit.devices.hardware import CUDA, Cuda, host_bytes
from trainfit.errors import DeviceError, OptionError

Kind = Literal["cuda", "cpu"]
Verdict = Literal["fits", "too close to call", "does not fit"]

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""What a device has FLOP/s for."""
_RATES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}
_RATES |= {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "complex64": "fp32", "complex128": "fp64"}

# Chips with 64 float32 lanes per multiprocessor; all later ones have 128.
_NARROW_MULTIPROCESSORS = ("sm_60", "sm_70", "sm_75", "sm_80")

CONTEXT_BYTES = 450 * 2**20
"""What the CUDA context and the loaded kernels take of a GPU before the first tensor; 0.3 to 0.6 GiB,
depending on the driver and on how many kernels the process has loaded."""

MARGIN_SHARE = 0.04
"""The share of a GPU's usable memory that is left for what is not simulated: the algorithms that cuDNN
chooses and their workspaces, kernels that are loaded late, other processes.

`benchmarks/memory_published.py` compares with batches that ran or ran out of memory on a GPU of 24 GB: of
those that ran, the one closest to the limit is predicted to need 92.3 % of the usable memory, and of those
that did not, 101.4 %. The margin is in the middle of what is left."""

_MPS = (
    "Apple's GPUs (mps) cannot be predicted: what torch's Metal kernels keep and allocate inside Metal is "
    "described nowhere, and differs from both a CPU and CUDA. --device cpu predicts the tensors on a CPU."
)

_SIZES = ("memory_bytes", "cache_bytes")
"""Fields that a file may also give as text, such as `24GiB`."""
_LARGEST_RATE, _LARGEST_SHARE = 1e30, 1.5
"""No device does 10^30 of anything in a second."""
_SHOWN_CONSTANTS = 8
"""Of all those that a message about an unknown one could name."""

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
    """Dense peak FLOP/s by dtype (one of `DTYPES`)."""
    matmul_share: float | None = None
    """The share of the peak FLOP/s that the fastest matrix product reaches, where somebody measured it. More
    than 1 on cards that clock above what their datasheet lists."""
    calibrated: bool = False
    """Whether published step times of this device were among those that the roofline is fitted on."""
    cache_bytes: int | None = None
    """The L2 cache."""
    sm_count: int | None = None
    """Streaming multiprocessors, compute units, or the cores of a CPU."""
    architecture: str = ""
    """What kernels are compiled for: `sm_80` (compute capability 8.0), `gfx942`, or a CPU's family."""
    nvlink_bytes_per_second: float | None = None
    """To the next device in the same node."""
    nvlink_gpus: int | None = None
    """How many GPUs NVLink connects with each other: those of a node, or two by a bridge."""
    network_bytes_per_second: float | None = None
    """To other nodes, for each GPU of the nodes that are usually built of it."""
    pcie_bytes_per_second: float | None = None
    """To the host."""
    source: str = ""
    """Where the figures come from."""
    aliases: tuple[str, ...] = ()
    constants: dict[str, float] = field(default_factory=dict, hash=False)
    """Constants of the roofline (fields of `efficiency.Constants`) that replace the general ones on this
    device: what somebody measured on it."""

    context_bytes: int | None = None
    """What the CUDA context and the loaded kernels were seen to take; None if nobody has looked."""
    communicator_bytes: int | None = None
    """What NCCL's communicators take in a job of several ranks; None: what is assumed of those in use."""
    exchange_seconds: dict[str, float] = field(default_factory=dict, hash=False)
    """Where somebody measured collectives: the seconds of one that exchanges nothing, by kind and number of
    ranks, such as `all_gather 4`."""
    exchange_bytes_per_second: dict[str, float] = field(default_factory=dict, hash=False)
    """How many bytes a second it carries beyond that, by the same names."""
    spreads: dict[str, float] = field(default_factory=dict, hash=False)
    """How far measurements of a figure or constant were apart, relative to it, where it was measured."""

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
        """What is left for tensors: on a GPU the CUDA context takes its part first, and so does NCCL."""
        if self.kind != "cuda":
            return self.memory_bytes
        outside = (self.context_bytes or CONTEXT_BYTES) + (self.communicator_bytes or 0)
        return max(self.memory_bytes - outside, 0)

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


ANY_GPU = Device("gpu", "cuda", 80 << 30, architecture="sm_90", sm_count=132)
"""What is assumed of a GPU if only that it is one is known."""


def find_device(name: str) -> Device:
    """Return the device that `name` means: a name as people or drivers write it, `cpu`, `cuda`, or a file."""
    if not isinstance(name, str):
        raise DeviceError(
            f"a device is named by a text, as in 'h100', 'cpu' or 'my-device.json', got {name!r:.80}."
        )
    text = name.strip()
    lowered = text.lower()
    if lowered == "cpu":
        return this_cpu()
    if re.fullmatch(r"mps(:[0-9]+)?", lowered):
        raise DeviceError(_MPS)
    if re.fullmatch(r"cuda(:[0-9]+)?", lowered):
        return present_gpu(int(lowered.partition(":")[2] or 0))
    if lowered.endswith(".json") or "/" in text or os.sep in text:
        return read_device(Path(os.path.expanduser(text)))
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
    text = resources.files("trainfit.devices").joinpath("devices.json").read_text(encoding="utf-8")
    return tuple(_device(entry, "devices.json") for entry in parse_json(text)["devices"])


def this_cpu() -> Device:
    """Describe the processor and the memory of this machine."""
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=host_bytes(),
        sm_count=os.cpu_count(),
        architecture=os.uname().machine,
        source="this machine",
    )


def present_gpu(number: int = 0, cuda: Cuda = CUDA) -> Device:
    """Describe a GPU of this machine: its memory from the driver, its speed from the table if it is there."""
    count = cuda.count()
    if not count:
        raise DeviceError("no CUDA GPU in this machine; name one, e.g. --device h100.")
    if number >= count:
        raise DeviceError(f"there is no cuda:{number}; this machine has {count} GPU(s).")
    found = cuda.properties(number)
    matches = _match(found.name)
    known = matches[0] if len(matches) == 1 else Device(found.name, "cuda", 0)
    return replace(
        known,
        memory_bytes=found.memory_bytes,
        sm_count=found.multiprocessors,
        architecture=known.architecture or found.architecture,
        source=f"this machine; {known.source}" if known.source else "this machine",
    )


def read_device(path: Path) -> Device:
    """Read a device from a JSON file that has the fields of `Device`, sizes as bytes or as `24GiB`."""
    try:
        entry = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DeviceError(f"the device file {str(path)!r} cannot be read: {reason}.") from None
    except Malformed as error:
        raise DeviceError(f"the device file {str(path)!r} is {error}.") from None
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
    if not _words(name):
        return ()
    names = {device: (device.name, *device.aliases) for device in known_devices()}
    for squash in (_squashed, _without_series):
        found = [device for device, known in names.items() if squash(name) in map(squash, known)]
        if len(found) == 1:
            return (found[0],)
    words = set(_words(name))
    return tuple(device for device, known in names.items() if words.issubset(_words(" ".join(known))))


def _squashed(name: str) -> str:
    return "".join(_words(name))


def _without_series(name: str) -> str:
    """Return the name as those write it who leave the series away: `3080` is an RTX 3080, not a 3080 Ti."""
    return "".join(word for word in _words(name) if word != "rtx") or _squashed(name)


def _words(name: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [word for word in words if word not in _VENDOR_WORDS]


def _device(entry: Any, place: str) -> Device:
    """Return the device that a JSON object describes, or say which field is wrong and why."""
    try:
        if isinstance(entry, dict):
            entry = {"kind": "cuda", "source": place, **entry}
            for name in _SIZES:
                if isinstance(entry.get(name), str):
                    entry[name] = _parsed_size(entry[name], name)
        device = decode(Device, entry, defaults=True)
        _check(device)
    except Malformed as error:
        raise DeviceError(f"{place}: {error}.") from None
    return device


def _parsed_size(text: str, name: str) -> int:
    try:
        return parse_size(text)
    except OptionError as error:
        raise Malformed(str(error).removesuffix("."), name) from None


def _check(device: Device) -> None:
    """Check what the types of the fields do not say."""
    if not device.name.strip():
        raise expected("text", device.name).inside("name")
    for dtype, rate in device.flops.items():
        if dtype not in DTYPES:
            raise expected(f"one of {', '.join(DTYPES)}", dtype).inside("flops")
        if not 0 < rate < _LARGEST_RATE:
            raise expected("a number above zero", rate).inside(f"flops.{dtype}")
    names = [known.name for known in fields(Constants)]
    for name, value in device.constants.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            some = f"there are {', '.join(names[:_SHOWN_CONSTANTS])} and {len(names) - _SHOWN_CONSTANTS} more"
            hint = f"did you mean {close[0]!r}?" if close else some
            raise Malformed(f"there is no constant {name!r:.60} ({hint})", "constants")
        if not 0 < value < _LARGEST_RATE:
            raise expected("a number above zero", value).inside(f"constants.{name}")
    for place in ("exchange_seconds", "exchange_bytes_per_second"):
        for name, value in getattr(device, place).items():
            if not 0 < value < _LARGEST_RATE:
                raise expected("a number above zero", value).inside(f"{place}.{name}")
    for name, spread in device.spreads.items():
        if spread < 0:
            raise expected("a number from zero", spread).inside(f"spreads.{name}")
    for known in fields(device):
        value = getattr(device, known.name)
        if type(value) in (int, float) and not 0 < value < _LARGEST_RATE:
            raise expected("a number above zero", value).inside(known.name)
    if (device.matmul_share or 0.0) > _LARGEST_SHARE:
        share = f"a share of the peak, at most {_LARGEST_SHARE}"
        raise expected(share, device.matmul_share).inside("matmul_share")
