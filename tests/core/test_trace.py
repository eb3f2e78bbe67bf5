"""The invariants of a trace, each one broken once, and the questions a trace answers."""

from __future__ import annotations

import ast
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_text import trace

from trainfit.traces import arguments, trace_check
from trainfit.traces.assumptions import Assumption
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.settings import Settings
from trainfit.traces.step_runs import Growth, Steps
from trainfit.traces.trace import Interval, Storage, Trace
from trainfit.traces.trace_check import BrokenTrace

STEP = """
    w                : 100 held parameter @Net.a
    s                :  64 held optimizer_state
    x                : 400
    spare            :   8 held
    a = mm(x, w)     : 400 saved workspace 50 @Net.a
    v = view(a)      :                        @Net.b
    b = gelu(v)      : 400 saved              @Net.b
    y = sum(b)       :   4 output             @Net.b/Net.a
    -- recompute
    r = mm(w)        : 400                    @/Net.a
    -- backward
    d = back(b, r)   : 400 for b              @Net.b
    g = back(d, a)   : 100 for a gradient     @Net.a
    g -> 120
    -- optimizer
    s += update(g)
    w += step(s, g)
"""
GOOD = trace(STEP)
W, S, X, SPARE, A, B, Y, R, D, G = range(10)  # the storages
MM, VIEW, GELU, SUM, AGAIN, BACK_B, BACK_A, UPDATE, STEP_W = range(9)  # the ops
NET, NET_A, NET_B = range(3)  # the modules

EMPTY = Trace("nothing", "cpu", "2.13.0", (), (), (), (), (), (), (), (), 0)


def test_a_good_trace_is_accepted() -> None:
    GOOD.check()


def test_a_trace_without_ops_is_accepted() -> None:
    EMPTY.check()
    trace("w : 100 held parameter").check()


def test_a_trace_without_modules_is_accepted() -> None:
    trace("""
        x           : 4
        y = sum(x)  : 4 output
    """).check()


# One breakage after the other --------------------------------------------------------------------------

Break = Callable[[Trace], Trace]


def change(table: str, number: int, **changes: Any) -> Break:
    """Return a function that changes fields of one entry in one table of a trace."""

    def broken(good: Trace) -> Trace:
        rows = list(getattr(good, table))
        rows[number] = replace(rows[number], **changes)
        return replace(good, **{table: tuple(rows)})

    return broken


def change_trace(**changes: Any) -> Break:
    return lambda good: replace(good, **changes)


def holder(kind: str, start: int, end: int | None) -> tuple[Interval, ...]:
    return (Interval(kind, start, end),)


