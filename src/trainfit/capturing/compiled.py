"""Notice compiled code: what `torch.compile` has wrapped says so whenever it is called."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trainfit.capturing.replacing import replaced


@contextlib.contextmanager
def noticed(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` whenever something compiled is called, also while torch is told to run eagerly."""

    def noticing(original: Any) -> Any:
        # What is compiled asks here on every call how to run now. What only disables compilation asks
        # too, but has no compiler to offer.
        def callback_from_stance(callback: Any) -> Any:
            if callable(callback) and not _is_torchs_own(sys._getframe(1).f_locals.get("fn")):
                notice()
            return original(callback)

        return callback_from_stance

    from torch._dynamo import eval_frame  # loads the compiler, which takes as long as torch itself

    with replaced(eval_frame, "_callback_from_stance", noticing):
        yield


def _is_torchs_own(function: Any) -> bool:
    """Whether torch compiles without being asked: `flex_attention` does, to run eagerly what it is given."""
    return getattr(function, "__module__", None) == "torch.nn.attention.flex_attention"


def compilations() -> int:
    """Return how many pieces of code torch has tried to compile in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return int(utilities.counters["frames"]["total"]) if utilities else 0


def is_compiler_error(error: BaseException) -> bool:
    """Whether an error comes out of torch's compiler, and not out of the code that it compiles."""
    exceptions = sys.modules.get("torch._dynamo.exc")
    return exceptions is not None and isinstance(error, exceptions.TorchDynamoException)
