"""What operators do with memory that torch's schemas do not say.

A schema says which results are views of an argument and which arguments are written to; capture reads that
where torch is. A test holds both against each other.
"""

from __future__ import annotations

from trainfit.operators.names import OperatorSet

ONLY_ALLOCATE = OperatorSet.of("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
"""Make tensors and leave the memory as it was: no kernel runs, the values are whatever was there before."""

UNDECLARED_VIEWS = OperatorSet.of("_unsafe_view unsafe_split unsafe_split_with_sizes lift")
"""Share memory with their input although the schema does not say so."""

INVISIBLE = OperatorSet.of("detach alias _fw_primal _version")
"""Not part of the computation: autograd's own bookkeeping."""
INVISIBLE_NAMESPACES = ("profiler", "prim", "prims")

TOUCH_NO_DATA = OperatorSet.of("_efficientzerotensor set_ is_pinned is_same_size")
"""Give a tensor another storage, or ask for metadata: they run as they are and are not ops of a step."""

OVERWRITE_FIRST = OperatorSet.of(
    """
    fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_
    """
)
"""Replace every element of their first argument, whatever it was before."""

COPIES = OperatorSet.of("_to_copy clone copy_ contiguous cat stack")
"""Write what they read, in another place, order or dtype."""

_MOVE_STATISTICS = OperatorSet.of(
    """
    native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats batch_norm_gather_stats
    batch_norm_gather_stats_with_counts
    """
)
STATISTICS = ("running_mean", "running_var")
"""What running statistics are called among the arguments of a normalisation."""


def moves_statistics(name: str) -> bool:
    """Whether an operator moves running statistics, which its schema does not say.

    Recomputed, it moves a copy of them.
    """
    return name in _MOVE_STATISTICS
