"""The step of one of several processes, computed by hand."""

from __future__ import annotations

import pytest
from trace_text import trace

from trainfit.planning.modules.sharding import divided, gathered_by, with_gathered
from trainfit.traces.simulate import simulate

SHARDED = """
    w0 : 10 held parameter @Net
    w1 : 100 held parameter @Net.a
    w2 : 300 held parameter @Net.b
    w3 : 200 held parameter @Net.c
    x  : 40 held input
    -- forward
    p = mm(x, w1) : 40 saved @Net.a
    q = mm(p, w2) : 40 saved @Net.b
    r = mm(q, w3) : 40 saved @Net.c
    y = mul(r, w0) : 40 saved @Net
    -- backward
    g0 = back(r, y) : 10 output gradient @Net
    g3 = back(q, g0) : 200 output gradient @Net.c
    g2 = back(p, g3) : 300 output gradient @Net.b
    g1 = back(x, g2) : 100 output gradient @Net.a
    -- optimizer
    w0 += step(g0)
    w1 += step(g1)
    w2 += step(g2)
    w3 += step(g3)
"""


@pytest.mark.parametrize(
    ("units", "parameters", "gradients"),
    [
        # The root's 10, and of a, b and c the two largest; gradients of the root and the largest.
        (["a", "b", "c"], 10 + 300 + 200, 10 + 300),
        # What is in no unit belongs to the root.
        (["b"], 310 + 300, 310 + 300),
        # Without units the whole model is one.
        ([], 610, 610),
    ],
)
def test_what_is_gathered_is_counted_while_it_is_there(
    units: list[str], parameters: int, gradients: int
) -> None:
    step = trace(SHARDED)
    gathered = gathered_by(step, units)
    assert (gathered.parameter_bytes, gathered.gradient_bytes) == (parameters, gradients)
    before = simulate(divided(step, 2)).live_bytes
    after = simulate(divided(with_gathered(step, gathered), 2)).live_bytes
    more = [late - early for early, late in zip(before, after)]
    assert more == [parameters] * 4 + [parameters + gradients] * 4 + [0] * 4
    # By hand: 305 of parameters, 40 of input, and 120 saved at the first op of backward beside 5 and y's 40.
    assert before[4] == 305 + 40 + 120 + 40 + 5
