"""Of a choice, which kept values to let go of, so that there is less memory where most is needed.

Part of the compiled core.
"""

from __future__ import annotations

from trainfit.compiling.graph_rows import GraphRows
from trainfit.compiling.partition_judge import Judgement
from trainfit.compiling.value_worth import least_worth_keeping


def relieving(rows: GraphRows, judged: Judgement, per_byte: bool) -> list[list[int]]:
    """Return the kept values that would not be there at the peak, fewest seconds (per byte) first.

    Each comes with others that can be let go of for nothing then.

    At a peak in backward those are the values that nothing has read by then: computed again, they come later.
    At one in forward those that forward itself has read for the last time.
    """
    touched = [False] * len(rows.sizes)
    before = rows.count
    if judged.backward_bytes >= judged.forward_bytes:
        nodes = judged.order[: judged.backward_place + 1]
    else:
        nodes = judged.running[judged.forward_place :]
        before = nodes[0]
    for number in nodes:
        for storage in rows.touches[number]:
            touched[storage] = True
    able: list[int] = []
    for number in judged.kept:
        if number >= before or rows.own_bytes[number] <= 0:
            continue
        gone = True
        for storage in rows.storages[number]:
            if touched[storage] or rows.given[storage]:
                gone = False
        if gone:
            able.append(number)
    return least_worth_keeping(rows, able, judged.kept, judged.repeated, per_byte)
