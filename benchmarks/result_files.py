"""The rows of a benchmark as a CSV file: `benchmarks/results/NAME.csv`, written whole or not at all.

`TABLES` says what the columns of each file mean. Two more are in all of them: the day of the run, and the
versions of what was measured and of what it was compared with. A run of everything writes to the folder; a
run of some cases only writes where `--csv` says.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "numpy", "scipy", "highspy", "pulp", "pwlf")

TABLES: dict[str, dict[str, str]] = {
    "cluster_published": {
        "id": "the published run",
        "device": "the GPU",
        "ranks": "how many of them",
        "calibrates": "whether the constants were fitted on its seconds",
        "published_seconds": "the published time of a step",
        "predicted_seconds": "the predicted one",
        "exposed_seconds": "by how much communication makes a micro-batch and the optimizer longer",
        "published_bytes": "the published memory, mostly what torch's allocator had reserved",
        "reserved_bytes": "the predicted one",
        "allocated_bytes": "what of it is allocated, predicted",
        "smallest_bytes": "the least memory with which it runs, predicted",
        "ran": "whether the published run did not fail",
    },
    "loopback_steps": {
        "model": "the model",
        "mesh": "how the processes share it",
        "ranks": "how many processes",
        "predicted_seconds": "the predicted time of a step",
        "measured_seconds": "the median over rounds of the processor time of the first process",
        "communication_seconds": "how long its collectives are predicted to take",
        "spread": "between the quartiles of the rounds, relative to the median",
        "wall_seconds": "the median over rounds by the clock on the wall",
    },
    "report_speed": {
        "way": "`trainfit` (the page of `--report`) or `plotly` (the same memory as stacked areas)",
        "round": "which round",
        "ops": "operators in the trace",
        "write_seconds": "wall-clock time of writing the page, beyond the estimate",
        "load": "how many processes of the machine were waiting for a processor, on average over a minute",
        "bytes": "size of the page",
        "first_paint_seconds": "from the navigation to the first paint with content, as chromium says",
        "frames": "frames drawn while the wheel turned",
        "median_frame_seconds": "time between two of them",
        "longest_frame_seconds": "the longest time between two of them",
        "longest_task_seconds": "the longest task of the page's main thread meanwhile",
        "longest_task_processor_seconds": "the same in processor time: without what else the machine did",
    },
    "fit_quality": {
        "model": "the step, with a batch that the script names",
        "device": "the device",
        "share": "the budget as a share of what the step needs as it is",
        "budget_bytes": "the same in bytes",
        "fits_as_it_is": "whether nothing has to be changed",
        "search_seconds": "wall-clock time of `fit`; captures of an earlier device are used again",
        "processor_seconds": "the same in processor time",
        "looked_at": "combinations that it captured",
        "complete": "whether it looked at all that could have been better",
        "ways": "how many it shows",
        "best_seconds": "a step in the fastest",
        "best_way": "what that changes",
        "random": "how many different random combinations could be made",
        "random_slower": "of them: slower than ours even without a plan, whether or not they fit",
        "random_planned": "of the others: how many had to be planned",
        "random_that_fit": "of the others: how many fit, with a plan if need be",
        "random_best_seconds": "a step in the fastest of those; empty if there is none",
        "random_best_way": "what that changes",
        "never_slower": "whether ours is not slower, by more than a thousandth",
    },
    "memory_accuracy": {
        "name": "the case",
        "group": "`builtin`, `huggingface` (architectures of transformers) or `pattern` (ways to train)",
        "kind": "the family of models, or what the pattern is about",
        "convolutions": "whether it has convolutions, whose kernels allocate memory inside themselves",
        "data_dependent": "whether its memory depends on the values of tensors",
        "predicted_bytes": "the predicted peak",
        "measured_bytes": "the peak of the profiler's allocation events",
        "persistent_difference": "bytes alive before the step, predicted minus measured",
        "ops": "operators in the trace",
        "capture_seconds": "wall-clock time of capture and simulation",
        "assumptions": "how many assumptions the capture had to make",
        "failure": "why there is no figure",
    },
    "cold_start": {
        "what": "`import torch`, an estimate for a GPU or for the CPU, or a step captured again",
        "round": "which round; nothing where it is a median of five",
        "processor_seconds": "user and system time",
        "wall_seconds": "wall-clock time",
        "ops": "operators in the trace",
    },
    "capture_speed": {
        "way": "bare fake step, trainfit, or MemTracker",
        "round": "which round",
        "step_seconds": "wall-clock time of one steady step",
        "whole_seconds": "from the model's construction to the checked trace",
        "ops": "operators in the trace",
        "peak_bytes": "the peak that was found",
    },
    "capture_layers": {
        "model": "a built-in Llama, batch 1 x 8192, for an H100",
        "layers": "its blocks",
        "seconds": "wall-clock time of its capture",
        "ops": "operators in the trace",
        "memory_bytes": "largest resident memory of the process",
    },
    "memory_published": {
        "id": "the row of published/memory.json; of a bracket the model, the batch and what became of it",
        "kind": "`allocated`, `reserved`, or `bracket`",
        "device": "the GPU",
        "published_bytes": "as published; for a bracket what the GPU has without the CUDA context",
        "allocated_bytes": "predicted: tensors, workspaces, what libraries keep",
        "library_bytes": "of that, what cuBLAS keeps",
        "workspace_bytes": "of that, the workspace of the kernel that runs at the peak",
        "reserved_bytes": "predicted: what torch's allocator makes of it",
        "smallest_bytes": "predicted: the smallest memory in which that allocator runs the step",
        "published_digit_bytes": "what one more in the last published digit is",
    },
    "time_accuracy_published": {
        "id": "the row of published/step_times.json",
        "family": "model and GPU",
        "third": "which third of the families it belongs to, by a hash",
        "built_in_seconds": "the step, by roofline, with the constants that are built in: fitted on all rows",
        "predicted_seconds": "the same by a fit on the other two thirds",
        "lower_seconds": "where the range that is printed beside that begins",
        "upper_seconds": "where it ends",
        "new_device_seconds": "the same by a fit that has seen no row of the device",
        "new_device_lower_seconds": "where the range that is printed beside that begins",
        "new_device_upper_seconds": "where it ends",
        "peer_seconds": "by the roofline of torch's `RuntimeEstimator`, on the same trace",
        "published_seconds": "as published",
    },
    "time_accuracy_cpu": {
        "name": "the case",
        "kind": "the family of models",
        "predicted_seconds": "the sum of its operators, timed alone, and of the host's time around them",
        "measured_seconds": "median of the real steps, in the time that the thread ran",
        "wall_seconds": "the same steps in wall-clock time",
        "measured_spread": "half the distance between the quartiles, relative to the median",
        "steps": "how many real steps ran",
        "ops": "operators in the trace",
        "host_share": "of the predicted time: what the host takes around the operators",
        "unmeasured_share": "of the predicted time: operators that cannot run alone, priced by the roofline",
        "unmeasured": "those operators",
        "page_faults": "per real step",
        "measuring_seconds": "wall-clock time of timing the operators",
        "failure": "why there is no figure",
    },
    "allocator_truth": {
        "version": "of torch, whose real allocator it is compared with",
        "what": "`random` sequences, or four steps of a built-in `model`",
        "case": "the option of the sequences, or the model and its option",
        "sequences": "how many were replayed by both",
        "events": "in all of them; of a model in one",
        "allocations": "how many addresses were compared",
        "mismatches": "how many sequences differ in any statistic, address, message or status",
        "out_of_memory": "how many run out of memory",
        "with_retries": "in how many the allocator had to release what it keeps, and try again",
        "asked_bytes": "the most bytes that are asked for at once",
        "reserved_bytes": "the most that is reserved with unlimited memory",
        "smallest_bytes": "the smallest capacity that runs",
        "our_rate": "events per second of ours, in the time that the process ran",
        "oracle_rate": "events per second of the oracle, in wall-clock time, the best of five",
    },
    "pricing_speed": {
        "device": "a GPU of the device table",
        "round": "which round",
        "seconds": "wall-clock time of pricing, scheduling and summing up one captured step",
        "step_seconds": "the predicted step",
        "capture_seconds": "wall-clock time of the capture",
    },
    "order_quality": {
        "kind": "`small`: every order was tried; the shape of a random graph; or `model`",
        "name": "the graph",
        "nodes": "how many nodes it has",
        "baseline": "peak bytes of the given order",
        "lpmf": "peak bytes of torch's least peak first",
        "bfs": "peak bytes of torch's breadth first",
        "dfs": "peak bytes of torch's depth first",
        "peak": "peak bytes of our order",
        "bound": "bytes that no order is below; for `small` graphs the smallest peak of all orders",
        "method": "which of our methods found the order",
        "proved": "whether the result says that it is optimal",
        "seconds": "wall-clock time of our search",
    },
    "compile_plans": {
        "case": "the model",
        "backend": "`aot_eager` (node by node) or `inductor`",
        "part": "`budgets`, `sweep` (torch's choices, predicted) or `against` (some of them, measured)",
        "way": "without a plan, a share of the way to that, one of torch's fractions, or ours at its peak",
        "budget_bytes": "what the plan may use",
        "promised_bytes": "what it promises; of torch's choices the predicted peak above what stays",
        "measured_bytes": "the peak of the profiler's allocation events in forward and backward",
        "added_seconds": "what computing again adds, predicted",
        "ours_bytes": "the predicted peak of a plan of ours that is no higher than torch's choice",
        "ours_seconds": "what that one adds, predicted",
        "step_seconds": "processor time of the fastest of five steps",
        "compile_seconds": "processor time of the first step",
        "largest_difference": "of loss and gradients to float64, relative to the largest value",
        "good": "whether the row holds",
        "failure": "why there is no figure",
    },
    "compile_memory": {
        "case": "the compiled step",
        "predicted_bytes": "its peak as `estimate --compile` predicts it",
        "measured_bytes": "the peak of a steady step, by the profiler's allocation events",
        "predicted_seconds": "of the whole step",
        "measured_seconds": "the median of five steps",
        "failure": "why there is no figure",
    },
    "order_compiled": {
        "model": "the compiled model",
        "kernels": "in each of its graphs",
        "counted_inductor_bytes": "peak of its largest graph in inductor's order, as the pass counts it",
        "counted_bytes": "the same in our order",
        "bound_bytes": "what no order of that graph is below",
        "inductor_peak_bytes": "measured peak of the step in inductor's order",
        "our_peak_bytes": "measured peak of the step in our order",
        "equal": "whether loss and gradients are equal, bit by bit",
    },
    "compile_speed": {
        "case": "the compiled model",
        "nodes": "of its joint graph",
        "torch_seconds": "processor time of torch's own partitioner, default options",
        "our_seconds": "processor time of planning, dividing and counting, for a middle budget",
        "ratio": "ours to torch's",
        "good": "whether both bounds hold",
    },
    "order_speed": {
        "shape": "the shape of the random graph",
        "nodes": "how many nodes it has",
        "torch_seconds": "processor time of torch's three heuristics",
        "heuristic_seconds": "processor time of ours",
        "solve_seconds": "processor time of the whole search at its default effort",
        "quality": "what the result says about itself",
    },
    "plan_quality": {
        "case": "the step",
        "against": "the other way whose peak is our budget, or how far the budget is on the way to no plan",
        "budget_bytes": "what the plans may use",
        "peak_share": "the budget as a share of the peak without a plan",
        "other": "time that the other way adds, as a share of the step without a plan",
        "regions": "time that `regions` adds",
        "modules": "time that `modules` adds",
        "gap": "how much of the step the best possible plan could save at most",
        "good": "whether the claims hold",
        "note": "why there is no figure",
    },
    "compat_speed": {
        "layers": "of the Llama",
        "way": "PyTorch's tools, `trainfit.compat` for an A100, or `same`: compat on the tensors as they are",
        "figure": "a duration in seconds, bytes, or milliseconds of recomputation",
        "value": "its value",
    },
    "plan_speed": {
        "way": "what ran",
        "round": "which round",
        "figure": "a duration in seconds, or what the plan is like",
        "value": "its value",
    },
    "plan_truth": {
        "name": "the case",
        "share": "how far the budget is on the way from the smallest reachable peak to that without a plan",
        "reserve_bytes": "what the promise sets aside, because memory depends on data",
        "budget_bytes": "what the plan may use",
        "promised_bytes": "what it promises",
        "measured_bytes": "the peak of the profiler's allocation events, with the plan",
        "unplanned_bytes": "the same without a plan",
        "regions": "how many regions the plan has",
        "added_share": "predicted added time, as a share of the step without a plan",
        "host_bytes": "what is in a second memory between forward and backward",
        "equal": "whether loss, gradients and parameters are equal, bit by bit",
        "error": "of the promise without its reserve, relative to the measured peak",
        "failure": "why there is no figure",
    },
    "plan_time": {
        "name": "the built-in model",
        "batch": "samples per step",
        "step_seconds": "median of the step without a plan",
        "full": "measured overhead of full checkpointing, as a share of the step",
        "plan": "measured overhead of our plan",
        "standard_error": "of the plan's overhead",
        "predicted": "predicted overhead of our plan",
        "budget_bytes": "what the plan may use",
        "unplanned_peak_bytes": "measured peak without a plan",
        "full_peak_bytes": "measured peak with full checkpointing",
        "plan_peak_bytes": "measured peak with our plan",
        "rounds": "how often each kind of step ran",
        "failure": "why there is no figure",
    },
    "cluster_truth": {
        "name": "the case",
        "ranks": "how many processes it ran in",
        "rank": "which of them",
        "share": "of a plan: how far its budget is on the way from the smallest reachable peak to no plan",
        "budget_bytes": "what the plan may use",
        "predicted_bytes": "the peak as captured in one process, or as the plan promises it",
        "measured_bytes": "the peak of the profiler's allocation events",
        "persistent_predicted_bytes": "before the step, predicted",
        "persistent_measured_bytes": "before the step, measured",
        "forward_predicted_bytes": "the most in forward, predicted; not for plans",
        "forward_measured_bytes": "the same, measured",
        "backward_predicted_bytes": "the most while autograd's engine runs, predicted; not for plans",
        "backward_measured_bytes": "the same, measured",
        "optimizer_predicted_bytes": "the most after the last backward, predicted; not for plans",
        "optimizer_measured_bytes": "the same, measured",
        "unplanned_bytes": "the measured peak without a plan",
        "regions": "how many regions the plan has",
        "equal": "whether loss and gradients of the planned run are equal to the unplanned one, bit by bit",
        "failure": "why there is no figure",
    },
    "executor_time": {
        "name": "the model, every block a region",
        "regions": "how many regions",
        "ops": "operators in them",
        "step_ms": "the step as it is",
        "checkpoint_ms": "what torch's checkpointing adds",
        "whole_ms": "what a plan that keeps nothing adds",
        "selective_ms": "what torch's selective checkpointing adds",
        "plan_ms": "what a plan with the same decisions adds",
        "region_call_ms": "what trainfit counts on this machine per region that is followed",
        "region_op_us": "and per op in it",
        "checkpoint_call_ms": "what it counts per region that keeps nothing",
        "checkpoint_op_us": "and per op in it",
    },
}
TABLES["offload_truth"] = {
    **TABLES["plan_truth"],
    "host_inputs": "how many inputs of regions are in the second memory",
}
"""The same for plans that copy results to a second memory."""
TABLES["max_batch_truth"] = {
    "name": "the step, its device, what is looked for, and the budget",
    "plan": "whether a plan may make it fit",
    "size": "the largest that `max-batch` or `max-seq` found",
    "bisected": "the largest that bisection found, with a capture for every question",
    "captures": "how many sizes `max-batch` captured",
    "bisected_captures": "how many bisection captured",
    "seconds": "processor time of `max-batch`",
    "bisected_seconds": "processor time of bisection",
    "holds": "whether the size fits and the next does not, by full captures",
}
TABLES["cluster_decisions"] = {
    "model": "the model, cut down to `layers`",
    "layers": "how many layers it has",
    "ranks": "among how many ranks FSDP divides it",
    "budget_bytes": "the memory of each, between what the uniform settings need",
    "chosen_ms": "the step as `trainfit shard` chose it",
    "chosen_memory_bytes": "what that runs in",
    "units": "how many units of FSDP that has, besides the model itself",
    "kept": "how many of them stay whole after forward",
    "prefetch": "how many are gathered ahead",
    "regions": "how many regions its plan has",
    "fastest_uniform": "the fastest uniform setting that fits",
    "fastest_uniform_ms": "its step",
    "saved_share": "what the choice saves of it",
    "uniform_that_fit": "how many of the four uniform settings fit",
    "fsdp_ilp_ms": "the step with the modules wrapped that fsdp_ilp would; nothing if it does not fit",
    "never_slower": "whether none of them is faster",
    "search_seconds": "processor time of the search",
}
TABLES["scale_choices"] = {
    "model": "the model",
    "ranks": "GPUs of the published run",
    "published": "its mesh",
    "source": "where it is published",
    "device": "the GPU that is asked about",
    "published_tokens_per_second_per_gpu": "as published, where it is",
    "chosen": "the mesh that `trainfit scale` chose",
    "chosen_batch": "micro-batch and accumulation",
    "chosen_is": "`confirmed` by a capture of the whole model, or `derived`",
    "chosen_mfu": "its share of the datasheet's FLOP/s",
    "published_mfu_predicted": "that of the published mesh, predicted",
    "published_fits": "whether the published mesh is predicted to fit",
    "recompute": "what it recomputes",
    "chosen_tokens_per_second_per_gpu": "predicted",
    "predicted_tokens_per_second_per_gpu": "of the published mesh, predicted; empty if it does not fit here; "
    "with its first micro-batch, if it loses with any",
    "same": "whether the two meshes are the same",
    "reason": "why the published mesh loses, as trainfit says",
    "processor_seconds": "processor time of this process",
    "seconds": "wall time of the search",
}
TABLES["plan_quality_executors"] = TABLES["plan_quality"]

RUN = {"date": "when it ran", "versions": "with what"}
"""The last columns of every file."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring and knows `--csv`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "write the rows to this file (default: benchmarks/results/, if everything was run)"
    parser.add_argument("--csv", type=Path, metavar="FILE", help=text)
    return parser


def write_rows(
    table: str, rows: Iterable[Any], path: Path | None = None, *, everything: bool = True
) -> Path | None:
    """Write rows, mappings or dataclasses, and return where; nowhere if it is a part and no path is given.

    What a row does not have is left empty; a column that `TABLES` does not explain is an error.
    """
    if path is None and not everything:
        return None
    columns = [*TABLES[table], *RUN]
    run = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": versions()}
    target = path or RESULTS / f"{table}.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".part")
    try:
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({**run, **_cells(row)} for row in rows)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    print(f"rows written to {target}")
    return target


def versions() -> str:
    """Return Python, trainfit and the libraries that are installed, with their versions."""
    found = [f"python {platform.python_version()}"]
    for library in ("trainfit", *LIBRARIES):
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join(found)


def _cells(row: Any) -> dict[str, Any]:
    values: Mapping[str, Any] = asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
    return {name: _cell(value) for name, value in values.items()}


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value))
    assert value is None or isinstance(value, (str, int, float)), value
    return value
