"""The largest batch or sequence that `max-batch` and `max-seq` find, beside bisection with full captures.

    python benchmarks/max_batch_truth.py              all cases, about ten minutes
    python benchmarks/max_batch_truth.py gpt2         those whose name begins so

Bisection asks `estimate` (or with a plan `plan`) whether a size fits: 1, 2, 4, and so on until one does not,
then the middle of what is left. Each question is a capture. `max-batch` captures few sizes and works the
others out. Seconds are processor time of this process, which runs both, one after the other.

What torch's allocator needs does not always grow with the batch: it cuts memory up by luck. Bisection then
ends at some size that fits while the next does not; `max-batch` looks for a larger one that fits as well, and
full captures of it and of the next one are made here to see that it is right.

Exit code 1 if `max-batch` finds a smaller size than bisection, or a larger one that does not hold.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from result_files import arguments, write_rows


@dataclass(frozen=True)
class Case:
    """A step whose batch or sequence is looked for."""

    target: str
    device: str
    what: str = "batch"
    budget: str | None = None
    plan: bool = False
    dtype: str | None = None
    seq: int | None = None

    @property
    def name(self) -> str:
        parts = [self.target, self.device, f"max {self.what}", self.budget, self.dtype]
        parts += [f"seq {self.seq}" if self.seq else None, "plan" if self.plan else None]
        return ", ".join(part for part in parts if part)

    def options(self, **size: int) -> Any:
        from trainfit import StepOptions

        return StepOptions(**{"dtype": self.dtype, "seq": self.seq, **size})


@dataclass(frozen=True)
class Result:
    """What both found, and what it took."""

    name: str
    plan: bool
    size: int
    bisected: int
    captures: int
    bisected_captures: int
    seconds: float
    bisected_seconds: float
    holds: bool
    """Whether the size fits and the next does not, by full captures."""

    @property
    def verdict(self) -> str:
        if self.size == self.bisected:
            return "equal"
        return "larger" if self.size > self.bisected and self.holds else "WRONG"


CASES = (
    Case("gpt2-tiny", "rtx-3070-8gb"),
    Case("gpt2-tiny", "t4", budget="2GiB"),
    Case("bert-tiny", "rtx-3060-12gb", budget="3GiB"),
    Case("bert-tiny", "t4", budget="1GiB", dtype="fp16-autocast"),
    Case("vit-tiny", "rtx-4090", budget="2GiB"),
    Case("resnet-tiny", "l4", budget="1GiB"),
    Case("llama-tiny", "t4", budget="2GiB"),
    Case("llama-tiny", "rtx-2080-ti-11gb", budget="1GiB", dtype="fp32"),
    Case("mixtral-tiny", "rtx-3060-12gb", budget="2GiB"),
    Case("llama-tiny", "rtx-3070-8gb", what="seq", budget="4GiB"),
    Case("mixtral-tiny", "t4", what="seq", budget="1GiB"),
    Case("gpt2-tiny", "t4", what="seq"),
    Case("gpt2-tiny", "t4", budget="1GiB", plan=True),
    Case("llama-tiny", "rtx-4090", budget="500MiB", plan=True),
    Case("bert-tiny", "a10", budget="500MiB", plan=True),
    Case("vit-tiny", "a100-40gb", budget="300MiB", plan=True),
    Case("resnet-tiny", "t4", budget="300MiB", plan=True),
    Case("mixtral-tiny", "h100-sxm-80gb", budget="500MiB", plan=True),
    Case("llama-tiny", "t4", what="seq", budget="300MiB", plan=True),
    Case("gpt2", "a100-40gb"),
    Case("gpt2", "rtx-4090", dtype="bf16-autocast", seq=256),
    Case("resnet-18", "t4"),
    Case("bert-base", "rtx-4090"),
    Case("gpt2", "rtx-3070-8gb", plan=True, seq=512),
)


def fits(case: Case, size: int) -> bool:
    """Ask the usual way; a size that the model has no positions for does not fit either."""
    import trainfit
    from trainfit.api.choose import plan_step
    from trainfit.api.request import Request
    from trainfit.planning.requests import bytes_of_budget

    options = case.options(**{case.what: size})
    try:
        if case.plan:
            return plan_step(Request(case.target, case.device, options), case.budget).feasible
        found = trainfit.estimate(case.target, device=case.device, options=options)
    except trainfit.OptionError:
        return False
    return found.smallest_memory_bytes <= bytes_of_budget(case.budget, found.device)


def bisected(case: Case) -> tuple[int, int]:
    """Return the size that bisection finds, and how often it asked."""
    asked = 0

    def ask(size: int) -> bool:
        nonlocal asked
        asked += 1
        return fits(case, size)

    low, high = 0, 1 if case.what == "batch" else 2
    while ask(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low, asked


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and the processor time that it took."""
    begin = time.process_time()
    found = function()
    return found, time.process_time() - begin


def compared(case: Case) -> Result:
    """Find the size both ways."""
    import trainfit

    find = trainfit.max_batch if case.what == "batch" else trainfit.max_seq
    found, seconds = timed(
        lambda: find(
            case.target,
            device=case.device,
            with_plan=case.plan,
            budget=case.budget,
            options=case.options(),
        )
    )
    (size, asked), bisected_seconds = timed(lambda: bisected(case))
    holds = found.size == size or (fits(case, found.size) and not fits(case, found.size + 1))
    counts = len(found.captures), asked, seconds, bisected_seconds
    return Result(case.name, case.plan, found.size, size, *counts, holds)


def main() -> int:
    """Compare all cases, print a row for each, and say whether all are equal."""
    parser = arguments(__doc__)
    parser.add_argument("only", nargs="*", help="cases whose name begins so")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or case.name.startswith(tuple(given.only))]
    import trainfit

    trainfit.estimate("gpt2-tiny", device="t4")  # loads torch before anything is timed
    print(f"{'case':62} {'size':>9} {'bisected':>9} {'captures':>9} {'instead of':>10} {'time':>7} {'of':>8}")
    results: list[Result] = []
    with contextlib.suppress(KeyboardInterrupt):  # what there is until then counts
        for case in cases:
            one = compared(case)
            results.append(one)
            print(
                f"{one.name:62} {one.size:9,} {one.bisected:9,} {one.captures:9} {one.bisected_captures:10} "
                f"{one.seconds:6.1f}s {one.bisected_seconds:7.1f}s  {one.verdict}",
                flush=True,
            )
    found = Counter(one.verdict for one in results)
    ours, theirs = (sum(getattr(one, name) for one in results) for name in ("seconds", "bisected_seconds"))
    print(f"{dict(found)}; {ours:.0f} s instead of {theirs:.0f} s")
    write_rows("max_batch_truth", results, given.csv, everything=len(results) == len(CASES))
    return 1 if found["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
