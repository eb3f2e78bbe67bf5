"""Work: what an operator has to do on any device. FLOPs, bytes moved, and the shapes of its matrix products.

Everything here is read off a signature, without torch. `families.py` says what kind of operator a name is,
`products.py` knows matrix products, convolutions and
recurrent layers, `attention.py` fused attention, `arithmetic.py` what other operators compute per element,
`traffic.py` the bytes that all of them move.
"""

from __future__ import annotations

from dataclasses import replace

from trainfit.trace import Signature
from trainfit.work.arithmetic import arithmetic_flops
from trainfit.work.attention import attention_of
from trainfit.work.products import products_of
from trainfit.work.traffic import moved_bytes


def with_work(signature: Signature, written: tuple[int, ...], overwrites_first: bool = False) -> Signature:
    """Return the signature with its FLOPs and bytes; `written` are the numbers of the inputs it mutates."""
    flops = known_flops(signature)
    return replace(
        signature,
        flops=flops or 0,
        moved_bytes=moved_bytes(signature, written, overwrites_first),
        work_source="traffic" if flops is None else "formula",
    )


def known_flops(signature: Signature) -> int | None:
    """Return the floating-point operations of one call; None where no formula is known."""
    products = products_of(signature)
    if products:
        return sum(product.flops for product in products)
    attention = attention_of(signature)
    if attention is not None:
        return attention.flops
    return arithmetic_flops(signature)
