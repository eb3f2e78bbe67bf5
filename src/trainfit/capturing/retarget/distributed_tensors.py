"""Distributed tensors on a GPU that is not there.

Their Python code is called back by torch's C++, where function modes are suspended: the one that says that
tensors are on the GPU has to be heard there as well, because meshes are of its kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.tensor import DTensor, _dispatch, _random
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import loss

from trainfit.capturing.replacing import replaced

_CALLED_BACK = ("_dispatch_fast_path_python_tail", "_dispatch_get_local_results_slow_path")
Hear = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def heard_in_distributed_tensors(heard: Hear) -> Iterator[None]:
    """Let a function mode be active in the functions that make and combine local tensors."""
    dispatcher: Any = DTensor._op_dispatcher
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(DTensor, "from_local", heard))
        for name in _CALLED_BACK:
            stack.enter_context(replaced(OpDispatcher, name, heard))
        # A real run keeps the generators of all ranks in step around each draw. That takes no memory of the
        # GPU and no time of it: the state is 16 bytes on the host. (Only the first draw of a process compares
        # it with the other ranks'.) So the draw alone is recorded.
        for module in (_random, _dispatch):
            stack.enter_context(replaced(module, "is_rng_supported_mesh", lambda o: lambda mesh: False))
        stack.enter_context(replaced(_random, "_rng_tracker", lambda o: None))
        for handlers in (
            dispatcher._custom_op_handlers,
            loss.customized_loss_ops,
            _attention.custom_ops,
        ):
            stack.enter_context(_values_heard(handlers, heard))
        yield


@contextlib.contextmanager
def _values_heard(handlers: dict[Any, Any], heard: Hear) -> Iterator[None]:
    before = dict(handlers)
    handlers.update({name: heard(function) for name, function in before.items()})
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)
