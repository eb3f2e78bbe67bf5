"""Compiled for real with inductor's C++ backend: with and without our order, results and measured peak.

    python benchmarks/order_compiled.py [--models NAME ...]

Each model is compiled twice in a process of its own. Loss and gradients of both have to be equal, bit by bit;
the measured peak (every allocation of torch's CPU allocator) must not be higher with our order, and has to be
lower where the engine says that the peak of the graph that has it is. Exit code 1 if a claim is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from order_graphs.branching_models import BRANCHING
from result_files import arguments, write_rows
from trainfit import Step, StepOptions

BUILT_IN = {
    "gpt2-tiny": StepOptions(batch=4, seq=128, optimizer="none"),
    "llama-tiny": StepOptions(batch=4, seq=128, optimizer="none"),
    "vit-tiny": StepOptions(batch=8, optimizer="none"),
    "bert-tiny": StepOptions(batch=4, seq=128, optimizer="none"),
    "resnet-tiny": StepOptions(batch=8, optimizer="none"),
}
MODELS = (*BRANCHING, *BUILT_IN)


def build_of(name: str) -> Callable[[], Step]:
    if name in BRANCHING:
        return BRANCHING[name]
    from trainfit.targets import load

    return load(name, BUILT_IN[name]).build


def run_compiled(name: str, *, ours: bool) -> dict[str, Any]:
    """Compile a model's step and return loss, gradients, measured peak and what was ordered."""
    import torch
    import torch._dynamo
    from torch._inductor import config

    from trainfit.order_fronts.inductor import CompiledGraph, installed
    from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

    torch._dynamo.reset()
    torch.manual_seed(0)
    step = build_of(name)()
    compiled: list[CompiledGraph] = []
    pass_on = installed(compiled.append) if ours else contextlib.nullcontext()
    # Without the cache of whole graphs, so that every graph passes through the scheduler.
    with pass_on, config.patch(fx_graph_cache=False):
        step.model.compile()
        begin = time.perf_counter()
        step.run()
        seconds = time.perf_counter() - begin
    gradients: dict[str, torch.Tensor] = {}
    for parameter_name, parameter in step.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=parameter_name: gradients.__setitem__(n, p.grad.clone())
        )
    torch.manual_seed(1)
    loss = step.run().detach().clone()
    for parameter in step.model.parameters():
        parameter._post_accumulate_grad_hooks.clear()
    with no_cycle_collection(), profile_allocations() as log, log.range("step"):
        step.run()
    return {
        "loss": loss,
        "gradients": gradients,
        "peak": log.usage("step").peak_bytes,
        "seconds": seconds,
        "graphs": [
            {
                "nodes": len(graph.order.steps),
                "torch": graph.inductor_peak_bytes,
                "peak": graph.peak_bytes,
                "best": graph.order.peak_bytes,
                "bound": graph.order.lower_bound_bytes,
            }
            for graph in compiled
        ],
    }


def one(name: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    theirs, ours = run_compiled(name, ours=False), run_compiled(name, ours=True)
    same = theirs["gradients"].keys() == ours["gradients"].keys() and all(
        torch.equal(gradient, ours["gradients"][key]) for key, gradient in theirs["gradients"].items()
    )
    # The step's peak is in the graph with the largest one; what is saved elsewhere does not show in it.
    largest = max(ours["graphs"], key=lambda graph: graph["torch"])
    return {
        "model": name,
        "graphs": ours["graphs"],
        "loss_equal": bool(torch.equal(theirs["loss"], ours["loss"])),
        "gradients_equal": bool(same),
        "inductor_peak_bytes": theirs["peak"],
        "our_peak_bytes": ours["peak"],
        "predicted_lower": largest["peak"] < largest["torch"],
        "seconds": [theirs["seconds"], ours["seconds"]],
    }


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("\n" + json.dumps(one(options.one)))
        return 0
    rows = []
    for name in options.models:
        child = [sys.executable, __file__, "--one", name]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: failed\n{done.stderr[-3000:]}")
            return 1
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(line_of(rows[-1]), flush=True)
    everything = options.models == list(MODELS)
    write_rows("order_compiled", [row_of(row) for row in rows], options.csv, everything=everything)
    claims = {
        "loss and gradients are equal": all(r["loss_equal"] and r["gradients_equal"] for r in rows),
        "the measured peak is never higher": all(
            r["our_peak_bytes"] <= r["inductor_peak_bytes"] for r in rows
        ),
        "the measured peak is lower where the engine says so": all(
            r["our_peak_bytes"] < r["inductor_peak_bytes"] for r in rows if r["predicted_lower"]
        ),
    }
    for claim, holds in claims.items():
        print(f"{'holds ' if holds else 'MISSED'}  {claim}")
    return 0 if all(claims.values()) else 1


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return one model as a row of the CSV file."""
    largest = max(result["graphs"], key=lambda graph: graph["torch"])
    return {
        "model": result["model"],
        "kernels": "+".join(str(graph["nodes"]) for graph in result["graphs"]),
        "counted_inductor_bytes": largest["torch"],
        "counted_bytes": largest["peak"],
        "bound_bytes": largest["bound"],
        "inductor_peak_bytes": result["inductor_peak_bytes"],
        "our_peak_bytes": result["our_peak_bytes"],
        "equal": result["loss_equal"] and result["gradients_equal"],
    }


def line_of(result: dict[str, Any]) -> str:
    """Return one model as a line: kernels, the largest graph's peak as inductor counts it, measured peaks."""
    row = row_of(result)
    mib = {name: f"{value / 2**20:.2f}" for name, value in row.items() if name.endswith("_bytes")}
    return (
        f"{row['model']:14} kernels {row['kernels']:>8}  "
        f"counted {mib['counted_inductor_bytes']} -> {mib['counted_bytes']} MiB "
        f"(bound {mib['bound_bytes']})  "
        f"measured {mib['inductor_peak_bytes']} -> {mib['our_peak_bytes']} MiB "
        f"({row['our_peak_bytes'] / row['inductor_peak_bytes']:.3f})  "
        f"equal: {'yes' if row['equal'] else 'NO'}"
    )


if __name__ == "__main__":
    sys.exit(main())