BREAKAGES: list[tuple[str, Break]] = [
    ("signature 0: every signature has a name", change("signatures", 0, name="")),
    ("signature 1: workspaces are not negative", change("signatures", 1, workspace_bytes=-1)),
    (
        "signature 2: the source of a workspace is none, formula, measured or unknown",
        change("signatures", 2, workspace_source="guess"),
    ),
    ("signature 0: work is not negative", change("signatures", 0, flops=-1)),
    ("signature 0: work is not negative", change("signatures", 0, moved_bytes=-1)),
    (
        "signature 2: work is counted by nobody, the registry, a formula or its traffic",
        change("signatures", 2, work_source="guess"),
    ),
    (
        "signature 0: a collective has a kind, a group of at least one, and bytes from zero on",
        change("signatures", 0, collective=Collective("all_reduce", 0, "0", 8)),
    ),
    (
        "signature 0: a collective's group has as many ranks as are listed",
        change("signatures", 0, collective=Collective("all_reduce", 8, "0", 8, ((0, 12, 4),))),
    ),
    (
        "signature 0: a collective has a kind, a group of at least one, and bytes from zero on",
        change("signatures", 0, collective=Collective("", 8, "0", 8)),
    ),
    ("op 2: its queue has a name", change("ops", GELU, queue="")),
    ("op 2: a number of calls is not negative", change("ops", GELU, converted=-1)),
    ("op 2: a unit gathers, fills, reduces, or has other hooks", change("ops", GELU, exchange="sends")),
    (
        "op 2: what it waits for is on another queue, and was issued before it",
        change("ops", GELU, waits_for=(MM,)),
    ),
    (
        "op 2: what it waits for is on another queue, and was issued before it",
        change("ops", GELU, queue="copies", waits_for=(SUM,)),
    ),
    (
        "op 2: what it waits for is on another queue, and was issued before it",
        change("ops", GELU, queue="copies", waits_for=(-99,)),  # before the step before
    ),
    ("release 1: what is freed is in the table", change_trace(releases=(10,))),
    (
        "assumption 0: it has a text, and is of a kind that is known",
        change_trace(assumptions=(Assumption("rumour", "it fits"),)),
    ),
    ("count 0: samples and tokens are above zero or unknown", lambda trace: replace(trace, samples=0)),
    ("count -3: samples and tokens are above zero or unknown", lambda trace: replace(trace, tokens=-3)),
    (
        "kinds 1: TF32 is allowed for some of matmul, convolution, once each",
        lambda trace: replace(trace, tf32=("softmax",)),
    ),
    (
        "cluster 0: its rank is one of its world, which its mesh divides",
        lambda trace: replace(trace, cluster=Cluster(world_size=2, rank=2)),
    ),
    ("module 2: module names are unique", change("modules", NET_B, name="Net.a")),
    ("module 1: a parent comes before its children", change("modules", NET_A, parent=NET_B)),
    ("module 1: a parent comes before its children", change("modules", NET_A, parent=NET_A)),
    ("module 0: a parent comes before its children", change("modules", NET, parent=-2)),
    ("module 1: what it owns is in the table of storages", change("modules", NET_A, parameters=(10,))),
    ("module 1: what it owns is in the table of storages", change("modules", NET_A, gathered=(10,))),
    ("module 1: what it owns is in the table of storages", change("modules", NET_A, buffers=(-1,))),
    ("call 1: every call is the call of a module", change("calls", 1, module=-1)),
    ("call 1: every call is the call of a module", change("calls", 1, module=3)),
    ("call 1: the calling module's call comes first", change("calls", 1, parent=1)),
    ("call 1: the calling module's call comes first", change("calls", 1, parent=-2)),
    ("call 1: forward begins before it ends, within the step", change("calls", 1, forward_start=2)),
    ("call 1: forward begins before it ends, within the step", change("calls", 1, forward_start=-1)),
    ("call 4: forward begins before it ends, within the step", change("calls", 4, forward_end=10)),
    ("call 1: backward begins before it ends, within the step", change("calls", 1, backward_start=8)),
    ("call 1: backward begins before it ends, within the step", change("calls", 1, backward_start=-2)),
    ("call 1: backward begins before it ends, within the step", change("calls", 1, backward_start=-1)),
    ("call 1: backward begins before it ends, within the step", change("calls", 1, backward_end=10)),
    ("call 1: what a module does itself lies between what its hooks do", change("calls", 1, body_start=0)),
    (
        "call 1: what a module does itself lies between what its hooks do",
        change("calls", 1, body_start=0, body_end=9),
    ),
    ("call 3: a call lies within the call that made it", change("calls", 3, forward_start=0)),
    ("call 3: a call lies within the call that made it", change("calls", 3, forward_end=5)),
    ("op 0: every op has a signature", change("ops", MM, signature=-1)),
    ("op 0: every op has a signature", change("ops", MM, signature=99)),
    ("op 0: the phase is forward, backward or optimizer", change("ops", MM, phase="sideways")),
    ("op 0: its module is in the table", change("ops", MM, module=3)),
    ("op 0: its module is in the table", change("ops", MM, module=-2)),
    ("op 0: its module call is in the table", change("ops", MM, call=5)),
    ("op 0: its module call is in the table", change("ops", MM, call=-2)),
    ("op 5: what it differentiates ran before it", change("ops", BACK_B, forward_op=BACK_B)),
    ("op 5: what it differentiates ran before it", change("ops", BACK_B, forward_op=-2)),
    ("op 0: recomputation happens in backward", change("ops", MM, recompute=True)),
    ("op 0: its storages are in the table", change("ops", MM, reads=(99,))),
    ("op 0: its storages are in the table", change("ops", MM, reads=(-1,))),
    ("op 7: its storages are in the table", change("ops", UPDATE, writes=(10,))),
    ("op 7: its storages are in the table", change("ops", UPDATE, creates=(10,))),
    ("op 0: what it uses is alive while it runs", change("ops", MM, reads=(B,))),
    ("op 7: what it uses is alive while it runs", change("ops", UPDATE, reads=(A,))),
    ("op 7: what it uses is alive while it runs", change("ops", UPDATE, writes=(X,))),
    ("op 7: it is the producer of what it creates", change("ops", UPDATE, creates=(W,))),
    ("op 0: what shows values to Python does nothing else", change("ops", MM, reads_value=True)),
    ("model 3: it is in the table", change_trace(model=3)),
    ("run 1: the recorded run is one of those that count", change_trace(steps=Steps(recorded=1))),
    (
        "run 3: the recorded run is one of those that were looked at",
        change_trace(steps=Steps(recorded=3, peaks=(8, 8))),
    ),
    ("run 2: peaks are not negative", change_trace(steps=Steps(peaks=(8, -8)))),
    ("run 2: runs take at least one course", change_trace(steps=Steps(kinds=0))),
    (
        "run 2: what grows, grows by something",
        change_trace(steps=Steps(grows=(Growth(0, "activation", "aten.mm.default", "", "", "program"),))),
    ),
    ("storage 3: its bytes are not negative", change("storages", SPARE, bytes=-1)),
    ("storage 3: its category is one of the eight", change("storages", SPARE, category="stuff")),
    ("storage 3: what is gathered is a parameter", change("storages", SPARE, gathered=True)),
    ("storage 3: its stream has a name", change("storages", SPARE, stream="")),
    (
        "storage 3: what else uses it are other streams",
        change("storages", SPARE, also_used_on=("compute",)),
    ),
    ("storage 3: it begins within the step or before", change("storages", SPARE, start=-2)),
    ("storage 3: it begins within the step or before", change("storages", SPARE, start=10)),
    ("storage 3: it ends after it begins, within the step", change("storages", SPARE, end=10)),
    ("storage 3: it ends after it begins, within the step", change("storages", SPARE, end=-1)),
    ("storage 3: it ends after it begins, within the step", change("storages", SPARE, start=5, end=4)),
    ("storage 3: it begins when its producer runs", change("storages", SPARE, producer=MM)),
    ("storage 3: it begins when its producer runs", change("storages", SPARE, producer=-2)),
    ("storage 3: it begins when its producer runs", change("storages", SPARE, producer=9, start=9)),
    (
        "storage 9: what the first step makes is there before the others, and made within the step",
        change("storages", G, born=2),
    ),
    (
        "storage 3: what the first step makes is there before the others, and made within the step",
        change("storages", SPARE, born=100),
    ),
    (
        "storage 9: it is resized during the step, while it is alive, in order",
        change("storages", G, resizes=((5, 1),)),
    ),
    (
        "storage 2: it is resized during the step, while it is alive, in order",
        change("storages", X, resizes=((2, 1),)),
    ),
    (
        "storage 3: it is resized during the step, while it is alive, in order",
        change("storages", SPARE, resizes=((10, 8),)),
    ),
    (
        "storage 3: it is resized during the step, while it is alive, in order",
        change("storages", SPARE, resizes=((4, 8), (3, 8))),
    ),
    (
        "storage 3: it is resized during the step, while it is alive, in order",
        change("storages", SPARE, resizes=((-1, 8),)),
    ),
    ("storage 3: its new sizes are not negative", change("storages", SPARE, resizes=((4, -1),))),
    ("storage 3: somebody holds every storage", change("storages", SPARE, holders=())),
    (
        "storage 3: a holder is the program, autograd, a gradient or an optimizer",
        change("storages", SPARE, holders=holder("nobody", -1, None)),
    ),
    (
        "storage 9: a holder begins with the storage or later, and ends after it begins",
        change("storages", G, holders=holder("program", 5, 9)),
    ),
    (
        "storage 9: a holder begins with the storage or later, and ends after it begins",
        change("storages", G, holders=holder("program", 8, 7)),
    ),
    (
        "storage 3: it is free when its last holder lets go",
        change("storages", SPARE, holders=holder("program", -1, 5)),
    ),
    (
        "storage 2: it is free when its last holder lets go",
        change("storages", X, holders=holder("program", -1, None)),
    ),
    ("order 0: every call occurs at most once", change_trace(forward_post_order=(1, 1))),
    ("order 1: every call occurs at most once", change_trace(backward_pre_order=(1, 1))),
    ("order 2: every call occurs at most once", change_trace(backward_post_order=(1, 1))),
    ("order 0: its calls are in the table", change_trace(forward_post_order=(5,))),
    ("order 1: its calls are in the table", change_trace(backward_pre_order=(-1,))),
    ("order 1: a call whose backward begins also ends it", change_trace(backward_post_order=(0,))),
    (
        f"total {2**63 + 2338}: all bytes can be counted in 64 bits",
        change("storages", SPARE, bytes=2**63),
    ),
    (
        f"total {2**63 + 2288}: all bytes can be counted in 64 bits",
        change("signatures", 0, workspace_bytes=2**63 - 8),
    ),
    (
        "settings 0: counts are from zero on, sizes above, and values are JSON text",
        change_trace(settings=Settings(model=(("layers", "four"),))),
    ),
    ("peak 1776: the replay equals what the recorder saw (7)", change_trace(observed_peak_bytes=7)),
    ("peak 1784: the replay equals what the recorder saw (1776)", change("storages", SPARE, bytes=16)),
]


