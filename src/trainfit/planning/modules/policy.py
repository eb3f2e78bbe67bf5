"""Which ops of a module to store when only a share of its bytes may be: a knapsack.

Sets        units u of ops that share a fate (`sac_stats.py`)
Data        bytes[u], seconds[u]     what storing it takes, what computing it again takes
            share                    of the module's bytes that may be stored
Variables   stored[u]                whether the unit is stored (binary)
Constraints always                   stored[u] is fixed where there is no choice
            capacity                 the bytes of what is stored are within the share
Objective   maximise the seconds of what is stored: it is not computed again
"""

from __future__ import annotations

from trainfit.planning.highs import Program
from trainfit.planning.modules.sac_stats import SacStats, units_of

_SECONDS_LIMIT = 10.0
_GAP_SHARE = 1e-4
"""Of the module's seconds."""
_ROUNDING = 1e-9


def optimal_policy(stats: SacStats, stored_share: float) -> list[int]:
    """Return 1 (stored) or 0 (computed again) per op: the most seconds saved within a share of the bytes.

    What must always be stored is stored even if it alone exceeds the share.
    """
    if not 0.0 <= stored_share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, got {stored_share}")
    units = units_of(stats)
    policy = [0] * len(stats.ops)
    capacity = stored_share * stats.bytes * (1 + _ROUNDING)
    free: list[int] = []
    for number, unit in enumerate(units):
        if unit.always == "store":
            capacity -= unit.bytes
            _store(policy, unit.ops)
        elif not unit.always:
            free.append(number)
    capacity = max(capacity, 0.0)
    free = [number for number in free if units[number].bytes <= capacity]
    if sum(units[number].bytes for number in free) <= capacity:
        chosen = free
    else:
        program = Program()
        columns = {number: program.binary(cost=-units[number].seconds) for number in free}
        # Bytes relative to the capacity, so that the solver's tolerance is a share of it.
        terms = [(column, units[number].bytes / capacity) for number, column in columns.items()]
        program.at_most("capacity", terms, 1.0)
        answer = program.minimise(seconds_limit=_SECONDS_LIMIT, gap=_GAP_SHARE * stats.seconds)
        assert answer.feasible, "storing nothing is always possible"
        chosen = [number for number, column in columns.items() if answer.values[column] > 0.5]
    for number in chosen:
        _store(policy, units[number].ops)
    return policy


def _store(policy: list[int], ops: tuple[int, ...]) -> None:
    for op in ops:
        policy[op] = 1
