"""torch's `context_parallel`, which replaces attention and what distributed tensors know of it.

It needs no help to run: its rings are operators and collectives like others. What it sets for the whole
process, or a step leaves switched on, is put back when the capture ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional

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
