"""What must hold for two results: they are called equal if and only if they are the same, bit by bit."""

from __future__ import annotations

from generated_results import Pair
from results_by_hand import bytes_of

from trainfit.comparing import compare, contents_of


def check_pair(pair: Pair) -> None:
    """The comparison agrees with one that knows nothing of it, in both directions."""
    same = bytes_of(pair.first) == bytes_of(pair.second)
    for one, other in ((pair.first, pair.second), (pair.second, pair.first)):
        match = compare(contents_of(one), contents_of(other))
        assert not match.not_compared
        assert (match.equal is not False) == same, f"the same: {same}, called equal: {match.equal}"
        assert (match.largest_difference > 0) or same or match.differences
        # None says that there was nothing to compare, and that is no proof.
        assert match.equal is not None or same
