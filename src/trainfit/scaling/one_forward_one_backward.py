"""When stages of a pipeline run, one forward and one backward in turn (1F1B, Narayanan et al. 2019).

Each stage first runs forwards for as many micro-batches as there are stages from it to the last, then one
backward and one forward in turn, then the backwards that are left, as torch's `Schedule1F1B` does. What a
stage needs is there when the stage before (or behind) is done with it and it has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageSeconds:
    """What a stage takes for one micro-batch, and once in a step."""

    forward: float
    backward: float
    before: float = 0.0
    """Before its first forward: what is gathered."""
    after: float = 0.0
    """After its last backward: what is reduced, and the optimizer's step."""
    later_backward: float = 0.0
    """How much longer each backward after the first takes: gradients are added to those that are there."""

    def busy(self, micro_batches: int) -> float:
        """Return how long it runs in a step."""
        own = micro_batches * (self.forward + self.backward) + (micro_batches - 1) * self.later_backward
        return self.before + own + self.after


def order_of(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return what a stage runs: `F` or `B`, and the number of the micro-batch."""
    ahead = min(micro_batches, stages - stage)
    order = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(("B", number))
        if number + ahead < micro_batches:
            order.append(("F", number + ahead))
    return order


def step_seconds(stages: Sequence[StageSeconds], micro_batches: int, hop: float) -> float:
    """Return how long a step takes where one follows the other: a stage may begin before others are done."""
    free, ends = [0.0] * len(stages), []
    for _ in range(2):
        free = _run(stages, micro_batches, hop, free)
        ends.append(max(free))
    return max(ends[1] - ends[0], max(stage.busy(micro_batches) for stage in stages))


def _run(
    stages: Sequence[StageSeconds], micro_batches: int, hop: float, free: Sequence[float]
) -> list[float]:
    """Run a step from when each stage is free; return when each is done."""
    count = len(stages)
    orders = [order_of(number, count, micro_batches) for number in range(count)]
    now = [begin + stage.before for begin, stage in zip(free, stages)]
    done: dict[tuple[str, int, int], float] = {}
    at = [0] * count
    moved = True
    while moved:
        moved = False
        for number, stage in enumerate(stages):
            while at[number] < len(orders[number]):
                what, batch = orders[number][at[number]]
                other = number - 1 if what == "F" else number + 1
                if 0 <= other < count and (what, batch, other) not in done:
                    break
                ready = done[what, batch, other] + hop if 0 <= other < count else 0.0
                takes = stage.forward if what == "F" else stage.backward
                takes += stage.later_backward if what == "B" and batch else 0.0
                now[number] = max(now[number], ready) + takes
                done[what, batch, number] = now[number]
                at[number] += 1
                moved = True
    return [end + stage.after for end, stage in zip(now, stages)]
