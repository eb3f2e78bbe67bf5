"""torch's `context_parallel`, which replaces attention and what distributed tensors know of it.

It needs no help to run: its rings are operators and collectives like others. What it sets for the whole
process, or a step leaves switched on, is put back when the capture ends. What it cannot put together on a
real GPU is refused, on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional

from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.attention import EFFICIENT_ROWS
from trainfit.capturing.retarget.gpu import Gpu
from trainfit.capturing.values import user_line
from trainfit.devices.architectures import is_amd
from trainfit.errors import CaptureError

_dispatcher: Any = DTensor._op_dispatcher
_rings: Any = _attention


@contextlib.contextmanager
def rings_left_as_found() -> Iterator[None]:
    """Put back how rings are run, and attention without them."""
    attention, handlers = functional.scaled_dot_product_attention, _dispatcher._custom_op_handlers
    options, mode = asdict(_rings._cp_options), _rings._dispatch_mode
    added, known = dict(_rings.custom_ops), dict(_rings._replaced_functions)
    try:
        yield
    finally:
        if _dispatcher._custom_op_handlers is not handlers:
            _rings._disable_cp_dtensor_dispatcher()  # also forgets how it divides attention
        _dispatcher._custom_op_handlers = handlers
        functional.scaled_dot_product_attention = attention
        vars(_rings._cp_options).update(options)
        _rings._dispatch_mode = mode
        # torch keeps every function that it ever put in the place of attention, with its mesh.
        for kept, before in ((_rings.custom_ops, added), (_rings._replaced_functions, known)):
            kept.clear()
            kept.update(before)


@contextlib.contextmanager
def padded_rows_refused(gpu: Gpu) -> Iterator[None]:
    """Refuse rings of NVIDIA's memory-efficient attention whose parts are no multiple of what it rounds to.

    Each round returns a result per row and the logarithm of the row's sum, with more rows of the latter than
    of the former: torch multiplies the two to put rounds together, and raises.
    """

    def checked(original: Any) -> Any:
        def attention(mesh: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if mesh.size() > 1 and not is_amd(gpu.device.architecture):
                _refuse_padded_rows(query.shape[-2], mesh.size())
            return original(mesh, query, *args, **kwargs)

        return attention

    with replaced(_rings, "_scaled_dot_product_ring_efficient_attention", checked):
        yield


def _refuse_padded_rows(rows: int, ranks: int) -> None:
    # With the halves of a part shared out, most ranks also run the kernel on the second half alone; the last
    # does not, but has nobody to train with.
    pieces = 2 if _rings._cp_options.enable_load_balance else 1
    needed = pieces * EFFICIENT_ROWS
    if rows % needed == 0:
        return
    raise CaptureError(
        f"{user_line()} calls attention on {rows} tokens of each of {ranks} ranks, for which NVIDIA's GPUs "
        "run the memory-efficient kernel, as they do in float32. It makes a multiple of "
        f"{EFFICIENT_ROWS} rows, which torch's context_parallel cannot put together: it raises an error "
        f"about shapes on a real GPU, too. Give each rank a multiple of {needed} tokens, so that sequences "
        f"are a multiple of {needed * ranks}, or use bfloat16 or float16."
    )