@pytest.mark.parametrize(("sentence", "broken"), BREAKAGES, ids=[sentence for sentence, _ in BREAKAGES])
def test_a_broken_trace_names_the_invariant(sentence: str, broken: Break) -> None:
    with pytest.raises(BrokenTrace) as error:
        broken(GOOD).check()
    assert str(error.value) == sentence


def test_every_invariant_is_broken_by_some_breakage() -> None:
    """Otherwise an invariant that can never fail would look like a check."""
    source = Path(trace_check.__file__).read_text(encoding="utf-8")
    required = {
        (node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_require"
    }
    failed = {failing_line(broken(GOOD)) for _, broken in BREAKAGES}
    never = [start for start, end in required if not any(start <= line <= (end or start) for line in failed)]
    assert len(required) > 25
    assert not never, f"trace_check.py: no breakage reaches the lines {sorted(never)}"


def failing_line(bad: Trace) -> int:
    """Return the line of trace_check.py whose requirement the trace does not meet."""
    try:
        bad.check()
    except BrokenTrace as error:
        frames = traceback.extract_tb(error.__traceback__)
        return next(f.lineno or 0 for f in reversed(frames) if f.name != "_require")
    raise AssertionError("the trace is not broken")


def test_a_broken_trace_is_our_mistake() -> None:
    assert issubclass(BrokenTrace, AssertionError)


# The questions a trace answers --------------------------------------------------------------------------


def test_readers_are_in_order() -> None:
    assert GOOD.readers[W] == (MM, AGAIN, STEP_W)
    assert GOOD.readers[A] == (VIEW, GELU, BACK_A)  # through its view, too
    assert GOOD.readers[SPARE] == ()


def test_an_op_that_reads_a_storage_twice_is_one_reader() -> None:
    squares = trace("""
        x              : 4
        y = mul(x, x)  : 4 output
    """)
    assert squares.readers == ((0,), ())


def test_backward_readers_leave_out_recomputation_and_the_optimizer() -> None:
    assert GOOD.backward_readers(W) == ()  # op 4 reads it in recomputation
    assert GOOD.backward_readers(A) == (BACK_A,)
    assert GOOD.backward_readers(G) == ()  # only the optimizer does


def test_orders_of_calls() -> None:
    """Net calls a, then b, which calls a again; then a is recomputed, and backward visits b, then a."""
    assert GOOD.call_names(tuple(range(5))) == ("Net", "Net.a", "Net.b", "Net.a", "Net.a")
    assert GOOD.forward_pre_order == (0, 1, 2, 3)
    assert GOOD.forward_post_order == (1, 3, 2, 0, 4)
    assert GOOD.call_names(GOOD.backward_pre_order) == ("Net", "Net.b", "Net.a")
    assert GOOD.call_names(GOOD.backward_post_order) == ("Net.b", "Net.a", "Net")


def test_names() -> None:
    assert GOOD.op_name(GELU) == "gelu"
    assert GOOD.module_name(NET_B) == "Net.b"
    assert GOOD.module_name(-1) == "Global"


def test_persistent_bytes_are_those_before_the_step() -> None:
    assert GOOD.persistent_bytes == 100 + 64 + 400 + 8
    assert [storage.persistent for storage in GOOD.storages] == [True] * 4 + [False] * 6


def test_holders_by_kind() -> None:
    a, g, s = (GOOD.storages[number] for number in (A, G, S))
    assert list(a.held_by("program")) == [Interval("program", MM, GELU + 1)]
    assert list(a.held_by("autograd")) == [Interval("autograd", MM, BACK_A + 1)]
    assert list(g.held_by("gradient")) == [Interval("gradient", BACK_A, STEP_W + 1)]
    assert list(s.held_by("optimizer")) == [Interval("optimizer", -1, None)]
    assert list(s.held_by("autograd")) == []


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [1000, 0, 0, 8]), ("cuda", [1024, 0, 0, 512])])
def test_alive_at_and_occupied_at(device: str, sizes: list[int]) -> None:
    """A GPU hands out blocks of 512 bytes; the trace keeps what was asked for."""
    block = Storage(1000, "activation", 2, 2, 6, holder("program", 2, 6), resizes=((3, 0), (5, 7), (5, 8)))
    assert [now for now in range(-1, 9) if block.alive_at(now)] == [2, 3, 4, 5]
    step = replace(EMPTY, device=device, storages=(block,))
    assert [step.occupied_at(0, now) for now in (2, 3, 4, 5)] == sizes
    assert step.occupied_bytes == (sizes[0],)


