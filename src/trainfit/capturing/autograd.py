"""Autograd under capture: what it saves for backward, and which node each backward operator belongs to.

Saved tensors: the pack hook keeps metadata only and lets go of the tensor, the unpack hook makes it again. So
the ledger sees when the program alone would have freed a storage, and until when autograd needs it.
Torch leaves it to hooks to notice that a saved tensor was written to in the meantime; ours refuse it as torch
does without hooks.

Nodes: before each backward the graph is walked once and every node gets a hook before and after it. A node
is attributed to the module in whose forward it was made, by its sequence number: it does not matter what
the module returned, nor how often it was called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from trainfit.capturing.hollow import write_counter
from trainfit.capturing.ledger import OUTSIDE, Ledger, LiveStorage
from trainfit.capturing.recorder import BACKWARD, Recorder
from trainfit.capturing.rows import NO_NODE, BackwardNode
from trainfit.capturing.values import Values, user_line
from trainfit.errors import CaptureError

_ENGINE_FUNCTION = "_engine_run_backward"


def called_by_engine(depth: int) -> bool:
    """Whether the frame `depth` levels up is the one that entered autograd's engine.

    Then no Python function is in between: an operator call comes from the engine itself or a C++ node.
    """
    return sys._getframe(depth).f_code.co_name == _ENGINE_FUNCTION


class SavedTensor:
    """What the pack hook keeps: enough to make the tensor again. Freed when autograd lets go of it."""

    __slots__ = ("_hold", "_layout", "_ledger", "_version", "_writes", "live")

    def __init__(self, ledger: Ledger, live: LiveStorage, tensor: torch.Tensor) -> None:
        """Take the place of `tensor`, whose storage is `live`."""
        self._ledger = ledger
        self.live = live
        self._writes = write_counter(tensor)
        self._version = self._writes._version
        self._layout = (tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        self._hold = ledger.save(live)

    @property
    def overwritten(self) -> bool:
        """Whether the program wrote to the tensor after autograd had saved it."""
        return self._writes._version != self._version

    def describe(self) -> str:
        """Name the tensor as a user knows it."""
        dtype, shape, *_ = self._layout
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    def restore(self) -> torch.Tensor:
        """Make the tensor again, over the same storage."""
        with torch._C._DisableTorchDispatch():
            return self._ledger.tensor(self.live, *self._layout)

    def __del__(self) -> None:
        """Tell the ledger that autograd no longer needs the storage."""
        hold = getattr(self, "_hold", None)
        if hold is not None:  # else it was interrupted while it was made
            self._ledger.release_saved(self.live, hold)


class SavedParts:
    """A distributed tensor that autograd saves: its parts as they are saved, and how to put them together."""

    __slots__ = ("_completed", "_context", "_kind", "_parts", "_size", "_stride")

    def __init__(self, tensor: Any, saved: Callable[[torch.Tensor], Packed]) -> None:
        """Take the place of `tensor`, of whose parts `saved` saves each."""
        names, self._context = tensor.__tensor_flatten__()
        self._kind, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        parts = ((name, getattr(tensor, name)) for name in names)
        # What is no tensor is its mesh.
        self._parts = [(name, saved(part) if torch.is_tensor(part) else part) for name, part in parts]
        self._completed = getattr(tensor, "completed", None)

    def restore(self) -> torch.Tensor:
        """Make the tensor again. Torch does not look whether its parts were written to."""
        parts = {
            name: part.restore() if isinstance(part, SavedTensor | SavedParts) else part
            for name, part in self._parts
        }
        made: Any = self._kind.__tensor_unflatten__(parts, self._context, self._size, self._stride)
        if self._completed is not None:
            made.completed = self._completed  # whether somebody has waited for it
        return cast(torch.Tensor, made)


Packed = SavedTensor | SavedParts | torch.Tensor


class SavedTensorHooks:
    """Installs the metadata-only hooks, and can step aside where torch forbids hooks."""

    def __init__(self, recorder: Recorder, values: Values) -> None:
        """Prepare hooks that report to the ledger of `recorder`."""
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._values = values

    def _pack(self, tensor: torch.Tensor) -> Packed:
        # A function mode changes what user code sees; here the real tensor is needed, and faster.
        with torch._C.DisableTorchFunction():
            return self._saved(tensor)

    def _saved(self, tensor: torch.Tensor) -> Packed:
        distributed = type(tensor).__module__.startswith("torch.distributed.")
        if distributed and hasattr(tensor, "__tensor_flatten__") and not tensor.is_meta:
            return SavedParts(tensor, self._saved)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        if tensor.is_conj() or tensor.is_neg() or tensor.is_meta or not torch._C._has_storage(tensor):
            return tensor
        live = self._ledger.find(tensor)
        if live is None:
            known = self._values.worth_knowing(tensor.dtype, tensor.numel())
            live = self._ledger.register(tensor, OUTSIDE, known=known)
        if live.reference is None or (live.known and live.backing is None):
            return tensor
        return SavedTensor(self._ledger, live, tensor)

    def _unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, SavedParts):
            with torch._C.DisableTorchFunction():
                return packed.restore()
        if not isinstance(packed, SavedTensor):
            return packed
        if packed.overwritten:
            raise CaptureError(self._refusal(packed))
        return packed.restore()

    def _refusal(self, saved: SavedTensor) -> str:
        """Say what was written to, by which operator, and which part of backward needs it."""
        recorder = self._recorder
        text = f"backward at {user_line()} needs a tensor ({saved.describe()}) that was modified in place"
        write = recorder.last_write(saved.live)
        if write is not None:
            text += f" by {write.call.operator.name}{_inside(recorder.module_name(write.module))}"
        node = recorder.node
        if node.name:
            text += f", after {node.name}{_inside(recorder.module_name(node.module))} had saved it"
        return f"{text}; a real run refuses this as well: write to a copy, or use the out-of-place operator."

    def install(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context manager under which tensors are saved as metadata."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Step aside; tensors saved meanwhile are held as the program holds them."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)


class NodeHooks:
    """Watches the engine: wraps each backward run and hooks every node of its graph."""

    def __init__(self, recorder: Recorder) -> None:
        """Report nodes to `recorder`."""
        self._recorder = recorder

    @contextlib.contextmanager
    def backward(self, roots: Any, *, creating_graph: bool) -> Iterator[None]:
        """Watch one run of the engine, which may be nested in another (reentrant checkpointing)."""
        recorder = self._recorder
        self._hook_graph(roots)
        before = (recorder.node, recorder.between_nodes, recorder.creating_graph)
        recorder.enter_context(BACKWARD)
        recorder.node, recorder.between_nodes, recorder.creating_graph = NO_NODE, False, creating_graph
        try:
            yield
        finally:
            recorder.node, recorder.between_nodes, recorder.creating_graph = before
            recorder.leave_context()
            recorder.backward_seen = True

    def _hook_graph(self, roots: Any) -> None:
        recorder = self._recorder
        pending = [node for node in (_gradient_node(root) for root in roots) if node is not None]
        while pending:
            node = pending.pop()
            watch = node.metadata.get(self)  # others may watch the same nodes
            if watch is None:
                watch = node.metadata[self] = _NodeWatch(recorder)
                node.register_prehook(watch.before)
                node.register_hook(watch.after)
            elif watch.recording == recorder.number:
                continue
            watch.recording = recorder.number
            watch.info = recorder.node_info(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)


class _NodeWatch:
    """The two hooks of one node."""

    __slots__ = ("_recorder", "info", "recording")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.info: BackwardNode = NO_NODE
        self.recording = -1

    def before(self, gradients: Any) -> None:
        self._recorder.enter_node(self.info)
        if self.info.parameter is not None and self.info.parameter.grad is None:
            self._recorder.gradient_arrives(gradients)

    def after(self, gradients: Any, outputs: Any) -> None:
        self._recorder.leave_node(self.info)


def _inside(module: str) -> str:
    return f" in {module}" if module else ""


def _gradient_node(root: Any) -> Any:
    if isinstance(root, torch.autograd.graph.GradientEdge):
        return root.node
    if isinstance(root, torch.Tensor) and root.requires_grad:
        return torch.autograd.graph.get_gradient_edge(root).node
    return None
