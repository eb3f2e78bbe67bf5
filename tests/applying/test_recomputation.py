"""What runs again, against brute force: every version that is needed is there when it is needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.plans.recomputation import Flow, FlowOp, rerun


@st.composite
def flows(draw: st.DrawFn) -> tuple[Flow, set[int]]:
    """Draw a random region: ops that read, write and make storages, and what is kept of them."""
    flow = Flow()
    outside = [flow.storage(-1) for _ in range(2)]
    flow.permanent.update(outside)
    drawn = False
    for number in range(draw(st.integers(1, 9))):
        existing = range(len(flow.makers))
        versions = [(s, flow.version(s)) for s in existing]
        writes = draw(st.lists(st.sampled_from(existing), max_size=1)) if draw(st.booleans()) else []
        reads = [v for v in draw(st.lists(st.sampled_from(versions), max_size=2)) if v[0] not in writes]
        op = FlowOp(reads=reads)
        for storage in writes:
            flow.makers[storage].append(number)
        op.writes = [(storage, flow.version(storage)) for storage in writes]
        op.creates = [flow.storage(number) for _ in range(draw(st.integers(0 if writes else 1, 2)))]
        if draw(st.integers(0, 3)) == 0:
            op.stream, op.starts_stream = 0, not drawn or draw(st.booleans())
            drawn = True
        flow.ops.append(op)
    everything = [(s, v) for s in range(len(flow.makers)) for v in range(len(flow.makers[s]))]
    flow.needed = draw(st.lists(st.sampled_from(everything), max_size=4))
    kept = draw(st.sets(st.sampled_from(range(len(flow.makers))))) - flow.permanent
    return flow, kept


def replay(flow: Flow, runs: tuple[bool, ...], restored: frozenset[int]) -> list[dict[int, object]]:
    """Run a region as the executor does; returns what each storage holds after each op.

    A value says how it came about; `None` is memory without a value. An op that runs makes of its inputs what
    it made of them in forward, so values of both can be compared.
    """
    content: dict[int, object] = dict.fromkeys(flow.permanent, "outside")
    history: list[dict[int, object]] = []
    for number, op in enumerate(flow.ops):
        if runs[number]:
            inputs = tuple(
                ("outside", version) if storage in flow.permanent else (storage, content[storage])
                for storage, version in op.reads
            )
            for storage, _ in op.writes:
                if storage not in flow.permanent:
                    content[storage] = ("written", number, content[storage], inputs)
            content.update(dict.fromkeys(op.creates, ("made", number, inputs)))
        else:
            content.update({s: ("kept", s) if s in restored else None for s in op.creates})
        history.append(dict(content))
    return history


@settings(max_examples=400, deadline=None)
@given(case=flows())
def test_everything_needed_has_its_value(case: tuple[Flow, set[int]]) -> None:
    flow, kept = case
    answer = rerun(flow, kept)
    assert answer.restored <= kept
    everything = tuple(True for _ in flow.ops)
    forward = replay(flow, everything, frozenset())
    final = forward[-1]

    def true_value(value: object) -> object:
        """Put what forward made in the place of what was kept."""
        if isinstance(value, tuple):
            if value[:1] == ("kept",):
                return final[value[1]]
            return tuple(true_value(item) for item in value)
        return value

    again = replay(flow, answer.runs, answer.restored)
    for storage, version in flow.needed:
        if storage in flow.permanent:
            continue
        made = flow.makers[storage][version]
        # Autograd sees the storage when the version is the present one, and what it has at the end.
        if storage not in answer.restored:
            assert true_value(again[made][storage]) == forward[made][storage]
        else:
            assert version == len(flow.makers[storage]) - 1
            assert true_value(again[-1][storage]) == final[storage]


@settings(max_examples=200, deadline=None)
@given(case=flows())
def test_draws_run_from_a_known_state(case: tuple[Flow, set[int]]) -> None:
    flow, kept = case
    answer = rerun(flow, kept)
    before: int | None = None
    for number, op in enumerate(flow.ops):
        if op.stream >= 0:
            if answer.runs[number] and not op.starts_stream:
                assert before is not None and answer.runs[before]
            before = number


def test_what_nothing_needs_does_not_run() -> None:
    flow = Flow()
    first = flow.storage(0)
    second = flow.storage(1)
    flow.ops = [FlowOp(creates=[first]), FlowOp(reads=[(first, 0)], creates=[second]), FlowOp()]
    flow.needed = [(first, 0)]
    assert rerun(flow, ()).runs == (True, False, False)
    assert rerun(flow, (first, second)).restored == {first}
    flow.needed = [(second, 0)]
    assert rerun(flow, (first,)).runs == (False, True, False)


def test_of_a_storage_that_is_written_to_only_the_last_version_can_be_restored() -> None:
    flow = Flow()
    storage = flow.storage(0)
    other = flow.storage(1)
    flow.makers[storage].append(2)
    flow.ops = [
        FlowOp(creates=[storage]),
        FlowOp(reads=[(storage, 0)], creates=[other]),
        FlowOp(writes=[(storage, 1)]),
    ]
    flow.needed = [(storage, 1)]
    assert rerun(flow, (storage,)).runs == (False, False, False)
    flow.needed = [(storage, 1), (other, 0)]
    assert rerun(flow, (storage,)).runs == (True, True, True)
    assert rerun(flow, (storage, other)).runs == (False, False, False)


def test_nothing_is_left_out_or_restored_where_something_else_than_an_op_wrote() -> None:
    flow = Flow(unseen_writes=True)
    for number in range(2):
        flow.ops.append(FlowOp(creates=[flow.storage(number)]))
    flow.needed = [(0, 0)]
    answer = rerun(flow, {0})
    assert answer.runs == (True, True) and not answer.restored
