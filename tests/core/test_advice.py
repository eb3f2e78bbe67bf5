"""What would lower a peak: every figure against a step small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

from trace_text import trace

from trainfit.memory.advice import Advice, AdvisedSeconds, ChangedStep, advice
from trainfit.traces.settings import Settings
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace


def advised(step: Trace, *, planned: bool = False, **settings: object) -> dict[str, Advice]:
    with_settings = replace(step, settings=Settings(**settings))  # type: ignore[arg-type]
    return {one.kind: one for one in advice(simulate(with_settings), planned=planned)}


ACTIVATIONS = trace("""
    w             : 100 held parameter @Net
    x             :  40 held
    a = one(x, w) : 400 saved @Net
    b = two(a)    : 300 saved @Net
    y = sum(b)    :   4 output
    -- backward
    g = back(b)   : 100 for b @Net
    h = back(a)   : 100 for a @Net
""")


def test_what_backward_keeps_could_be_computed_again() -> None:
    """At the peak a (400) and b (300) are alive, with w, x, y and g: 944."""
    timeline = simulate(ACTIVATIONS)
    assert timeline.peak_bytes == 100 + 40 + 400 + 300 + 4 + 100
    found = advised(ACTIVATIONS)["plan"]
    assert (found.freed_bytes, found.certainty) == (700, "bound")
    # Without what only autograd holds, the most is a beside b, while b is made.
    assert found.peak_bytes == 100 + 40 + 400 + 300
    assert "700 B of it are kept for backward" in found.text
    assert "No plan gets below 840 B." in found.text
    assert "plan" not in advised(ACTIVATIONS, planned=True)


def test_half_a_batch_halves_what_is_made_of_it() -> None:
    """All of the peak but w."""
    found = advised(ACTIVATIONS, batch=8)["batch"]
    assert found.peak_bytes == 100 + 20 + 200 + 150 + 2 + 50
    assert found.freed_bytes == 944 - found.peak_bytes
    assert found.certainty == "about" and "half of it (4 instead of 8) leaves about 522 B;" in found.text
    assert "batch" not in advised(ACTIVATIONS, batch=1)
    # Of three samples the smaller half is one.
    assert advised(ACTIVATIONS, batch=3)["batch"].peak_bytes == 100 + 13 + 133 + 100 + 1 + 33


def test_what_is_added_to_a_gradient_is_not_of_the_batch() -> None:
    """Of two samples: h is added to the gradient g, and keeps its size as g does."""
    step = trace("""
        w                             : 100 held parameter @Net
        x                             :  40 held
        y = one(x, w)                 :   8 saved @Net
        -- backward
        g = back(y)                   : 100 gradient for y @Net
        h = back(y)                   : 100 for y @Net
        g += aten.add_.Tensor(g, h)
    """)
    assert simulate(step).peak_bytes == 100 + 40 + 8 + 100 + 100
    assert advised(step, batch=2)["batch"].peak_bytes == 100 + 20 + 4 + 100 + 100


def test_seconds_are_said_where_they_are_known() -> None:
    seconds = AdvisedSeconds(step=0.4, forward=0.1, half_batch=0.25, sixteen_bits=0.2)
    step = replace(ACTIVATIONS, settings=Settings(batch=8, dtype="fp32"))
    found = {one.kind: one for one in advice(simulate(step), seconds=seconds)}
    assert found["batch"].step_seconds == 0.25 and "and takes about 250 ms;" in found["batch"].text
    assert found["plan"].step_seconds == 0.5 and "nor computes more than 100 ms again." in found["plan"].text
    assert found["dtype"].step_seconds == 0.2 and found["dtype"].certainty == "about"
    assert all(one.step_seconds is None for one in advice(simulate(step)))


def test_a_captured_step_is_taken_as_it_is() -> None:
    step = replace(ACTIVATIONS, settings=Settings(dtype="fp32"))
    found = {one.kind: one for one in advice(simulate(step), sixteen_bits=ChangedStep(700, 0.3))}["dtype"]
    assert (found.peak_bytes, found.step_seconds, found.certainty) == (700, 0.3, "captured")
    assert found.freed_bytes == 244 and "leaves 700 B and takes 300 ms, captured so" in found.text


OPTIMIZER = trace("""
    w              : 100 held parameter @Net
    s              : 200 held optimizer_state
    x              :  10 held
    a = one(x, w)  :   8 saved @Net
    y = sum(a)     :   4 output
    -- backward
    g = back(a)    : 100 gradient for a @Net
    -- optimizer
    t = aten._foreach_sqrt.default(s) : 150
    u = aten._foreach_mul.default(t)  :  50
    w += step(g, t, u)
""")


def test_temporaries_of_foreach_go_with_a_fused_kernel() -> None:
    """Peak: w, s, x, y, g, t, u = 614; without t and u it is in backward: w, s, x, y, a, g."""
    assert simulate(OPTIMIZER).peak_bytes == 614
    found = advised(OPTIMIZER, optimizer_class="AdamW")["optimizer kernels"]
    assert (found.freed_bytes, found.peak_bytes, found.certainty) == (200, 422, "computed")
    assert "200 B of it are temporaries of aten._foreach_sqrt.default" in found.text
    assert "fused=True leaves a peak of 422 B" in found.text


def test_without_temporaries_of_foreach_another_plan_is_possible() -> None:
    """A plan beside them has no reason to compute a (8) again: then the peak in backward is 414."""
    found = advised(OPTIMIZER, planned=True, optimizer_class="AdamW")["optimizer kernels"]
    assert (found.freed_bytes, found.peak_bytes, found.certainty) == (200, 414, "bound")
    assert "fused=True lets a plan get lower, not below 414 B" in found.text


def test_an_optimizer_without_a_fused_kernel_goes_one_by_one() -> None:
    found = advised(OPTIMIZER, optimizer_class="NAdam")["optimizer kernels"]
    assert found.peak_bytes == 422 + 150
    assert "foreach=False" in found.text


def test_state_that_another_optimizer_would_not_have() -> None:
    found = advised(OPTIMIZER)["optimizer state"]
    assert (found.freed_bytes, found.peak_bytes) == (200, 414)
    assert found.changes_results


def test_sixteen_bits_halve_what_is_float32_at_best() -> None:
    """What is there before the step counts as float32: w, s and x. The results of these ops are bytes."""
    assert "dtype" not in advised(OPTIMIZER, dtype="bf16")
    found = advised(OPTIMIZER, dtype="fp32")["dtype"]
    assert (found.peak_bytes, found.certainty) == ((100 + 200 + 10) // 2 + 4 + 100 + 150 + 50, "about")
    assert "leaves about 459 B, more if it casts to float32 itself" in found.text


def test_the_most_comes_first_and_little_is_not_said() -> None:
    found = advised(OPTIMIZER, optimizer_class="AdamW", dtype="fp32", batch=8)
    assert list(found) == sorted(found, key=lambda kind: found[kind].peak_bytes)
    assert "plan" not in found  # nothing is kept for backward at the peak
