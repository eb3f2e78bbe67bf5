"""How good are the orders? Against the exact optimum on small graphs, against torch's own on large ones.

    python benchmarks/order_quality.py [--parts abc] [--small 600] [--large 320] [--models NAME ...]

a  Random graphs of 5 to 14 nodes: every peak has to be the smallest possible one, found by trying all orders,
   and every result has to say `optimal`.
b  Random graphs of 50 to 2,000 nodes of eight shapes: never worse than the best of torch's baseline, lpmf,
   bfs and dfs (torch's code on the same graph), better in most, never below the bound.
c  The joint forward and backward graphs of real models: the same comparison.

Exit code 1 if a claim is missed.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from order_graphs.brute_force import smallest_peak
from order_graphs.shapes import SHAPES
from order_graphs.torch_side import METHODS, torch_graph
from result_files import arguments, write_rows
from trainfit.ordering.best_order import best_order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.order_timeline import order_timeline

SMALLEST, LARGEST = 55, 1_990  # shapes may add or leave out a few nodes


@dataclass(frozen=True)
class Comparison:
    """One graph: what torch's methods reach, what we reach, and the bound."""

    kind: str
    name: str
    nodes: int
    torch_peaks: dict[str, int]
    peak: int
    bound: int
    method: str
    proved: bool
    seconds: float

    @property
    def best_of_torch(self) -> int:
        """The smallest peak of torch's four methods."""
        return min(self.torch_peaks.values())

    @property
    def ratio(self) -> float:
        """Our peak against the best of torch's."""
        return self.peak / self.best_of_torch if self.best_of_torch else 1.0

    @property
    def gap(self) -> float:
        """How much smaller the best possible peak could be."""
        return 1 - self.bound / self.peak if self.peak else 0.0


def compare(kind: str, name: str, graph: BufferGraph) -> Comparison:
    begin = time.perf_counter()
    found = best_order(graph)
    seconds = time.perf_counter() - begin
    peak = order_timeline(graph, found.names).peak_bytes
    assert peak == found.peak_bytes >= found.lower_bound_bytes, name
    theirs = torch_graph(graph)
    order = {node.name: node for node in theirs.nodes}
    assert theirs.peak([order[step] for step in found.names]) == peak, f"torch counts {name} differently"
    return Comparison(
        kind,
        name,
        len(graph.nodes),
        theirs.peaks(),
        peak,
        found.lower_bound_bytes,
        found.method,
        found.optimal,
        seconds,
    )


def row_of(comparison: Comparison) -> dict[str, Any]:
    """Return a graph as a row of the CSV file, with a column for each of torch's methods."""
    row = asdict(comparison)
    return {**row.pop("torch_peaks"), **row}


def small_graphs(count: int) -> Iterator[Comparison]:
    """Yield graphs small enough to try every order; the bound is the smallest peak of all of them."""
    for seed in range(count):
        graph = SHAPES["anything"](seed, 5 + seed % 10)
        yield replace(compare("small", f"small {seed}", graph), bound=smallest_peak(graph))


def large_graphs(count: int) -> Iterator[Comparison]:
    for number in range(count):
        shape = list(SHAPES)[number % len(SHAPES)]
        share = random.Random(number).random()
        nodes = round(math.exp(math.log(SMALLEST) + share * math.log(LARGEST / SMALLEST)))
        yield compare(shape, f"{shape} {number}", SHAPES[shape](number, nodes))


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", default="abc")
    parser.add_argument("--small", type=int, default=600)
    parser.add_argument("--large", type=int, default=320)
    parser.add_argument("--models", nargs="*")
    options = parser.parse_args()
    claims: dict[str, bool] = {}
    rows: list[Comparison] = []
    if "a" in options.parts:
        found = list(small_graphs(options.small))
        rows += found
        exact, proved = sum(r.peak == r.bound for r in found), sum(r.proved for r in found)
        above = [r.best_of_torch / r.bound for r in found if r.best_of_torch > r.bound]
        most = max(above, default=1.0)
        print(f"a  {options.small} graphs of 5 to 14 nodes: {exact} optimal, {proved} proved optimal")
        print(f"   torch's best is above the optimum in {len(above)}, by up to {most:.3f} times")
        claims["a: the optimum in all"] = exact == proved == options.small
    if "b" in options.parts:
        found = list(large_graphs(options.large))
        rows += found
        print(
            f"b  {len(found)} graphs of {min(r.nodes for r in found)} to {max(r.nodes for r in found)} nodes"
        )
        show(summaries(found))
        claims["b: never worse than torch's best"] = all(r.peak <= r.best_of_torch for r in found)
        claims["b: better in most"] = sum(r.peak < r.best_of_torch for r in found) > len(found) / 2
    if "c" in options.parts:
        from order_graphs.models import joint_graphs

        found = [compare("model", name, graph) for name, graph in joint_graphs(options.models)]
        rows += found
        print(f"c  joint graphs of {len(found)} models")
        show(details(found))
        claims["c: never worse than torch's best"] = all(r.peak <= r.best_of_torch for r in found)
    for claim, holds in claims.items():
        print(f"{'holds ' if holds else 'MISSED'}  {claim}")
    everything = options.parts == "abc" and not options.models
    write_rows("order_quality", [row_of(row) for row in rows], options.csv, everything=everything)
    return 0 if all(claims.values()) else 1


def summaries(rows: list[Comparison]) -> list[list[str]]:
    """Return one line per shape and one for all of them."""
    table = [
        ["shape", "graphs", "better", "median ratio", "best ratio", "optimal", "median gap", "worst gap"]
    ]
    kinds = [*dict.fromkeys(row.kind for row in rows), "all"]
    for kind in kinds:
        chosen = [row for row in rows if kind in (row.kind, "all")]
        gaps = [row.gap for row in chosen]
        table.append(
            [
                kind,
                str(len(chosen)),
                str(sum(row.ratio < 1 for row in chosen)),
                f"{statistics.median(row.ratio for row in chosen):.3f}",
                f"{min(row.ratio for row in chosen):.3f}",
                str(sum(row.peak == row.bound for row in chosen)),
                f"{statistics.median(gaps):.2%}",
                f"{max(gaps):.2%}",
            ]
        )
    return table


def details(rows: Iterable[Comparison]) -> list[list[str]]:
    """Return one line per graph."""
    table = [["graph", "nodes", *METHODS, "trainfit", "bound", "ratio", "method", "seconds"]]
    for row in rows:
        figures = [*(row.torch_peaks[method] for method in METHODS), row.peak, row.bound]
        table.append(
            [
                row.name,
                str(row.nodes),
                *(f"{figure / 2**20:.2f}" for figure in figures),
                f"{row.ratio:.3f}",
                row.method + (" (optimal)" if row.peak == row.bound else ""),
                f"{row.seconds:.2f}",
            ]
        )
    return table


def show(table: list[list[str]]) -> None:
    """Print a table, its first line the head; peaks are MiB."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]
        print("   " + "  ".join(cells))


if __name__ == "__main__":
    sys.exit(main())
