"""Weights that autocast has cast already: a region that is recomputed casts them again.

Autocast casts a weight where it is first used, and keeps the result while it is on. A module that is called
again finds it there. In backward that cache is empty: what is recomputed casts the weight for itself, and
holds nothing of the first cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainfit.operators.names import CAST
from trainfit.traces.settings import is_cast_to
from trainfit.traces.trace import Trace


def is_kept_by_autocast(trace: Trace, number: int) -> bool:
    """Whether a storage is a weight that autocast has cast."""
    producer = trace.storages[number].producer
    if producer < 0 or trace.op_name(producer) != CAST:
        return False
    op = trace.ops[producer]
    from_weights = all(trace.storages[source].category == "parameter" for source in op.reads)
    return from_weights and is_cast_to(trace.settings.dtype, trace.signatures[op.signature].outputs[0].dtype)


def with_casts(trace: Trace, ops: Iterable[int], repeated: set[int], casts: frozenset[int]) -> Iterator[int]:
    """Yield the ops of a region that run again, and each cast before the first op that needs it.

    Autocast casts before an op is looked at, so also for one that is not recomputed.
    """
    missing = set(casts)
    for number in ops:
        for storage in trace.ops[number].reads:
            if storage in missing:
                missing.discard(storage)
                yield trace.storages[storage].producer
        if number in repeated:
            yield number
