"""Why another mesh loses: what its step has more of than the best one's, or by how much it does not fit."""

from __future__ import annotations

from trainfit.basics.units import format_bytes
from trainfit.scaling.mesh_judge import PARTS, Judged

_WORDS = {
    "compute": "its kernels take longer: smaller products, or more of them",
    "recompute": "it recomputes more",
    "fsdp": "all-gathers and reduce-scatters of fsdp are exposed",
    "replicate": "the all-reduce of replicate is exposed",
    "cp": "the exchange of keys and values along cp is exposed",
    "ep": "tokens on their way to experts and back along ep are exposed",
    "tp": "collectives of tp are exposed",
    "bubble": "stages wait for each other (bubble, uneven stages)",
    "sent": "stages wait for what they send each other",
    "host": "the GPU waits for the host",
    "optimizer": "the optimizer's step is longer: fewer ranks share it",
}
assert set(_WORDS) == set(PARTS)
_ONCE = ("fsdp", "replicate", "host", "optimizer")
"""What there is once for each micro-batch or step, however large it is."""
_WORTH_SAYING = 0.25
"""A second cause is named if it is this share of the first."""


def reason_for(other: Judged, best: Judged | None) -> str:
    """Say why a mesh is not the best one of its size."""
    if not other.fits:
        missing = other.memory_bytes - other.budget_bytes
        how = "even with every block recomputed " if other.recomputed_share else ""
        return f"does not fit: {how}{format_bytes(missing)} too much"
    if best is None:
        return ""
    slower = other.seconds_per_sample / best.seconds_per_sample - 1
    causes = sorted(
        ((_more(other, best, part), part) for part in PARTS), key=lambda cause: cause[0], reverse=True
    )
    largest = causes[0][0]
    if largest <= 0 or slower <= 0:
        return "as fast, within what is predicted"
    said = [
        f"{_WORDS[part]} (+{more:.1%})"
        for more, part in causes[:2]
        if more >= _WORTH_SAYING * largest and more >= 0.0005
    ]
    least = other.least_seconds_per_sample / best.seconds_per_sample - 1
    if least > 0 and causes[0][1] in _ONCE and other.sizes.pp == 1:
        # Larger micro-batches were not looked at, and would have less of this.
        said.append(f"with larger micro-batches at least {least:.1%} slower: its kernels")
    return f"{slower:.1%} slower: " + "; ".join(said or [_WORDS[causes[0][1]]])


def _more(other: Judged, best: Judged, part: str) -> float:
    """Return what a part of the step takes more per sample, as a share of the best one's step."""
    own, its = other.parts[part] / other.samples, best.parts[part] / best.samples
    return (own - its) / best.seconds_per_sample
