"""Predicted against measured time of a training step on this machine's CPU, one process per case.

    python benchmarks/time_accuracy_cpu.py                          all cases, one after another
    python benchmarks/time_accuracy_cpu.py --case hf-gpt2 --case hf-bert

Each case is captured, and its distinct operators are run alone, in rounds (`--costs measured`). After each
round the real step runs once, so that a slow second of the machine hits both alike. Predicted is the sum of
the operators and of what the host takes around them; measured is the median of the real steps. With one
thread both are counted in the time that the thread has run, so that other work on the machine disturbs less;
on an idle machine that is the time on the wall, which is shown as well. Exit code 1 if a bound is missed:
median error 8 %, worst 25 %, every step between 50 ms and 5 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

if TYPE_CHECKING:
    from trainfit import Step

sys.path.insert(0, str(Path(__file__).parent))

MEDIAN_BOUND, WORST_BOUND = 0.08, 0.25
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 5.0
CASE_SECONDS = 600
WARM_UPS = 3

CASES = (
    *("builtin-gpt2-tiny", "builtin-gpt2-tiny-adamw-foreach", "builtin-gpt2-tiny-adamw-fused"),
    *("builtin-llama-tiny", "builtin-mixtral-tiny", "builtin-bert-tiny", "builtin-vit-tiny"),
    *(
        "builtin-resnet-18",
        "hf-gpt2",
        "hf-llama",
        "hf-qwen3",
        "hf-gemma2",
        "hf-phi3",
        "hf-bloom",
        "hf-gpt-neox",
    ),
    *("hf-mixtral", "hf-gpt-oss", "hf-bert", "hf-albert", "hf-deberta", "hf-modernbert", "hf-xlnet"),
    *("hf-t5", "hf-pegasus", "hf-prophetnet", "hf-mamba", "hf-vit", "hf-swin", "hf-dinov2", "hf-segformer"),
    *("hf-detr", "hf-convnext", "hf-resnet", "hf-efficientnet", "hf-wav2vec2", "hf-whisper", "hf-clip"),
    "hf-autoformer",
)


@dataclass(frozen=True)
class Result:
    """One case: predicted and measured seconds, or the message of its failure."""

    name: str
    kind: str
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    wall_seconds: float = 0.0
    """Of the same steps."""
    measured_spread: float = 0.0
    """Half the distance between the quartiles of the real steps, relative to their median."""
    steps: int = 0
    ops: int = 0
    host_share: float = 0.0
    """Of the predicted time: what the host takes around the operators."""
    unmeasured_share: float = 0.0
    """Of the predicted time: operators that could not be run alone, priced by the roofline."""
    unmeasured: list[str] = field(default_factory=list)
    page_faults: int = 0
    """Per real step."""
    measuring_seconds: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        return (self.predicted_seconds - self.measured_seconds) / max(self.measured_seconds, 1e-9)

    @property
    def good(self) -> bool:
        return (
            not self.failure
            and abs(self.error) <= WORST_BOUND
            and SHORTEST_SECONDS <= self.measured_seconds <= LONGEST_SECONDS
        )


class RealSteps:
    """A step that is built when it is first run, and what each run of it took."""

    def __init__(self, build: Callable[[], Step]) -> None:
        from trainfit.timing.clocks import cpu_clock

        self.build = build
        self.built: Step | None = None
        self.clock = cpu_clock()
        self.times: list[float] = []
        self.wall: list[float] = []
        self.faults: list[int] = []

    def run(self) -> None:
        """Run the step once and write down its time and its page faults."""
        import torch

        if self.built is None:
            # After the first round, so that what the rounds keep does not lie between the step's tensors.
            torch.manual_seed(0)
            self.built = self.build()
            for _ in range(WARM_UPS):
                self.built.run()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin, wall_begin = self.clock(), time.perf_counter()
        self.built.run()
        self.times.append(self.clock() - begin)
        self.wall.append(time.perf_counter() - wall_begin)
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def run_case(name: str, threads: int, cache: Path) -> Result:
    """Predict and measure one case in this process, in turn."""
    import torch

    from cases import all_cases
    from trainfit.capturing import capture
    from trainfit.costs import this_machine
    from trainfit.costs.constants import CALIBRATED
    from trainfit.costs.measured_costs import measured_costs
    from trainfit.costs.roofline import Roofline
    from trainfit.costs.schedule import schedule
    from trainfit.devices.device_table import this_cpu

    torch.set_num_threads(threads)
    case = all_cases()[name]
    device, _ = this_machine.with_speed(this_cpu(), cache_path=cache)
    host, _ = this_machine.host(cache_path=cache)
    trace = capture(case.build, target=name)
    real = RealSteps(case.build)
    begin = time.perf_counter()
    table = measured_costs(
        trace,
        device,
        host=host,
        fallback=Roofline(device, CALIBRATED, trace.tf32).price,
        refresh=True,
        cache_path=cache,
        between=real.run,
    )
    measuring = time.perf_counter() - begin - sum(real.wall)
    plan = schedule(trace, table)
    unmeasured: dict[str, float] = {}
    for op in trace.ops:
        signature, cost = trace.signatures[op.signature], table.costs[op.signature]
        if not signature.view and cost.source != "measured":
            unmeasured[signature.name] = unmeasured.get(signature.name, 0.0) + cost.seconds
    low, middle, high = statistics.quantiles(real.times, n=4, method="inclusive")
    return Result(
        name,
        case.kind,
        predicted_seconds=plan.step_seconds,
        measured_seconds=middle,
        wall_seconds=statistics.median(real.wall),
        measured_spread=(high - low) / 2 / middle,
        steps=len(real.times),
        ops=len(trace.ops),
        host_share=float(plan.host_seconds.sum()) / plan.step_seconds,
        unmeasured_share=sum(unmeasured.values()) / plan.step_seconds,
        unmeasured=sorted(unmeasured, key=lambda name: -unmeasured[name]),
        page_faults=round(statistics.median(real.faults)),
        measuring_seconds=measuring,
    )


def in_own_process(name: str, threads: int, cache: Path) -> Result:
    """Run one case in a process of its own."""
    from cases import all_cases

    settings = ("--threads", str(threads), "--cache", str(cache))
    try:
        return Result(**run_one(__file__, name, *settings, seconds=CASE_SECONDS))
    except CaseFailed as error:
        return Result(name, all_cases()[name].kind, failure=str(error))


def as_line(result: Result) -> str:
    verdict = "ok  " if result.good else "MISS"
    if result.failure:
        return f"{verdict} {result.name:34} {result.failure}"
    listed = f"  not run: {', '.join(result.unmeasured)}" if result.unmeasured else ""
    return (
        f"{verdict} {result.name:34} predicted {1e3 * result.predicted_seconds:7.1f} ms  "
        f"measured {1e3 * result.measured_seconds:7.1f} ms ±{100 * result.measured_spread:4.1f} % "
        f"(wall {1e3 * result.wall_seconds:7.1f})  error {100 * result.error:+6.1f} %  {result.ops:5} ops  "
        f"host {100 * result.host_share:4.1f} %  formula {100 * result.unmeasured_share:3.1f} %  "
        f"faults {result.page_faults:6}  in {result.measuring_seconds:4.1f} s{listed}"
    )


def summary(results: list[Result]) -> Iterator[str]:
    ran = [result for result in results if not result.failure]
    within = sum(result.good for result in results)
    yield f"{len(ran)} of {len(results)} cases ran, {within} within their bounds"
    if ran:
        errors = sorted(abs(result.error) for result in ran)
        worst = max(ran, key=lambda result: abs(result.error))
        ninetieth = errors[int(0.9 * (len(errors) - 1))]
        yield (
            f"median error {100 * statistics.median(errors):.1f} % (bound {100 * MEDIAN_BOUND:.0f} %), 90th "
            f"percentile {100 * ninetieth:.1f} %, worst {100 * abs(worst.error):.1f} % "
            f"({worst.name}; bound {100 * WORST_BOUND:.0f} %), mean signed "
            f"{100 * statistics.mean(result.error for result in ran):+.1f} %"
        )


def is_good(results: list[Result]) -> bool:
    errors = [abs(result.error) for result in results]
    return all(result.good for result in results) and statistics.median(errors) <= MEDIAN_BOUND


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", action="append", help="run this case (may be repeated; default: all)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--cache", type=Path, help="the cache file (default: a new one)")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        result = run_case(options.run_one, options.threads, options.cache)
        report(asdict(result))
        return 0
    from cases import all_cases

    names = options.case or CASES
    unknown = [name for name in names if name not in all_cases()]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}")
    results: list[Result] = []
    print(f"{options.threads} thread(s), load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "costs.sqlite"
        for name in names:
            results.append(in_own_process(name, options.threads, cache))
            print(as_line(results[-1]), flush=True)
    print(*summary(results), sep="\n")
    write_rows("time_accuracy_cpu", results, options.csv, everything=not options.case)
    return 0 if is_good(results) else 1


if __name__ == "__main__":
    sys.exit(main())
