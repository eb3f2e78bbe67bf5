"""What is inside one call as far as its price goes: products, a convolution, attention, access."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainfit.operators.access_patterns import Access, access_of
from trainfit.operators.convolution_calls import Convolution, convolution_of
from trainfit.operators.copied_inputs import copied_inputs
from trainfit.operators.fused_attention import FusedAttention, attention_of
from trainfit.operators.matrix_products import Product, products_of
from trainfit.traces.trace import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class CallContents:
    """What a call computes and how it walks through memory."""

    products: tuple[Product, ...]
    convolution: Convolution | None
    attention: FusedAttention | None
    access: Access
    copied: tuple[TensorSpec, ...] = ()
    """Inputs that the kernel copies first."""


@lru_cache(maxsize=32768)
def contents_of(signature: Signature) -> CallContents:
    """Return the contents of a call. One trace is priced for many devices, and finding them takes longest."""
    products = products_of(signature)
    return CallContents(
        products=products,
        convolution=convolution_of(signature) if products else None,
        attention=None if products else attention_of(signature),
        access=access_of(signature),
        copied=copied_inputs(signature),
    )
