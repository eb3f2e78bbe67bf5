"""What each module needs, against numbers computed by hand from the text of the trace."""

from __future__ import annotations

from dataclasses import replace

from trace_text import trace

from trainfit.memory.module_stats import ModuleStats, module_stats
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

# Alive throughout: 30 bytes of parameters, 2 of buffers, 100 of input.
STEP = trace("""
    wa             :  10 held parameter @Net.a
    wb             :  20 held parameter @Net.b
    nb             :   2 held buffer    @Net.b
    x              : 100 held
    a = mm(x, wa)  : 100 saved          @Net.a
    b = mm(a, wb)  : 100 saved workspace 110 @Net.b
    t = neg(b)     : 100                @Net.b
    y = sum(t)     :   1 output         @Net
    -- backward
    d = back(y, b) : 100                @Net.b
    gb = back(d, a):  20 gradient output @Net.b
    e = back(d, a) : 100                @Net.a
    ga = back(e, x):  10 gradient output @Net.a
""")
LIVE = (232, 332, 432, 433, 433, 353, 453, 263)


def stats(made: Trace) -> dict[str, ModuleStats]:
    return {module.name: module for module in module_stats(simulate(made))}


def test_the_timeline_that_the_figures_are_read_from() -> None:
    timeline = simulate(STEP)
    assert timeline.live_bytes == LIVE
    assert (timeline.peak_bytes, timeline.peak_op) == (453, 6)


def test_statistics_of_a_module() -> None:
    assert stats(STEP)["Net.b"] == ModuleStats(
        name="Net.b",
        class_name="B",
        depth=1,
        calls=1,
        parameter_bytes=20,
        buffer_bytes=2,
        gradient_bytes=20,
        activation_bytes=100,  # b; t is not saved
        peak_bytes=442,  # while op 1 runs
        at_peak_bytes=120,  # d, gb
        whole_parameter_bytes=20,
    )


def test_a_module_sums_up_what_is_below_it() -> None:
    found = stats(STEP)
    assert found["Net"] == ModuleStats(
        name="Net",
        class_name="Net",
        depth=0,
        calls=1,
        parameter_bytes=30,
        buffer_bytes=2,
        gradient_bytes=30,
        activation_bytes=200,
        peak_bytes=453,
        at_peak_bytes=100 + 1 + 100 + 20 + 100,  # a, y, d, gb, e
        whole_parameter_bytes=30,
    )
    assert found["Net.a"].at_peak_bytes == 200  # a, e
    assert sum(simulate(STEP).peak_by_module.values()) == found["Net"].at_peak_bytes


def test_gradients_that_are_kept_between_steps_belong_to_the_module_that_adds_to_them() -> None:
    """As with `zero_grad(set_to_none=False)`: the gradients are there before the step, and after it."""
    made = trace("""
        wa             :  10 held parameter @Net.a
        wb             :  20 held parameter @Net.b
        ga             :  10 held gradient
        gb             :  20 held gradient
        unused         :  40 held gradient
        a = mm(wa)     : 100 saved          @Net.a
        y = mm(a, wb)  :   1 output         @Net.b
        -- backward
        d = back(y, a) :  20                @Net.b
        gb += add(d)   :                    @Net.b
        e = back(y, a) :  10                @Net.a
        ga += add(e)   :                    @Net.a
        -- optimizer
        ga += zero()
        gb += zero()
        unused += zero()
    """)
    found = stats(made)
    assert {name: module.gradient_bytes for name, module in found.items()} == {
        "Net": 30,
        "Net.a": 10,
        "Net.b": 20,
    }


def test_sums_go_up_through_every_level() -> None:
    made = trace("""
        w          : 10 held parameter @Net.a.b.c
        v          :  5 held parameter @Net.a
        y = mm(w)  :  8 output         @Net.a.b.c
    """)
    found = stats(made)
    assert [module.depth for module in found.values()] == [0, 1, 2, 3]
    assert [module.parameter_bytes for module in found.values()] == [15, 15, 10, 10]
    assert [module.at_peak_bytes for module in found.values()] == [8] * 4
    assert [module.peak_bytes for module in found.values()] == [23] * 4


