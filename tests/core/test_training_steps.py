"""What an allocator is asked for, from before the first step on: written down by hand."""

from __future__ import annotations

from dataclasses import replace

from trace_text import trace

from trainfit.allocator.training_steps import TrainingSteps
from trainfit.devices.library_handles import LibraryWorkspace
from trainfit.traces.trace import Trace

STEP = trace("""
    w           : 100 held parameter
    s           : 200 held optimizer_state
    g           : 100 gradient
    -- forward
    a = mm(w)   : 300 workspace 50
    -- backward
    h = mm(a)   : 100 output gradient
    -- optimizer
    d = add(h, s, g): 40
    e = neg(d)  : 4 output
""")
W, S, G, A, H, D, E = range(7)


def with_births(step: Trace, **born: int) -> Trace:
    """Let storages be made in the first step."""
    numbers = {"s": S, "g": G}
    storages = list(step.storages)
    for name, op in born.items():
        storages[numbers[name]] = replace(storages[numbers[name]], born=op)
    return replace(step, storages=tuple(storages))


def test_the_first_step_makes_optimizer_state_where_the_optimizer_begins() -> None:
    steps = TrainingSteps(with_births(STEP, s=2))
    # Blocks are numbered as they are made. The old gradient is of the step before: there is none yet.
    assert steps.before() == [(0, 100)]
    assert steps.first() == [
        (1, 300),  # a
        (2, 50),
        (2, 0),  # its workspace
        (3, 100),  # the gradient h
        (1, 0),
        (4, 200),  # optimizer state, after what was freed before the op
        (5, 40),  # d
        (6, 4),  # e
        (5, 0),
        (6, 0),  # what the step returned is gone before the next
    ]
    assert steps.next() == [
        (7, 300),
        (8, 50),
        (8, 0),
        (9, 100),
        (7, 0),
        (10, 40),
        (3, 0),  # the gradient of the step before is freed after its last use
        (11, 4),
        (10, 0),
        (11, 0),
    ]


def test_what_libraries_keep_comes_with_the_first_op_that_needs_it() -> None:
    steps = TrainingSteps(
        with_births(STEP, s=2), [LibraryWorkspace("cuBLAS", 1000, 0), LibraryWorkspace("cuBLAS", 2000, 1)]
    )
    assert steps.before() == [(0, 100)]
    # After the results of the op, which are there when the library is called.
    assert [size for _, size in steps.first()][:3] == [300, 1000, 50]
    assert all(size < 1000 for _, size in steps.next())


def test_a_storage_that_is_resized_moves_to_a_new_block() -> None:
    steps = TrainingSteps(
        trace("""
            p           : 100 held parameter
            x           : 10 held
            p -> 400
            a = mm(p)   : 30
            p -> 100
            y = neg(x)  : 4 output
        """)
    )
    before, first, later = steps.before(), steps.first(), steps.next()
    assert before == [(0, 100), (1, 10)]
    assert first[:2] == [(2, 400), (0, 0)]  # the new block is there before the old one is freed
    assert [size for _, size in later] == [size for _, size in first]


def test_blocks_are_asked_for_on_the_stream_of_their_storage() -> None:
    """`a` was made on a side stream; what is paired from step to step is of one stream."""
    storages = list(STEP.storages)
    storages[A] = replace(storages[A], stream="side", also_used_on=("compute", "third"))
    steps = TrainingSteps(replace(STEP, storages=tuple(storages)))
    steps.before(), steps.first()
    blocks = {"w": 0, "s": 1, "a": 2, "workspace": 3, "h": 4, "d": 5}
    assert [steps.streams[number] for number in blocks.values()] == [0, 0, 1, 0, 0, 0]
    assert steps.also_used_on == {blocks["a"]: (0, 2)}


def test_what_a_step_leaves_is_not_what_another_stream_frees() -> None:
    storages = list(STEP.storages)
    storages[H] = replace(storages[H], stream="side")  # the gradient that stays; g is on the compute queue
    steps = TrainingSteps(replace(STEP, storages=tuple(storages)))
    assert [size for _, size in steps.before()] == [100, 200, 100]  # so g is there from the beginning
