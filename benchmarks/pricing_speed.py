"""Capture once, price many: how long a captured step takes to price for another device.

    python benchmarks/pricing_speed.py [--target llama-3-8b] [--rounds 5] [--csv FILE]

One capture of Llama-3-8B (batch 1 x 8192), then every GPU of the device table in turn whose kernels are the
same: pricing (roofline), scheduling and summing up. The first device also fills what is remembered between
devices; it counts too. Exit code 1 if any device takes longer than the bound.
"""

from __future__ import annotations

import statistics
import sys
import time

import trainfit
from result_files import arguments, write_rows
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import summarise
from trainfit.devices.architectures import same_kernels
from trainfit.devices.device_table import known_devices

BOUND_SECONDS = 0.2


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="llama-3-8b")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    begin = time.perf_counter()
    trace = trainfit.capture(options.target, device="h100")
    capture_seconds = time.perf_counter() - begin
    print(f"{options.target}: {len(trace.ops):,} ops captured in {capture_seconds:.2f} s")
    worst = 0.0
    rows = []
    for device in known_devices():
        if not same_kernels(trace.architecture, device.architecture):
            print(f"{device.name:20} has other kernels: the step has to be captured for it")
            continue
        taken = []
        for _ in range(options.rounds):
            begin = time.perf_counter()
            step = summarise(schedule(trace, trainfit.price(trace, device)))
            taken.append(time.perf_counter() - begin)
        worst = max(worst, *taken)
        shared = {"step_seconds": step.step_seconds, "capture_seconds": capture_seconds}
        rows += [{"device": device.name, "round": n, "seconds": s, **shared} for n, s in enumerate(taken)]
        print(
            f"{device.name:20} priced in {1e3 * statistics.median(taken):6.1f} ms "
            f"(slowest {1e3 * max(taken):6.1f} ms): {step.step_seconds:8.3f} s per step predicted"
        )
    print(f"slowest of all {worst:.3f} s, bound {BOUND_SECONDS} s")
    print(f"capture took {capture_seconds / worst:.0f} times as long")
    write_rows("pricing_speed", rows, options.csv, everything=options.target == "llama-3-8b")
    return 0 if worst < BOUND_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
