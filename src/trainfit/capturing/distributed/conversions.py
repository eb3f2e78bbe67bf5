"""Where distributed tensors are made of local ones, or taken apart, or divided in another way.

Each takes the host a while in Python, whatever operators come of it: the recorder counts them, and what a
real run takes for one is priced with the op that follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import _api, _dispatch, _redistribute

from trainfit.capturing.recorder import Recorder
from trainfit.capturing.replacing import replaced

_FUNCTIONS: tuple[Any, ...] = (_api._FromTorchTensor, _api._ToTorchTensor, _redistribute.Redistribute)


@contextlib.contextmanager
def conversions_counted(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of every conversion, in forward and in backward."""

    def counted(original: Any) -> Any:
        def convert(*args: Any, **kwargs: Any) -> Any:
            recorder.converted += 1
            return original(*args, **kwargs)

        return convert

    with contextlib.ExitStack() as stack:
        for function in _FUNCTIONS:
            for name in ("forward", "backward"):
                stack.enter_context(replaced(function, name, counted))
        # Operators whose arguments are divided in a way that they cannot use.
        stack.enter_context(replaced(_dispatch, "redistribute_local_tensor", counted))
        yield
