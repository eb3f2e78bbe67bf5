"""A step with some regions checkpointed: its memory and its time.

The executor has an overhead for each op of a region, when it follows the plan in forward and when it
recomputes in backward; where torch alone recomputes a region, the overhead is torch's. Both are Python: on a
GPU they delay the step only where the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.costs.schedule import Schedule, Seconds, schedule
from trainfit.costs.table import CostTable, Host
from trainfit.planning.effects import Effect
from trainfit.planning.host_copies import priced_copies
from trainfit.planning.renumbering import Renumbering
from trainfit.planning.rewrite import copied_sizes, rewritten
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class Replay:
    """The step with its regions."""

    timeline: Timeline
    times: Schedule

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return self.times.step_seconds


def replayed(trace: Trace, costs: CostTable, effects: Sequence[Effect]) -> Replay:
    """Replay regions on a trace."""
    if not effects:
        return Replay(simulate(trace), schedule(trace, costs))
    new = rewritten(trace, effects)
    copies = [effect.host for effect in effects if effect.host is not None]
    costs = priced_copies(costs, copies, copied_sizes(trace, effects))
    besides = _executor_seconds(trace, effects, costs.host)
    return Replay(simulate(new), schedule(new, costs, besides))


def executor_seconds(effect: Effect, host: Host) -> float:
    """Return the host's overhead of running a region under a plan, besides the ops themselves."""
    region = effect.region
    if effect.by_torch:
        return len(region.calls) * host.checkpoint_call + len(region.ops) * host.checkpoint_op
    return len(region.calls) * host.region_call + len(region.ops) * host.region_op


def _executor_seconds(trace: Trace, effects: Sequence[Effect], host: Host) -> Seconds:
    """Return the executor's time for each op of the new trace: half in forward, half before the segment."""
    new = Renumbering(trace, effects)
    found = np.zeros(new.ops)
    for effect in effects:
        half = executor_seconds(effect, host) / 2
        ops = [new.start(op) for op in effect.region.ops]
        found[ops] += half / len(ops)
        found[min(new.segment_start[effect.region.start], len(found) - 1)] += half
    return found
