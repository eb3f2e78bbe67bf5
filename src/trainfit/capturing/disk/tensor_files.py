"""Files of safetensors, which are written and read without Python: what was "saved" is there to be loaded.

Each tensor has a snapshot of its own, because each is loaded by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.disk.pretended import path_of
from trainfit.capturing.disk.snapshots import TensorFile, TensorOnDisk

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead

try:
    import safetensors
except ImportError:  # an optional dependency
    safetensors = None  # type: ignore[assignment]

_FRAMEWORKS = ("pt", "torch", "pytorch")


def _open(
    disk: Disk, original: Any, filename: Any, framework: str, device: Any = "cpu", **kwargs: Any
) -> Any:
    unwritten = disk.files.get(path_of(filename) or "")
    saved = unwritten.snapshot if unwritten is not None else None
    if not isinstance(saved, TensorFile):
        return original(disk.readable(filename), framework, device=device, **kwargs)
    if framework not in _FRAMEWORKS:
        raise disk.refused(path_of(filename) or "")
    return _Opened(disk, saved, f"cuda:{device}" if isinstance(device, int) else device)


def _serialize(disk: Disk, original: Any, tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
    disk.skip("safetensors' serialize_file", filename)


INSTEAD: Instead = {(safetensors, "safe_open"): _open, (safetensors, "serialize_file"): _serialize}


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
        from safetensors.torch import _TYPES

        return next(name for name, dtype in _TYPES.items() if dtype is self.saved.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self.opened.get_tensor(self.name)
        whole = index is Ellipsis or index == slice(None)
        return tensor if whole else tensor[index].clone()
