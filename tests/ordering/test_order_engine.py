"""The parts of the engine against something dumber: all sets, all cuts, all orders."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from order_graphs.brute_force import smallest_peak
from order_graphs.shapes import SHAPES, GraphBuilder
from trainfit.ordering.beam import Beam
from trainfit.ordering.best_order import best_order
from trainfit.ordering.bound import CutBounds
from trainfit.ordering.directions import both_directions
from trainfit.ordering.exact import search
from trainfit.ordering.heuristics import deepest_need_first, least_peak_first, least_peak_last
from trainfit.ordering.least_memory import best_closure, least_memory_before, reachable
from trainfit.ordering.ordering_problem import OrderingProblem, is_possible, peak_of, problem_of, step_bytes
from trainfit.ordering.splitting import Splitter
from trainfit.ordering.tighten import grow_late, release_early, tighten

seeds = st.integers(0, 2**32)
PLENTY = 10**9


def random_problem(seed: int, count: int = 8) -> OrderingProblem:
    return problem_of(SHAPES["anything"](seed, count))


def memory_of(problem: OrderingProblem, done: set[int]) -> int:
    freed = sum(f for members, f in zip(problem.members, problem.freed) if done.issuperset(members))
    return problem.initial_bytes + sum(problem.alloc[node] for node in done) - freed


def possible_sets(problem: OrderingProblem) -> list[set[int]]:
    """Return every set of nodes that has all its predecessors."""
    nodes = range(problem.count)
    subsets = (set(chosen) for size in range(problem.count + 1) for chosen in combinations(nodes, size))
    return [done for done in subsets if all(done.issuperset(problem.predecessors[node]) for node in done)]


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_least_memory_before_a_node_is_the_least_of_all_sets(seed: int) -> None:
    problem = random_problem(seed)
    sets = possible_sets(problem)
    for node in range(problem.count):
        needed, later = set(problem.predecessors[node]), reachable(problem.successors, [node]) | {node}
        least = least_memory_before(problem, node, PLENTY)
        possible = [memory_of(problem, done) for done in sets if done >= needed and not done & later]
        assert least is not None
        assert least.bytes == min(possible)
        unfinished = least_memory_before(problem, node, 0)
        assert unfinished is not None
        assert unfinished.bytes <= least.bytes


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_what_has_run_and_what_has_not_can_be_given(seed: int) -> None:
    problem = random_problem(seed, 7)
    sets = possible_sets(problem)
    for node, other in permutations(range(problem.count), 2):
        for run in (True, False):
            least = least_memory_before(
                problem,
                node,
                PLENTY,
                already_run=[other] if run else [],
                not_yet_run=[] if run else [other],
            )
            possible = [
                memory_of(problem, done)
                for done in sets
                if node not in done and done.issuperset(problem.predecessors[node]) and (other in done) == run
            ]
            assert (least.bytes if least is not None else None) == min(possible, default=None)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_best_closure_is_the_best_and_the_smallest(seed: int) -> None:
    problem = random_problem(seed, 7)
    chosen = best_closure(problem, set(), set(range(problem.count)))
    sets = possible_sets(problem)
    least = min(memory_of(problem, done) for done in sets)
    assert chosen == min((d for d in sets if memory_of(problem, d) == least), key=len)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 10))
def test_searching_finds_the_optimum_or_proves_it(seed: int, count: int) -> None:
    graph = SHAPES["anything"](seed, count)
    problem, best = problem_of(graph), smallest_peak(graph)
    found = search(problem, below=best + 1, at_least=0, moves=PLENTY)
    assert found.order is not None
    assert is_possible(problem, found.order)
    assert peak_of(problem, found.order) == found.bound == best
    assert search(problem, below=best, at_least=0, moves=PLENTY).bound == best
    cut_off = search(problem, below=best + 1, at_least=0, moves=3)
    assert cut_off.bound <= best


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(2, 7), st.integers(1, 12))
def test_the_ends_that_a_search_has_settled_are_those_of_a_best_order(
    seed: int, count: int, moves: int
) -> None:
    graph = SHAPES["anything"](seed, count)
    problem, best = problem_of(graph), smallest_peak(graph)
    found = search(problem, below=best + 1, at_least=best, moves=moves)
    middle = [node for node in range(count) if node not in {*found.first, *found.last}]
    orders = ([*found.first, *inner, *found.last] for inner in permutations(middle))
    assert min(peak_of(problem, order) for order in orders if is_possible(problem, order)) == best


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 60))
def test_tightening_never_raises_memory(seed: int, count: int) -> None:
    problem = random_problem(seed, count)
    for start in (least_peak_first(problem), least_peak_last(problem), deepest_need_first(problem)):
        assert is_possible(problem, start)
        peak = peak_of(problem, start)
        for improved in (release_early(problem, start, peak), grow_late(problem, start, peak)):
            assert is_possible(problem, improved)
            assert peak_of(problem, improved) <= peak
        order, lowered = tighten(problem, start)
        assert is_possible(problem, order)
        assert peak_of(problem, order) == lowered <= peak


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["series-parallel", "training", "anything"]), seeds, st.integers(5, 80))
def test_parts_add_up_to_the_whole(shape: str, seed: int, count: int) -> None:
    graph = SHAPES[shape](seed, count)
    problem = problem_of(graph)
    splitter = Splitter(problem, graph.baseline)
    ranges = splitter.ranges()
    parts = [splitter.part(start, end) for start, end in ranges]
    assert [node for part in parts for node in part.nodes] == list(graph.baseline)
    memory = [m for part in parts for m in step_bytes(part.problem, range(part.problem.count))]
    assert memory == step_bytes(problem, graph.baseline)
    assert parts[-1].problem.final_bytes == problem.final_bytes
    peaks = [splitter.peak(start, end) for start, end in ranges]
    assert peaks == [peak_of(part.problem, range(part.problem.count)) for part in parts]


def test_networks_fall_into_parts() -> None:
    graph = SHAPES["series-parallel"](3, 300)
    assert len(Splitter(problem_of(graph), graph.baseline).ranges()) > 50


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 9))
def test_beams_keep_to_their_limit_and_a_wide_one_misses_nothing(seed: int, count: int) -> None:
    graph = SHAPES["anything"](seed, count)
    problem, best = problem_of(graph), smallest_peak(graph)
    for direction in both_directions(problem):
        order = Beam(direction).search(best, width=PLENTY, most_work=PLENTY)
        assert order is not None
        assert is_possible(problem, order)
        assert peak_of(problem, order) <= best
        assert Beam(direction).search(best - 1, width=PLENTY, most_work=PLENTY) is None


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 9))
def test_bounds_are_below_every_peak(seed: int, count: int) -> None:
    graph = SHAPES["anything"](seed, count)
    for work in (0, 30, PLENTY):
        cuts = CutBounds(problem_of(graph), work)
        before = cuts.bound
        for node in range(count):
            cuts.at(node)
            cuts.at_twins_of(node)
        cuts.at_largest()
        assert before <= cuts.bound <= smallest_peak(graph)


def test_branches_that_are_alike_are_bounded_together() -> None:
    build = GraphBuilder(0)
    narrow = []
    for _ in range(5):
        wide = build.add([], size=100)
        narrow.append((wide, build.add([wide], size=1)))
    joined = build.add([end for _, end in narrow], size=1)
    ends = [build.add([joined, wide], size=10) for wide, _ in narrow]
    problem = problem_of(build.finish(ends))
    cuts = CutBounds(problem, PLENTY)
    for node in range(problem.count):
        cuts.at(node)
    alone = cuts.bound
    for node in range(problem.count):
        cuts.at_twins_of(node)
    assert alone < cuts.bound == best_order(build.finish(ends)).peak_bytes
