"""What less memory costs in recomputation: from keeping everything to recomputing every block.

Between the two ends a plan mixes: it recomputes what frees most for its time first. The curve is that of a
shallow model, in shares of what all blocks together free and cost, and holds for a deeper one because its
layers are alike. A plan of the whole model is certified when a mesh is confirmed (`confirming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainfit.basics.doing import unheard
from trainfit.costs.table import CostTable
from trainfit.planning.baselines import blocks_of
from trainfit.planning.effects import effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.planner import Planner
from trainfit.planning.replay import Replay, replayed
from trainfit.traces.trace import Trace

_SHARES = (0.3, 0.6, 0.85)
"""Of what can be freed: where the curve is solved for."""
_SECONDS = 4.0


@dataclass(frozen=True)
class CheckpointCurve:
    """Shares of what full recomputation frees, ascending, and what each costs as a share of its time."""

    freed: tuple[float, ...] = (0.0, 1.0)
    cost: tuple[float, ...] = (0.0, 1.0)

    def cost_of(self, freed: float) -> float:
        """Return the cost of freeing a share, between the points that were solved for."""
        if freed <= 0:
            return 0.0
        for (low, cheap), (high, dear) in pairwise(zip(self.freed, self.cost)):
            if freed <= high:
                return cheap + (dear - cheap) * (freed - low) / max(high - low, 1e-12)
        return self.cost[-1]


def recomputed(trace: Trace, costs: CostTable, marginal: Sequence[float]) -> Replay | None:
    """Return the step with every block under `torch.utils.checkpoint`; None if the model has no blocks."""
    effects = [
        effect_of(trace, block, full_recompute(block), by_torch=True)
        for block in blocks_of(trace, list(marginal))
    ]
    return replayed(trace, costs, effects) if effects else None


def curve_of(trace: Trace, costs: CostTable, full: Replay) -> CheckpointCurve:
    """Solve for some budgets between keeping everything and recomputing every block."""
    planner = Planner(trace, costs, None)
    most, least = planner.step.peak_bytes, full.timeline.peak_bytes
    dearest = full.step_seconds - planner.step.step_seconds
    if most <= least or dearest <= 0:
        return CheckpointCurve()
    freed, cost = [0.0], [0.0]
    for share in _SHARES:
        with unheard():
            found = planner.plan(int(most - share * (most - least)), seconds_limit=_SECONDS)
        if found.fits:
            freed.append(share)
            cost.append(max((found.step_seconds - planner.step.step_seconds) / dearest, cost[-1]))
    # Full recomputation is a plan, too: whatever costs more than it is not chosen.
    return CheckpointCurve((*freed, 1.0), (*(min(one, 1.0) for one in cost), 1.0))
