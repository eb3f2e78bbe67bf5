"""What is changed in torch while a region runs, and put back after it.

Ordinary paths: some composite operators take another path while a dispatch mode is active (see
`capturing/composites.py`). A region has to compute what the model without a plan computes, and what the
capture recorded, so they get their ordinary path here too.

Reads without an operator: `tolist` and `numpy` read memory directly. What they read in forward must have its
values again when the region is recomputed, so they say what they read.

Units: what FSDP's hooks do to gather the parameters of units inside of a region, and to let go of them, is no
part of it. Units that are whole when it is recomputed do nothing of that.

Propagation: distributed tensors ask fake tensors what an operator returns, once for each kind of call. That
is no part of the region: it would not be there when the region is recomputed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from trainfit.applying.execution import execution
from trainfit.capturing import composites
from trainfit.capturing.dispatch import CaptureMode
from trainfit.capturing.replacing import replaced

_PROPAGATION = "torch.distributed.tensor._sharding_prop"
_UNITS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")


def attention_by_formula(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention in plain operators; the masks it makes belong on the tensor's device."""
    if query.device.type == "cpu":
        return composites.attention_by_formula(query, *args, **kwargs)
    with query.device:
        return composites.attention_by_formula(query, *args, **kwargs)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """Read the lengths as numbers: then backward does not keep the tensors."""
    lengths = [each.to("cpu", torch.int64).contiguous().tolist() for each in (input_lengths, target_lengths)]
    loss: torch.Tensor = torch.ops.aten.ctc_loss.IntList(log_probs, targets, *lengths, *options, **named)
    return loss


_ORDINARY_PATHS: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten.add_.Tensor": ("linear", composites.linear),
    "aten._safe_softmax.default": ("_scaled_dot_product_attention_math", attention_by_formula),
    "aten._ctc_loss.default": ("ctc_loss.Tensor", ctc_loss),
}
"""The composite operators by an op that is in the trace of a region where they took their ordinary path."""


@contextlib.contextmanager
def ordinary_paths(ops: Set[str]) -> Iterator[None]:
    """Give composite operators their ordinary path, if the plan's `ops` say that it matters.

    It takes a while to install and makes the operators slower, so it is done only then.
    """
    if ops.isdisjoint(_ORDINARY_PATHS) or any(
        isinstance(mode, CaptureMode) for mode in _get_current_dispatch_mode_stack()
    ):
        # It does not matter, or a capture has done the same, and more.
        yield
        return
    with _ordinary_paths.used():
        yield


class _SharedChange:
    """A change to torch that regions of all threads share: made by the first, undone by the last."""

    def __init__(self, install: Callable[[contextlib.ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._installed = contextlib.ExitStack()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._install(self._installed)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._installed.close()


def _install_ordinary_paths(installed: contextlib.ExitStack) -> None:
    library = torch.library.Library("aten", "IMPL")
    installed.callback(library._destroy)
    for key in _AUTOGRAD_KEYS:
        for name, kernel in _ORDINARY_PATHS.values():
            library.impl(name, kernel, key)


def _install_noticed_reads(installed: contextlib.ExitStack) -> None:
    for name in ("tolist", "numpy", "__array__"):
        installed.enter_context(replaced(torch.Tensor, name, _saying_what_it_reads))


def _saying_what_it_reads(original: Any) -> Any:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        on_value_read = execution.on_value_read
        if on_value_read is None:
            return original(self, *args, **kwargs)
        on_host = self if self.device.type == "cpu" else self.cpu()
        on_value_read(on_host)
        return original(on_host, *args, **kwargs)

    return read


def _install_quiet_propagation(installed: contextlib.ExitStack) -> None:
    propagator = sys.modules[_PROPAGATION].ShardingPropagator
    installed.enter_context(replaced(propagator, "_propagate_tensor_meta_non_cached", _without_modes))


def _without_modes(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def quiet_propagation() -> Iterator[None]:
    """Let DTensor ask fake tensors what an operator returns, where no region sees that."""
    if _PROPAGATION not in sys.modules:
        yield
        return
    with _quiet_propagation.used():
        yield


def _install_quiet_units(installed: contextlib.ExitStack) -> None:
    group = sys.modules[_UNITS].FSDPParamGroup
    for name in ("pre_forward", "post_forward", "unshard", "wait_for_unshard"):
        installed.enter_context(replaced(group, name, _unwatched))


def _unwatched(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with execution.unwatched():
            return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def quiet_units() -> Iterator[None]:
    """Let units of FSDP gather their parameters where no region sees that."""
    if _UNITS not in sys.modules:
        yield
        return
    with _quiet_units.used():
        yield


@contextlib.contextmanager
def quiet_distribution(*, expected: bool) -> Iterator[None]:
    """Let neither propagation nor units be seen, where tensors are distributed or expected to be."""
    if not expected and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield
        return
    with quiet_propagation(), quiet_units():
        yield


_quiet_units = _SharedChange(_install_quiet_units)
_quiet_propagation = _SharedChange(_install_quiet_propagation)
_ordinary_paths = _SharedChange(_install_ordinary_paths)
noticed_reads = _SharedChange(_install_noticed_reads)
"""While it is used, `execution.on_value_read` hears of reads without an operator."""
