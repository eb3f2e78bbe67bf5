"""Which ops of a module to store when only a share of its bytes may be: a knapsack.

Sets        units u of ops that share a fate (`sac_stats.py`)
Data        bytes[u], seconds[u]     what storing it takes, what recomputing it takes
            share                    of the module's bytes that may be stored
Variables   stored[u]                whether the unit is stored (binary)
Constraints always                   stored[u] is fixed where there is no choice
            capacity                 the bytes of what is stored are within the share
Objective   maximise the seconds of what is stored: it is not recomputed
"""

from __future__ import annotations

from trainfit.planning.highs import Program
from trainfit.planning.modules.sac_stats import SacStats, units_of

_SECONDS_LIMIT = 10.0
_GAP_SHARE = 1e-4
"""Of the module's seconds."""
_ROUNDING = 1e-9


def optimal_policy(stats: SacStats, stored_share: float) -> list[int]:
    """Return 1 (stored) or 0 (recomputed) per op: the most seconds saved within a share of the bytes.

    What must always be stored is stored even if it alone exceeds the share.
    """
    if not 0.0 <= stored_share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, got {stored_share}")
    units = units_of(stats)
    always = [unit for unit in units if unit.always == "store"]
    capacity = stored_share * stats.bytes * (1 + _ROUNDING)
    for unit in always:
        capacity -= unit.bytes
    capacity = max(capacity, 0.0)
    chosen = [unit for unit in units if not unit.always and unit.bytes <= capacity]
    if sum(unit.bytes for unit in chosen) > capacity:
        program = Program()
        columns = [program.binary(cost=-unit.seconds) for unit in chosen]
        # Bytes relative to the capacity, so that the solver's tolerance is a share of it.
        terms = [(column, unit.bytes / capacity) for column, unit in zip(columns, chosen)]
        program.at_most("capacity", terms, 1.0)
        answer = program.minimise(seconds_limit=_SECONDS_LIMIT, gap=_GAP_SHARE * stats.seconds)
        assert answer.feasible, "storing nothing is always possible"
        chosen = [unit for column, unit in zip(columns, chosen) if answer.values[column] > 0.5]
    stored = {op for unit in (*always, *chosen) for op in unit.ops}
    return [int(op in stored) for op in range(len(stats.ops))]