def test_a_step_that_nobody_recorded_has_no_peak_to_compare_with() -> None:
    replace(GOOD, observed_peak_bytes=None).check()


@pytest.mark.parametrize(
    ("assumption", "sentence"),
    [
        (
            Assumption("data", "a mask was assumed", "in Net (a.py:3)"),
            "memory depends on data: a mask was assumed in Net (a.py:3)",
        ),
        (
            Assumption("skipped", "torch.save", "(a.py:3)"),
            "torch.save was skipped: a capture writes no tensors and changes no files (a.py:3)",
        ),
        (Assumption("runs", "only 3 runs"), "only 3 runs"),
    ],
)
def test_assumptions_read_as_sentences(assumption: Assumption, sentence: str) -> None:
    found = replace(EMPTY, assumptions=(assumption,))
    assert found.warnings == (sentence,)
    assert found.depends_on_data == (assumption.kind == "data")


# A signature's arguments --------------------------------------------------------------------------------


def test_arguments_are_read_back_as_they_were_written() -> None:
    positional = [{"tensor": 0}, None, True, 3, 0.5, "mean", [1, [2]], {"dtype": "float32"}]
    keyword = {"out": {"tensor": 1}}
    assert arguments.decode(arguments.encode(positional, keyword)) == (positional, keyword)


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (7, 7),
        (True, True),
        (0.25, 0.25),
        (math.inf, {"float": "inf"}),
        (-math.inf, {"float": "-inf"}),
        (math.nan, {"float": "nan"}),
        (complex(1, math.inf), {"complex": [1.0, {"float": "inf"}]}),
    ],
)
def test_numbers_that_json_lacks_are_objects(number: complex, encoded: object) -> None:
    assert arguments.encode_number(number) == encoded
    assert arguments.decode(arguments.encode([encoded], {})) == ([encoded], {})


def test_an_infinity_cannot_slip_into_the_text() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        arguments.encode([sys.float_info.max * 2], {})
