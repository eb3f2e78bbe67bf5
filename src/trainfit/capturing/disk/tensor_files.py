"""Files of safetensors, which are written and read without Python: what was "saved" is there to be loaded.

Each tensor has a snapshot of its own, because each is loaded by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.disk.pretended import path_of
from trainfit.capturing.disk.snapshots import TensorFile, TensorOnDisk
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk

try:
    import safetensors
except ImportError:  # an optional dependency
    safetensors = None  # type: ignore[assignment]

MODULES = () if safetensors is None else (safetensors,)
_FRAMEWORKS = ("pt", "torch", "pytorch")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextlib.contextmanager
def tensor_files(disk: Disk) -> Iterator[None]:
    """Skip writing safetensors files, and let the step read those that were skipped."""
    if safetensors is None:
        yield
        return
    with (
        replaced(safetensors, "safe_open", lambda original: _opens(disk, original)),
        replaced(safetensors, "serialize_file", lambda original: _serializes(disk, original)),
    ):
        yield


def _opens(disk: Disk, original: Any) -> Any:
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        if not disk.in_capture:
            return original(filename, framework, device=device, **kwargs)
        unwritten = disk.files.get(path_of(filename) or "")
        saved = unwritten.snapshot if unwritten is not None else None
        if not isinstance(saved, TensorFile):
            return original(disk.readable(filename), framework, device=device, **kwargs)
        if framework not in _FRAMEWORKS:
            raise disk.refused(path_of(filename) or "")
        return _Opened(disk, saved, f"cuda:{device}" if isinstance(device, int) else device)

    return safe_open


def _serializes(disk: Disk, original: Any) -> Any:
    def serialize_file(tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if disk.in_capture:
            disk.skip("safetensors' serialize_file", filename)
        else:
            original(tensor_dict, filename, *args, **kwargs)

    return serialize_file


@dataclass(frozen=True, eq=False)
class _Opened:
    """What `safe_open` returns for a file that was not written."""

    disk: Disk
    saved: TensorFile
    device: Any

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return sorted(self.saved.tensors)

    def offset_keys(self) -> list[str]:
        return list(self.saved.tensors)

    def metadata(self) -> Mapping[str, str] | None:
        return self.saved.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.disk.restored(self._found(name).snapshot, self.device)
        return tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.saved.tensors}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name, self._found(name))

    def _found(self, name: str) -> TensorOnDisk:
        if name not in self.saved.tensors:
            raise safetensors.SafetensorError(f"File does not contain tensor {name}")
        return self.saved.tensors[name]


@dataclass(frozen=True, eq=False)
class _Slice:
    """What `get_slice` returns: nothing is read until it is indexed."""

    opened: _Opened
    name: str
    saved: TensorOnDisk

    def get_shape(self) -> list[int]:
        return list(self.saved.shape)

    def get_dtype(self) -> str:
        return _NAMES[self.saved.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self.opened.get_tensor(self.name)
        whole = index is Ellipsis or index == slice(None)
        return tensor if whole else tensor[index].clone()
