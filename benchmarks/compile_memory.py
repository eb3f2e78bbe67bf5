"""Predicted against measured peak of compiled steps on this CPU, without a plan: `estimate --compile`.

    python benchmarks/compile_memory.py                 what is not among the rows yet
    python benchmarks/compile_memory.py gpt2-tiny mlp   some cases
    python benchmarks/compile_memory.py --again         everything anew

Every case is a process of its own; the rows are kept as they are made, so that a run that was stopped goes
on. The step (forward, loss, backward, optimizer) is predicted from its joint
graphs, then compiled by inductor, run until it is steady and measured by the profiler's allocation events.
Exit code 1 if the median error is above 1 %, or one is above 5 %.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_process import CaseFailed, report, run_one
from result_files import RESULTS, arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

CASE_SECONDS = 1500
MEDIAN, WORST = 0.01, 0.05
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tiny": ("gpt2-tiny", {"batch": 4, "seq": 128, "optimizer": "none"}),
    "gpt2-tiny adamw": ("gpt2-tiny", {"batch": 4, "seq": 64, "optimizer": "adamw"}),
    "gpt2-tiny bf16": ("gpt2-tiny", {"batch": 4, "seq": 128, "dtype": "bf16-autocast", "optimizer": "none"}),
    "llama-tiny": ("llama-tiny", {"batch": 4, "seq": 128, "optimizer": "none"}),
    "bert-tiny": ("bert-tiny", {"batch": 4, "seq": 128, "optimizer": "none"}),
    "vit-tiny": ("vit-tiny", {"batch": 8, "optimizer": "none"}),
    "resnet-tiny": ("resnet-tiny", {"batch": 8, "optimizer": "none"}),
}


@dataclass(frozen=True)
class Result:
    """One compiled step."""

    case: str
    predicted_bytes: int = 0
    measured_bytes: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        return (self.predicted_bytes - self.measured_bytes) / max(self.measured_bytes, 1)


def _mlp(extra: Any = None, blocks: int = 6) -> Any:
    import torch
    from torch import nn

    from trainfit import Step

    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(128, 512), nn.GELU(), *([extra()] if extra else []), nn.Linear(512, 128)]
    model = nn.Sequential(*layers)
    return Step.of(model, torch.randn(512, 128), loss=lambda out: out.square().mean())


def _dropout() -> Any:
    from torch import nn

    return _mlp(lambda: nn.Dropout(0.1))


def _convolutions(*, norm: bool) -> Any:
    import torch
    from torch import nn

    from trainfit import Step

    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [*([nn.BatchNorm2d(16)] if norm else []), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Step.of(model, torch.randn(8, 3, 32, 32), loss=lambda out: out.square().mean())


def _unet() -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    from trainfit import Step

    class UNet(nn.Module):
        """Two levels down, two up, what was seen on the way down joined on the way up."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
            self.middle = nn.Conv2d(32, 32, 3, padding=1)
            self.third, self.last = nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

        def forward(self, x: Any) -> Any:
            one = F.silu(self.first(x))
            two = F.silu(self.second(F.max_pool2d(one, 2)))
            low = F.silu(self.middle(F.max_pool2d(two, 2)))
            up = torch.cat([F.interpolate(low, scale_factor=2.0), two], 1)
            up = torch.cat([F.interpolate(F.silu(self.third(up)), scale_factor=2.0), one], 1)
            return self.last(up)

    return Step.of(UNet(), torch.randn(4, 3, 32, 32), loss=lambda out: out.square().mean())


def _language(blocks: int, width: int, **settings: Any) -> Any:
    from compile_models import Language, _tokens
    from trainfit import Step

    return Step.of(Language(blocks, width, **settings), _tokens(4, 128))


OWN: dict[str, Callable[[], Any]] = {
    "mlp": _mlp,
    "dropout": _dropout,
    "convolutions": lambda: _convolutions(norm=False),
    "batch norm": lambda: _convolutions(norm=True),
    "u-net": _unet,
    "transformer": lambda: _language(4, 128),
    "gated transformer": lambda: _language(4, 128, gated=True),
    "two traversals": lambda: _language(2, 128, passes=2),
}
CASES = (*OWN, *BUILT_IN)
"""Those that are quick first."""


def run_case(case: str) -> Result:
    """Predict, compile and measure one case in this process."""
    import torch

    from trainfit import StepOptions
    from trainfit.api.compiled_steps import estimate_compiled_step
    from trainfit.api.request import Request
    from trainfit.compiling.step_graphs import compiled_call
    from trainfit.verifying.measuring import measure_step

    torch.set_num_threads(1)
    target: Any = OWN.get(case)
    options = None
    if case in BUILT_IN:
        target, given = BUILT_IN[case]
        options = StepOptions(**given)
    request = Request(target, "cpu", options)
    found = estimate_compiled_step(request)

    def build() -> Any:
        step = request.build()
        step.model._compiled_call_impl = compiled_call(step.model, "inductor")
        return step

    measured = measure_step(build, "cpu", timed=5)
    assert found.time is not None
    return Result(case, found.peak_bytes, measured.peak_bytes, found.time.step_seconds, measured.seconds)


def as_line(r: Result) -> str:
    if r.failure:
        return f"FAIL {r.case:18} {r.failure}"
    return (
        f"{r.case:18} predicted {r.predicted_bytes:>12,} measured {r.measured_bytes:>12,} "
        f"{100 * r.error:+7.3f} %, step {1e3 * r.predicted_seconds:7.1f} ms predicted, "
        f"{1e3 * r.measured_seconds:7.1f} ms measured"
    )


def kept_rows(path: Path) -> dict[str, Result]:
    """Return the rows of runs before, by case; what failed is tried again."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        found = [
            Result(
                row["case"],
                int(row["predicted_bytes"]),
                int(row["measured_bytes"]),
                float(row["predicted_seconds"]),
                float(row["measured_seconds"]),
            )
            for row in csv.DictReader(file)
            if not row["failure"]
        ]
    return {row.case: row for row in found}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--again", action="store_true", help="make rows again that are there")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        report(asdict(run_case(options.run_one)))
        return 0
    path = options.csv or RESULTS / "compile_memory.csv"
    results = {} if options.again and not options.names else kept_rows(path)
    for case in options.names or CASES:
        if case in results and not options.again:
            continue
        try:
            results[case] = Result(**run_one(__file__, case, seconds=CASE_SECONDS))
        except CaseFailed as error:
            results[case] = Result(case, failure=str(error))
        print(as_line(results[case]), flush=True)
        write_rows("compile_memory", [asdict(results[name]) for name in CASES if name in results], path)
    errors = [abs(result.error) for result in results.values() if not result.failure]
    median, worst = statistics.median(errors or [1.0]), max(errors, default=1.0)
    print(f"{len(errors)} of {len(CASES)} steps: median {median:.3%}, worst {worst:.3%}")
    return 0 if len(errors) == len(results) and median <= MEDIAN and worst <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())
