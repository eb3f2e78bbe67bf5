"""How fast is capture? Llama-3-8B (batch 1 x 8192): bare fake step, our capture, torch's MemTracker.

    python benchmarks/capture_speed.py                three ways, side by side, and the ratios
    python benchmarks/capture_speed.py --layers       time and memory of capture from 8B to 405B

The bare step is torch's own `FakeTensorMode` around forward, backward and optimizer, without recording
anything: the least that following a step through fake tensors costs. Model: transformers' Llama with the
configuration of Llama-3-8B, bf16, AdamW. Each way runs in a process of its own, interleaved.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result_files import arguments, write_rows
from trainfit import Step, StepOptions

WAYS = ("bare", "trainfit", "memtracker")


def build() -> Step:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    tokens = torch.randint(0, config.vocab_size, (1, 8192))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Step.of(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)


def bare() -> dict[str, float]:
    """One steady step under fake tensors, nothing recorded."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        step = build()
        step.run()
        begin = time.perf_counter()
        step.run()
        return {"step_seconds": time.perf_counter() - begin}


def trainfit() -> dict[str, float]:
    """Our capture: the recorded step, and everything from the model's construction to the checked trace."""
    from trainfit.basics.doing import heard_by
    from trainfit.capturing import capture

    stages: list[tuple[str, float]] = []
    begin = time.perf_counter()
    with heard_by(lambda stage: stages.append((stage, time.perf_counter()))):
        trace = capture(build, device="cuda")
    end = time.perf_counter()
    times = dict(stages)
    return {
        "step_seconds": end - times["recording a step"],
        "whole_seconds": end - begin,
        "ops": len(trace.ops),
        "peak_bytes": trace.observed_peak_bytes or 0,
    }


def memtracker() -> dict[str, float]:
    """The same steady step under torch.distributed._tools' MemTracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        step = build()
        step.run()
        tracker = MemTracker()
        tracker.track_external(step.model, *step.optimizers)
        begin = time.perf_counter()
        with tracker:
            step.run()
        seconds = time.perf_counter() - begin
        peak = tracker.get_tracker_snapshot("peak")
    return {"step_seconds": seconds, "peak_bytes": sum(device["Total"] for device in peak.values())}


def layers() -> dict[str, float]:
    """Capture of a built-in Llama for an H100, named on the command line."""
    from trainfit import capture

    begin = time.perf_counter()
    trace = capture(sys.argv[3], device="h100-sxm-80gb", options=StepOptions(batch=1, seq=8192))
    seconds = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "ops": len(trace.ops), "memory_bytes": memory}


def in_own_process(way: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--run-one", way, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(rounds: int, path: Path | None) -> None:
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            results[way].append(in_own_process(way))
            print(way, results[way][-1], flush=True)
    median = {way: statistics.median(r["step_seconds"] for r in results[way]) for way in WAYS}
    whole = statistics.median(r["whole_seconds"] for r in results["trainfit"])
    tracker = median["memtracker"]
    print(f"\nLlama-3-8B, batch 1 x 8192, AdamW, median of {rounds}:")
    for label, seconds in (
        ("bare fake step", median["bare"]),
        ("trainfit: record and check a step", median["trainfit"]),
        ("trainfit: all of capture", whole),
        ("MemTracker: a step", tracker),
    ):
        print(f"  {label:34} {seconds:7.2f} s   {seconds / median['bare']:6.2f} x the bare step")
    print(f"  capture, all of it, is {tracker / whole:.1f} x faster than one step of MemTracker")
    rows = [{"way": way, "round": n, **r} for way in WAYS for n, r in enumerate(results[way])]
    write_rows("capture_speed", rows, path)


def grow(path: Path | None) -> None:
    rows: list[dict[str, str | float]] = []
    for name, count in (("llama-3-8b", 32), ("llama-3-70b", 80), ("llama-3-405b", 126)):
        r = in_own_process("layers", name)
        per_layer = 1000 * r["seconds"] / count
        memory = r["memory_bytes"] / 2**30
        print(f"{name:14} {count:4} layers  {r['seconds']:6.2f} s  {per_layer:6.1f} ms a layer", end="  ")
        print(f"{r['ops']:.0f} ops  {memory:.2f} GiB of memory", flush=True)
        rows.append({"model": name, "layers": count, **r})
    write_rows("capture_layers", rows, path)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--run-one":
        from transformers import LlamaForCausalLM  # noqa: F401  (so that its import is not timed)

        print(json.dumps(globals()[sys.argv[2]]()))
        return
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", action="store_true", help="show how time grows with the layers")
    options = parser.parse_args()
    grow(options.csv) if options.layers else compare(options.rounds, options.csv)


if __name__ == "__main__":
    main()
