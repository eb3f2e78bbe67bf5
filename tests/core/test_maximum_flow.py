"""The largest flow against the smallest of all cuts."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from trainfit.basics.maximum_flow import UNLIMITED, FlowNetwork

NODES, SOURCE, SINK = 6, 0, 5
Edges = list[tuple[int, int, float]]


def random_edges(seed: int, size: int) -> Edges:
    numbers = random.Random(seed)
    edges: Edges = []
    for tail, head in product(range(NODES), repeat=2):
        if tail != head and numbers.random() < 0.5:
            unlimited = numbers.random() < 0.15 and (tail, head) != (SOURCE, SINK)
            edges.append((tail, head, UNLIMITED if unlimited else numbers.randrange(size)))
    return edges


def filled(edges: Edges, rounding: float = 0) -> FlowNetwork:
    network = FlowNetwork(NODES, rounding)
    for edge in edges:
        network.connect(*edge)
    network.fill(SOURCE, SINK)
    return network


def smallest_cut(edges: Edges) -> tuple[float, list[bool]]:
    """Return the least that a cut lets through, and of the sides that do, the one with the fewest nodes."""
    sides = []
    for inner in product((False, True), repeat=NODES - 2):
        side = [True, *inner, False]
        sides.append((sum(c for tail, head, c in edges if side[tail] and not side[head]), sum(side), side))
    through, _, side = min(sides)
    return through, side


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("size", [5, 1 << 70])
def test_whole_numbers_are_exact_however_large(seed: int, size: int) -> None:
    edges = random_edges(seed, size)
    network = filled(edges)
    through, side = smallest_cut(edges)
    assert network.sent == through
    if through != UNLIMITED:
        assert network.reached_from(SOURCE) == side


@pytest.mark.parametrize("seed", range(30))
def test_what_is_below_rounding_counts_as_nothing(seed: int) -> None:
    edges = [(tail, head, capacity * 0.1) for tail, head, capacity in random_edges(seed, 5)]
    network = filled(edges, rounding=1e-12)
    through, _ = smallest_cut(edges)
    assert network.sent == pytest.approx(through, abs=1e-10)


def test_a_path_without_a_limit_is_said() -> None:
    network = filled([(SOURCE, 1, UNLIMITED), (1, SINK, UNLIMITED), (SOURCE, 2, 3), (2, SINK, 5)])
    assert math.isinf(network.sent)


def test_a_flow_that_is_cut_off_is_no_larger() -> None:
    edges = [edge for edge in random_edges(7, 1000) if edge[2] != UNLIMITED]
    network = FlowNetwork(NODES)
    for edge in edges:
        network.connect(*edge)
    network.fill(SOURCE, SINK, most_work=1)
    assert 0 <= network.sent < filled(edges).sent
