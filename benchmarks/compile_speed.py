"""How long does planning a compiled step take? Against torch's own partitioner, on the same joint graphs.

    python benchmarks/compile_speed.py [NAME ...] [--rounds 3]

For each model its joint graph for `aot_eager`, as AOTAutograd hands it to a partitioner. Torch's is
`min_cut_rematerialization_partition` with its default options; ours reads the graph, searches, divides it and
counts it (`GraphPlanner` and `fastest`), for a budget in the middle between the smallest peak and that of the
fastest step. Both get fresh copies, which are not timed. Seconds are those of the processor, in one thread;
the median of some rounds, torch and ours in turns. What a process does once is not counted: a round before
the others imports, reads what is known of this machine, and measures operators that were never measured.

`large` is a transformer whose joint graph has some 10,000 nodes.

Compiling calls one partitioner or the other, so that what planning adds is the difference. Exit code 1 if it
adds more than torch's own partitioner takes, or if planning one of these graphs takes more than 10 s.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_files import arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

MOST_RATIO = 2.0
"""Of our seconds to torch's: planning divides the graph as well, in the place of torch's partitioner."""
MOST_SECONDS = 10.0
CASES = (
    "mixer",
    "u-net",
    "recurrent",
    "experts",
    "encoder-decoder",
    "transformer",
    "llama-style",
    "resnet-tiny",
    "gpt2-tiny",
    "llama-tiny",
    "large",
)


def joint_graph(case: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a copy of a model's joint graph as a partitioner gets it, and what else it gets."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from compile_plans import fresh

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def divide(module: Any, *inputs: Any, **options: Any) -> Any:
        found.append((copy.deepcopy(module), inputs, options))
        return min_cut_rematerialization_partition(module, *inputs, **options)

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=divide)
    if case == "large":
        torch._dynamo.reset()
        torch.compile(large_model(), backend=backend)(torch.arange(64).view(2, 32))
    else:
        model = fresh(case)
        model.call(torch.compile(model.module, backend=backend))
    return max(found, key=lambda entry: len(entry[0].graph.nodes))


def large_model() -> Any:
    from compile_models import Language

    return Language(LARGE_BLOCKS, 32, gated=True)


LARGE_BLOCKS = 64


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    begin = time.process_time()
    found = action()
    return time.process_time() - begin, found


def measured(case: str, rounds: int) -> dict[str, Any]:
    """Time both partitioners on one graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from trainfit.compiling.graph_planner import GraphPlanner
    from trainfit.compiling.node_costs import NodeCosts
    from trainfit.compiling.recompute_problem import GraphLimits
    from trainfit.devices.device_table import find_device

    module, inputs, options = joint_graph(case)
    costs = NodeCosts(find_device("cpu"))
    outputs = options["num_fwd_outputs"]
    static = options.get("static_lifetime_input_indices") or ()

    def planner(mine: Any) -> Any:
        return GraphPlanner(
            mine, forward_outputs=outputs, costs=costs, backend="aot_eager", static_inputs=static
        )

    def planned(mine: Any) -> Any:
        return planner(mine).fastest(limits)

    first = planner(copy.deepcopy(module))
    known = first.search.partitions
    limits = GraphLimits.same((known[0].peak_bytes + known[-1].peak_bytes) / 2)
    torch_seconds, our_seconds = [], []
    for number in range(rounds + 1):
        mine, theirs = copy.deepcopy(module), copy.deepcopy(module)
        ours, divided = timed(lambda mine=mine: planned(mine))
        assert divided is not None and divided.excess(limits) <= 0
        taken, _ = timed(
            lambda theirs=theirs: min_cut_rematerialization_partition(theirs, *inputs, **options)
        )
        if number:  # the first is for what a process does once
            torch_seconds.append(taken)
            our_seconds.append(ours)
    return {
        "case": case,
        "nodes": len(first.nodes),
        "torch_seconds": statistics.median(torch_seconds),
        "our_seconds": statistics.median(our_seconds),
    }


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", default=CASES, help="cases to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    # Of copying a graph, torch's own.
    warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
    print("case  nodes  torch's partitioner (s)  planning (s)  planning / torch")
    rows = []
    for case in options.names:
        row = measured(case, options.rounds)
        row["ratio"] = row["our_seconds"] / row["torch_seconds"]
        row["good"] = row["ratio"] <= MOST_RATIO and row["our_seconds"] <= MOST_SECONDS
        rows.append(row)
        line = f"{case}  {row['nodes']:,}  {row['torch_seconds']:.3f}  {row['our_seconds']:.3f}"
        print(f"{line}  {row['ratio']:.2f}  {'' if row['good'] else 'MISSED'}", flush=True)
    print(f"bounds: planning / torch {MOST_RATIO}, that is, planning adds at most what torch's own ", end="")
    print(f"partitioner takes; {MOST_SECONDS} s")
    write_rows("compile_speed", rows, options.csv, everything=tuple(options.names) == CASES)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
