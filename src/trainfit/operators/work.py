"""The work of one call on any device: its FLOPs, the bytes it moves, and where the FLOPs are from."""

from __future__ import annotations

from dataclasses import replace

from trainfit.operators.arithmetic import arithmetic_flops
from trainfit.operators.fused_attention import attention_of
from trainfit.operators.matrix_products import products_of
from trainfit.operators.traffic import moved_bytes
from trainfit.traces.trace import Signature


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
