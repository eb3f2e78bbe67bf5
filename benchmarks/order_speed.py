"""How long does ordering take? Against torch's own functions on the same graphs, in the same run.

    python benchmarks/order_speed.py [--nodes 5000] [--shapes NAME ...] [--rounds 3] [--without-torch]

For each shape: the three heuristics with the peaks of their orders, ours and torch's, and the whole search at
its default effort. Seconds are those of the processor (everything runs in one thread), so that other programs
on the machine do not count; the fastest round of each. Exit code 1 if the default effort takes 2 s or more,
or our heuristics 0.3 s or more, on any graph of 5,000 nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from order_graphs.shapes import SHAPES
from order_graphs.torch_side import torch_graph
from result_files import arguments, write_rows
from trainfit.ordering.best_order import best_order, heuristic_orders
from trainfit.ordering.found_order import Order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.ordering_problem import peak_of, problem_of

MOST_SECONDS = 2.0
MOST_HEURISTIC_SECONDS = 0.3


def fastest(action: Callable[[], Any], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        action()
        taken.append(time.process_time() - begin)
    return min(taken)


def our_heuristics(graph: BufferGraph) -> list[int]:
    problem = problem_of(graph)
    return [peak_of(problem, order) for order in heuristic_orders(graph, problem).values()]


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=int, default=5_000)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-torch", action="store_true", help="torch's lpmf takes n * n steps")
    options = parser.parse_args()
    print("shape  nodes  torch's heuristics (s)  ours (s)  torch / ours  default effort (s)  result")
    rows = []
    for shape in options.shapes:
        graph = SHAPES[shape](0, options.nodes)
        torch_seconds = float("nan") if options.without_torch else fastest(torch_graph(graph).peaks, 1)
        seconds = fastest(lambda graph=graph: our_heuristics(graph), options.rounds)
        orders: list[Order] = []
        solving = fastest(lambda graph=graph, orders=orders: orders.append(best_order(graph)), options.rounds)
        quality = orders[-1].quality
        rows.append({"shape": shape, "nodes": len(graph.nodes), "torch_seconds": torch_seconds})
        rows[-1] |= {"heuristic_seconds": seconds, "solve_seconds": solving, "quality": quality}
        cells = [shape, str(len(graph.nodes)), f"{torch_seconds:.2f}", f"{seconds:.3f}"]
        cells += [f"{torch_seconds / seconds:.0f}", f"{solving:.2f}", quality]
        print("  ".join(cells), flush=True)
    slowest = max(row["solve_seconds"] for row in rows)
    slowest_heuristics = max(row["heuristic_seconds"] for row in rows)
    print(f"slowest: default effort {slowest:.2f} s (bound for 5,000 nodes: {MOST_SECONDS} s), ", end="")
    print(f"heuristics {slowest_heuristics:.3f} s (bound: {MOST_HEURISTIC_SECONDS} s)")
    everything = options.nodes == 5_000 and options.shapes == list(SHAPES) and not options.without_torch
    write_rows("order_speed", rows, options.csv, everything=everything)
    bounded = options.nodes <= 5_000
    return 1 if bounded and (slowest >= MOST_SECONDS or slowest_heuristics >= MOST_HEURISTIC_SECONDS) else 0


if __name__ == "__main__":
    sys.exit(main())