def test_a_module_that_is_called_twice() -> None:
    made = trace("""
        x              : 10 held
        a = gelu(x)    : 50 saved     @Net.a
        b = gelu(a)    : 70 saved     @Net.a#2
        y = sum(b)     :  1 output    @Net
        -- backward
        d = back(y, b) : 30           @Net.a#2
        e = back(d, a) : 90           @Net.a
    """)
    found = stats(made)["Net.a"]
    assert (found.calls, found.activation_bytes) == (2, 120)


def test_recomputation_adds_neither_calls_nor_activations() -> None:
    made = trace("""
        x              : 10 held
        b = gelu(x)    : 20 output    @Net
        -- recompute
        r = gelu(x)    : 50 saved     @/Net
        -- backward
        d = back(b, r) : 10 output    @Net
    """)
    found = stats(made)["Net"]
    assert (found.calls, found.activation_bytes) == (1, 0)
    assert found.at_peak_bytes == 20 + 50 + 10


def test_a_shared_module_counts_where_it_lives() -> None:
    """`Net.a.core` belongs to a; b uses it, too. Its bytes are a's, and Net has them once."""
    made = trace("""
        w          :  7 held parameter @Net.a.core
        x          : 10 held
        p = mm(x)  : 20 output    @Net.a.core
        q = mm(p)  : 40 output    @Net.b/Net.a.core
        y = sum(q) :  1 output    @Net.b
    """)
    found = stats(made)
    assert (found["Net.a.core"].calls, found["Net.a"].calls, found["Net.b"].calls) == (2, 1, 1)
    assert [found[name].parameter_bytes for name in ("Net", "Net.a", "Net.b")] == [7, 7, 0]
    assert [found[name].at_peak_bytes for name in ("Net", "Net.a", "Net.b")] == [61, 60, 1]


def test_what_runs_outside_of_modules_belongs_to_none() -> None:
    made = trace("""
        w          : 10 held parameter @Net
        a = mm(w)  : 50           @Net
        b = neg(a) : 90 output
        b += neg(a)
    """)
    found = stats(made)["Net"]
    assert found.peak_bytes == 60  # while its own op runs
    assert found.at_peak_bytes == 50


def test_a_module_that_is_never_called() -> None:
    made = trace("""
        w          : 10 held parameter @Net.unused
        x          :  4 held
        y = neg(x) :  4 output         @Net
    """)
    found = stats(made)["Net.unused"]
    assert (found.calls, found.parameter_bytes) == (0, 10)
    assert (found.peak_bytes, found.at_peak_bytes) == (0, 0)


def test_at_the_peak_a_resized_storage_has_its_size_of_then() -> None:
    made = trace("""
        x          : 10 held
        a = neg(x) : 10           @Net
        a -> 300
        y = sum(a) :  1 output    @Net
    """)
    assert stats(made)["Net"].at_peak_bytes == 301
    assert simulate(made).peak_by_module == {"Net": 301}


def test_nothing_made_is_alive_when_the_peak_is_before_the_step() -> None:
    made = trace("""
        x          : 1000
        w          :   10 held parameter @Net
        w += neg(x):                     @Net
        y = neg(w) :    4                @Net
    """)
    assert simulate(made).peak_op == -1
    assert stats(made)["Net"].at_peak_bytes == 0


def test_traces_without_modules_or_ops() -> None:
    assert module_stats(simulate(trace(""))) == ()
    (net,) = module_stats(simulate(trace("w : 10 held parameter @Net")))
    assert (net.parameter_bytes, net.calls, net.peak_bytes) == (10, 0, 0)


def test_what_all_ranks_have_is_summed_up_beside_the_part_of_this_one() -> None:
    """`b` is divided among four ranks, `a` is not."""
    root, a, b = STEP.modules
    found = stats(replace(STEP, modules=(root, a, replace(b, whole_parameter_bytes=80))))
    assert (found["Net.b"].parameter_bytes, found["Net.b"].whole_parameter_bytes) == (20, 80)
    assert (found["Net"].parameter_bytes, found["Net"].whole_parameter_bytes) == (30, 90)
