"""PyTorch's own pipeline for checkpointing, through its tools and through `trainfit.compat`, side by side.

    python benchmarks/compat_speed.py                32 layers
    python benchmarks/compat_speed.py --layers 4     fewer

A Llama of width 768 with 12 heads, batch 8 x 1024, Adam foreach, on fake tensors, as PyTorch's test of
`sac_ilp` does it: two steps under MemTracker, one under RuntimeEstimator, a forward under SACEstimator,
`aggregate_stats`, `sac_milp` at 62 % of the peak, and the policy of each module that it chooses. PyTorch's
roofline is told the figures of an A100, so that it runs without one; ours is told its name. Each way runs in
a process of its own. Not a GPT-2: it calls its dropout twice, which PyTorch's tools fail on.

Claims: at least 10 times faster; peaks, sizes of modules and ops agree where both observe the same kernels
(`same`: our trackers without a device); from PyTorch's table, our planner recomputes no more.

Needs pulp and pwlf: `pip install -c constraints.txt -e '.[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from result_files import arguments, write_rows
from torch_sac import missing

BUDGET_SHARE = 0.62
DEVICE = "a100-sxm-40gb"
A100_TERAFLOPS, A100_GIGABYTES = 19.5, 1555.0
LEAST_RATIO = 10.0
WAYS = ("torch", "compat", "same")
SIZES = ("param_per_module", "act_fw_per_module", "act_total", "grad_total", "output_per_module")


def tools(way: str) -> Any:
    """Import the seven names from torch or from compat."""
    import importlib
    from types import SimpleNamespace

    root = "torch.distributed._tools" if way == "torch" else "trainfit.compat"
    modules = ("mem_tracker", "runtime_estimator", "sac_estimator", "ilp_utils", "sac_ilp")
    return SimpleNamespace(**{name: importlib.import_module(f"{root}.{name}") for name in modules})


@contextlib.contextmanager
def told_the_device(way: str) -> Iterator[None]:
    """Let torch's roofline run without a GPU."""
    import torch
    from torch.utils import _runtime_estimation as roofline

    with contextlib.ExitStack() as stack:
        if way == "torch":
            stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
            for name, value in (
                ("get_device_tflops", lambda dtype: A100_TERAFLOPS),
                ("get_gpu_dram_gbps", lambda: A100_GIGABYTES),
            ):
                stack.enter_context(mock.patch.object(roofline, name, value))
        yield


class Stages:
    """How long each stage takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    def took(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{stage}_seconds"], self._begin = now - self._begin, now


def pipeline(way: str, layers: int) -> dict[str, Any]:
    """Run all tools on the same step, and return what they say."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainfit.models.llama import Llama, LlamaConfig

    with told_the_device(way), FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model = Llama(LlamaConfig(8192, layers, heads=12, kv_heads=12, hidden=768, feed_forward=2048))
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        tokens = torch.randint(0, 8192, (8, 1024))
        return planned(way, model, optimizer, tokens)


def planned(way: str, model: Any, optimizer: Any, tokens: Any) -> dict[str, Any]:
    theirs = tools(way)
    named = {"device": DEVICE} if way == "compat" else {}

    def step() -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    stages = Stages()
    memory = theirs.mem_tracker.MemTracker(**named)
    memory.track_external(model, optimizer)
    with memory:
        step()
        memory.reset_mod_stats()
        step()
    (place, peak), *_ = memory.get_tracker_snapshot("peak").items()
    stages.took("mem_tracker")
    runtime = theirs.runtime_estimator.RuntimeEstimator(**named)
    with runtime("operator-level-cost-model"):
        step()
    stages.took("runtime_estimator")
    sac = theirs.sac_estimator.SACEstimator(**named)
    with sac("operator-level-cost-model"):
        model(tokens)
    stages.took("sac_estimator")
    info = theirs.ilp_utils.aggregate_stats(model, memory, runtime, sac, place)
    graph = theirs.ilp_utils.parse_module_info(info)
    stages.took("aggregate")
    unplanned, _ = theirs.ilp_utils.get_peak_memory_runtime_baseline(graph)
    budget = BUDGET_SHARE * unplanned / 2**30
    decisions, again, planned_bytes = theirs.sac_ilp.sac_milp(graph, budget)
    stages.took("milp")
    for name, share in decisions.items():
        stored = min(max(1.0 - share, 0.0), 1.0)
        theirs.sac_ilp.get_optimal_checkpointing_policy_per_module(sac.sac_mod_stats[name], stored)
    stages.took("policy")
    ours = tools("compat").sac_ilp.sac_milp(graph, budget)[1] if way == "torch" else again
    return {
        "seconds": sum(stages.seconds.values()),
        **stages.seconds,
        "tracked_peak_bytes": peak["Total"],
        "unplanned_bytes": unplanned,
        "planned_bytes": planned_bytes,
        "recompute_ms": again,
        "ours_recompute_ms": ours,
        "sizes": {node["fqn"]: [node[key] for key in SIZES] for node in graph.nodes},
        "ops": {name: stats.func_names for name, stats in sac.sac_mod_stats.items()},
    }


def in_own_process(way: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run-one", way, "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = {name: value for name, value in found.items() if isinstance(value, int | float)}
    print(way, {name: round(value, 3) for name, value in shown.items()}, flush=True)
    return found


def without_clones(ops: dict[str, list[str]]) -> dict[str, list[str]]:
    """Leave out what torch never lists."""
    return {name: [op for op in names if op != "clone"] for name, names in ops.items()}


def compare(layers: int, path: Any) -> bool:
    found = {way: in_own_process(way, layers) for way in WAYS}
    torchs, compat, same = (found[way] for way in WAYS)
    ratio = torchs["seconds"] / compat["seconds"]
    equal = sum(same["sizes"].get(name) == sizes for name, sizes in torchs["sizes"].items())
    alike = without_clones(same["ops"])
    claims = (
        (f"compat is {ratio:.1f} times faster (at least {LEAST_RATIO:g})", ratio >= LEAST_RATIO),
        (
            f"tracked peak {same['tracked_peak_bytes']:,} bytes, torch's {torchs['tracked_peak_bytes']:,}",
            same["tracked_peak_bytes"] == torchs["tracked_peak_bytes"],
        ),
        (
            f"peak of the table {same['unplanned_bytes']:,}, torch's {torchs['unplanned_bytes']:,}",
            same["unplanned_bytes"] == torchs["unplanned_bytes"],
        ),
        (
            f"sizes of modules equal: {equal} of {len(torchs['sizes'])}",
            equal == len(torchs["sizes"]),
        ),
        (
            "ops of modules equal, without clones",
            all(alike[name] == ops for name, ops in without_clones(torchs["ops"]).items()),
        ),
        (
            f"from torch's table we recompute {torchs['ours_recompute_ms']:.3f} ms, "
            f"torch {torchs['recompute_ms']:.3f} ms",
            torchs["ours_recompute_ms"] <= torchs["recompute_ms"] + 0.01,
        ),
    )
    for text, good in claims:
        print(f"{'ok  ' if good else 'MISS'} {text}")
    rows = [
        {"layers": layers, "way": way, "figure": name, "value": value}
        for way in WAYS
        for name, value in found[way].items()
        if isinstance(value, int | float)
    ]
    write_rows("compat_speed", rows, path, everything=layers == 32)
    return all(good for _, good in claims)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--run-one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        print(json.dumps(pipeline(options.run_one, options.layers)))
        return
    if (problem := missing()) is not None:
        sys.exit(problem)
    sys.exit(0 if compare(options.layers, options.csv) else 1)


if __name__ == "__main__":
    main()
