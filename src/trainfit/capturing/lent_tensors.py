"""Real tensors of a program, lent to a capture: meanwhile the same objects lie over storages without memory.

The step of a running program refers to its model, optimizer and batch from anywhere: closures, globals,
attributes. So the tensors themselves stay, and only what they lie over is exchanged, one new storage for each
old one, so that tied weights and views stay what they are. Nothing of the real memory is read or written
while the capture runs, whether it is this machine's or a GPU's; afterwards every tensor lies over its own
memory again, with the gradient and the count of writes that it had.

Of a distributed tensor the part that this process has is lent. What FSDP frees between uses (it makes the
storage as small as nothing) is lent as large as it will be, and freed.

Small tensors get a copy of their values, as far as `values.py` wants to know any: a step may ask about the
ids and masks of its batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.capturing.hollow import tensor_over
from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.plain_tensors import is_distributed, is_plain
from trainfit.capturing.python_rollback import PythonRollback
from trainfit.capturing.replacing import while_set
from trainfit.capturing.values import Values
from trainfit.errors import StepError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_PRODUCER = "before"
"""What made such storages: the program, before the capture."""


@dataclass(frozen=True)
class _Lent:
    """A tensor of the program, and what it was."""

    tensor: torch.Tensor
    real: torch.Tensor | None
    """Another tensor over the same memory; None for a distributed tensor, which has none itself."""
    gradient: torch.Tensor | None
    version: int | None
    requires_grad: bool


@dataclass(frozen=True)
class _RealStorage:
    """A storage of the program."""

    storage: torch.UntypedStorage
    on_gpu: bool
    values: torch.Tensor | None
    """A copy of its values, as bytes on the host, where it is small."""
    full_bytes: int
    """How large it is when all of its tensors are in it: one that is freed meanwhile is smaller."""


class LentState:
    """Everything that a step of a running program refers to: its tensors, and all other state."""

    def __init__(self, *roots: tuple[str, object], apart: Iterable[object] = ()) -> None:
        """Note what there is, from objects with names. Reads small tensors, and changes nothing.

        What is set `apart` is left alone: nothing of it is lent.
        """
        self.python = PythonRollback(*roots, apart=apart)
        self._lent: list[_Lent] = []
        self._memory: dict[int, _RealStorage] = {}
        self.on_gpu = False
        with torch.no_grad():
            for tensor in self.python.tensors.values():
                self._add(tensor)

    def bytes_on(self, kind: str) -> int:
        """Return what the tensors take already of this machine's memory (`cpu`), or of its GPU's (`cuda`)."""
        return sum(m.storage.nbytes() for m in self._memory.values() if m.on_gpu == (kind == "cuda"))

    @contextlib.contextmanager
    def lent_to(self, session: Session) -> Iterator[None]:
        """Let a capture have everything; then put all of it back as it was."""
        # The modes of the capture would take this for the step's own doing.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            self._exchange(session)
        if self.on_gpu:
            session.gpu.named = True
        self.python.lock()
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
                self._give_back()
            self.python.restore()

    def _add(self, tensor: torch.Tensor) -> None:
        if is_distributed(type(tensor)):
            self._note(tensor, None)  # the part that is here is another tensor
            return
        if not is_plain(type(tensor)):
            raise StepError(
                f"the step has tensors of the class {type(tensor).__name__}, which cannot be looked at while "
                "they are real. Make the plan beforehand, with trainfit plan, and apply it "
                "(trainfit.apply, or PlanCallback with the plan)."
            )
        if tensor.layout is not torch.strided or tensor.is_meta or not torch._C._has_storage(tensor):
            return
        if tensor.device.type not in ("cpu", "cuda"):
            raise StepError(f"the step has tensors on {tensor.device}: only CPUs and CUDA GPUs are followed.")
        storage = tensor.untyped_storage()
        on_gpu = tensor.device.type == "cuda"
        needed = _extent(tensor)
        if not storage.nbytes() and not needed and not on_gpu:
            return
        self.on_gpu = self.on_gpu or on_gpu
        self._note(tensor, tensor.data)
        known = self._memory.get(storage._cdata)
        if known is None:
            elements = storage.nbytes() // tensor.element_size()
            is_small = needed <= storage.nbytes() and Values(lambda: "").worth_knowing(tensor.dtype, elements)
            values = _bytes_of(storage) if is_small else None
            self._memory[storage._cdata] = _RealStorage(
                storage, on_gpu, values, max(needed, storage.nbytes())
            )
        elif needed > known.full_bytes:
            self._memory[storage._cdata] = replace(known, full_bytes=needed, values=None)

    def _note(self, tensor: torch.Tensor, real: torch.Tensor | None) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        version = None if tensor.is_inference() else tensor._version
        self._lent.append(_Lent(tensor, real, gradient, version, tensor.requires_grad))

    def _exchange(self, session: Session) -> None:
        """Let every tensor lie over memory of the capture."""
        found: dict[int, tuple[LiveStorage, torch.UntypedStorage]] = {}
        for one in self._lent:
            if one.real is None:
                continue
            number = one.real.untyped_storage()._cdata
            if number not in found:
                found[number] = _twin(self._memory[number], session)
            shape = one.real.shape, one.real.stride(), int(one.real.storage_offset())
            one.tensor.data = tensor_over(found[number][1], one.real.dtype, *shape)

    def _give_back(self) -> None:
        """Let every tensor lie over its own memory again."""
        leaves = [one for one in self._lent if one.tensor.is_leaf]
        for one in leaves:
            one.tensor.grad = None  # it may be the capture's, and has to be where the tensor is
        for one in self._lent:
            if one.real is not None:
                one.tensor.data = one.real
        for one in leaves:
            if one.tensor.requires_grad != one.requires_grad:
                one.tensor.requires_grad_(one.requires_grad)
            if one.gradient is not None:
                one.tensor.grad = one.gradient
        _set_versions([one for one in self._lent if one.version is not None])


def _twin(memory: _RealStorage, session: Session) -> tuple[LiveStorage, torch.UntypedStorage]:
    """Make the storage that stands for one of the program, where that one is."""
    ledger, values = session.ledger, memory.values
    if values is None and session.values.know_everything and not memory.on_gpu:
        values = _bytes_of(memory.storage)
    # For a GPU: a step that names none is meant to be there as a whole, as in any capture.
    on_host = None if memory.on_gpu or not ledger.host_by_default else True
    with while_set(ledger, "on_host", on_host):
        if values is not None:
            return ledger.adopt(values.clone(), _PRODUCER, known=True)
        found = ledger.allocate(memory.full_bytes, _PRODUCER, keep_values=False)
    if memory.storage.nbytes() < memory.full_bytes:
        ledger.resize(found[0], memory.storage.nbytes())
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage a tensor reaches over."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Copy a storage to the host, as bytes."""
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return there.cpu() if there.is_cuda else there.clone()


def _set_versions(lent: Iterable[_Lent]) -> None:
    # Autograd compares the counts of what it has saved: a capture has written to nothing.
    for one in lent:
        assert one.version is not None
        if one.tensor._version != one.version:
            torch._C._autograd._unsafe_set_version_counter((one.tensor,), (one.version,))


@contextlib.contextmanager
def lent(state: LentState | None, session: Session) -> Iterator[None]:
    """Lend a program's state to a capture, if the step is of a program."""
    with contextlib.nullcontext() if state is None else state.lent_to(session):
        yield
