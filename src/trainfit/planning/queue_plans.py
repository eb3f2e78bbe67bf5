"""Plans whose time is that of queues: recomputation beside an exchange that the step waits for is free.

The planner adds up what recomputation takes. Where a step waits for communication, another choice may be
faster, which the joint problem finds with the units as they are; the replay says whether it is.
"""

from __future__ import annotations

import time

from trainfit.planning import certify
from trainfit.planning.certify import Certified
from trainfit.planning.kept_problem import JointProblem
from trainfit.planning.planner import Planner

_MOST_ROUNDS = 4
_GAP_SHARE = 1e-3
"""Of the step's time."""


def faster_on_queues(
    planner: Planner, found: Certified, budget_bytes: int, seconds_limit: float
) -> Certified:
    """Return a plan that is faster than one that was found, if there is one within the budget, or that one.

    The solver knows bytes that are asked for: it is asked for as much less as the allocator needs more.
    """
    step = planner.step.replay
    if not step.times.exposed_communication_seconds:
        return found
    problem = JointProblem.of(step, planner.problem.options, planner.problem.exclusive, ())
    deadline = time.monotonic() + seconds_limit
    asked = certify.peak_within(planner.trace, budget_bytes)
    best = found
    for _ in range(_MOST_ROUNDS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        answer = problem.solve(asked, seconds_limit=left, gap_seconds=_GAP_SHARE * planner.step.step_seconds)
        if not answer.feasible or (best.fits and answer.bound >= best.step_seconds):
            break
        bound = max(answer.bound - planner.step.step_seconds, 0.0)
        plan = planner.certified(answer.options, budget_bytes, bound)
        if plan.fits:
            faster = not best.fits or plan.step_seconds < best.step_seconds
            return plan if faster else best
        asked = min(asked, plan.peak_bytes) - max(plan.memory_bytes - budget_bytes, 1)
    return best
