"""Fused attention: the shape of the work inside, whatever the kernel is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainfit.operators.names import aten_name
from trainfit.operators.recorded_calls import RecordedArguments
from trainfit.traces.trace import Signature

# Where `is_causal` stands, by operator; all of them put query, key and value (after the output's gradient
# in backward) first.
_CAUSAL_POSITION = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}

_BEFORE_CAUSAL = {"_scaled_dot_product_efficient_attention_backward": 2}
"""How far before `is_causal` the probability of dropout stands, where that is not one place."""


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One call of fused attention."""

    kernel: str
    """`flash`, `efficient`, `cudnn` or `overrideable`."""
    batch: int
    heads: int
    queries: int
    keys: int
    head: int
    value_head: int
    causal: bool
    backward: bool
    dropout: bool = False
    """Whether it draws a random number for every score, in backward the same ones again."""

    @property
    def flops(self) -> int:
        """Floating-point operations by the usual count: a causal mask is not deducted.

        Forward has two products. Backward has five: it makes the scores once more.
        """
        if self.backward:
            return 2 * self.scores * (3 * self.head + 2 * self.value_head)
        return 2 * self.scores * (self.head + self.value_head)

    @property
    def scores(self) -> int:
        """Pairs of a query and a key."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def executed_share(self) -> float:
        """The share of the products that a kernel cannot skip: blocks above the causal diagonal are."""
        if not self.causal or not self.keys:
            return 1.0
        seen = min(self.queries, self.keys)
        return 1.0 - (seen - 1) / (2.0 * self.keys)


def attention_of(signature: Signature) -> FusedAttention | None:
    """Return the attention that a call computes, or None."""
    return _found(signature) if aten_name(signature.name) in _CAUSAL_POSITION else None


def draws_random_numbers(signature: Signature) -> bool:
    """Whether a random operator really draws: fused attention does so for dropout only."""
    name = aten_name(signature.name)
    if name not in _CAUSAL_POSITION or name.endswith("_backward"):
        return signature.random
    # Everywhere dropout stands before `is_causal`.
    return bool(RecordedArguments(signature).get(_CAUSAL_POSITION[name] - 1, "dropout_p", 0.0))


@lru_cache(maxsize=4096)
def _found(signature: Signature) -> FusedAttention | None:
    name = aten_name(signature.name)
    position = _CAUSAL_POSITION[name]
    backward = name.endswith("_backward")
    call = RecordedArguments(signature)
    query, key, value = (call.tensor(number + backward) for number in range(3))
    if query is None or key is None or value is None or len(query.shape) != 4:
        return None
    return FusedAttention(
        kernel=next(kind for kind in ("flash", "efficient", "cudnn", "overrideable") if kind in name),
        batch=query.shape[0],
        heads=query.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        head=query.shape[3],
        value_head=value.shape[3],
        causal=bool(call.get(position, "is_causal", False)),
        backward=backward,
        dropout=bool(call.get(position - _BEFORE_CAUSAL.get(name, 1), "dropout_p", 0.0)),
    )
