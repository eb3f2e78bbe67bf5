"""A folder with the files that command lines name, and quick stand-ins for what takes long.

A capture, a measured price and a real run take a second each; a command line is to take milliseconds. The
stand-ins answer with what the real ones made once, so that everything around them is the real thing: reading
options, finding targets and devices, planning, writing results.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import trainfit
from trainfit import capturing
from trainfit.api import choose, gauge_machine, prove
from trainfit.api.request import Request
from trainfit.calibrating.calibration_result import CalibrationResult, MeasuredFigure
from trainfit.calibrating.instrument import Instrument
from trainfit.cli import commands as cli
from trainfit.costs import measured_costs as measured
from trainfit.costs import this_machine
from trainfit.costs.constants import CALIBRATED
from trainfit.costs.roofline import host_of, roofline_costs
from trainfit.devices.device_table import Device, find_device
from trainfit.order_fronts import joint
from trainfit.order_fronts.eager import trace_graph
from trainfit.ordering.simulator_json import save_graph
from trainfit.plans import plan_store
from trainfit.plans.plan import Plan
from trainfit.sweeping import sweep_grid
from trainfit.sweeping.dispatching import WorkerEvent
from trainfit.sweeping.grid_tasks import RowTask
from trainfit.sweeping.row_runner import RowRunner
from trainfit.targets import load
from trainfit.traces.settings import Settings
from trainfit.traces.trace import Trace

STEP = """
import sys
from typing import Literal
import torch
import trainfit

NUMBER = 7


class Class:
    pass


def build(batch: int = 256):
    part = lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    model = torch.nn.Sequential(part(), part(), part(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    return trainfit.Step.of(model, torch.randn(batch, 8), loss=lambda y: y.mean(), optimizer=optimizer)


def with_arguments(
    batch: int = 4, seq=None, dtype="fp32", optimizer: str | None = None, count: int = 1, rate: float = 0.5,
    name: str = "x", flag: bool = False, pair: tuple[int, ...] = (1, 2), either: "int | None" = None,
    choice: Literal["a", "b"] = "a", anything=None, device="cpu",
):
    return build()


def needs(path, /, other):
    pass


def generator():
    yield build()


async def coroutine():
    return build()


def raises():
    raise ValueError("the user's own mistake")


def exits():
    sys.exit(3)
"""


@dataclass(frozen=True)
class Outcome:
    """What a command did. `error` is an exception that left it, which none may."""

    code: object
    out: str
    err: str
    error: BaseException | None = None


class Workbench:
    """The folder, what was made once, and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        """Write the files, and make once what the stand-ins answer with."""
        self.folder = folder
        self.h100 = find_device("h100")
        (folder / "step.py").write_text(STEP, encoding="utf-8")
        (folder / "folder").mkdir()
        (folder / "broken.json").write_text('{"format": "trainfit-plan", "schema":', encoding="utf-8")
        (folder / "grid.toml").write_text(GRID, encoding="utf-8")
        (folder / "bad.toml").write_text(GRID + 'seq = "long"\n', encoding="utf-8")
        (folder / "prices.toml").write_text("h100 = 2.99\nl4 = 0.8\n", encoding="utf-8")
        (folder / "device.json").write_text(json.dumps(DEVICE), encoding="utf-8")
        (folder / "link.json").symlink_to("result.json")
        self.build = load(str(folder / "step.py") + ":build", trainfit.StepOptions()).build
        with self._fixed_speeds():
            self.traces = {
                kind: capturing.capture(self.build, device=find_device(kind)) for kind in ("cpu", "h100")
            }
            self.plan = small_plan(self.traces["h100"], self.h100)
            plan_store.save_plan(self.plan, folder / "plan.json")
            save_graph(trace_graph(self.traces["cpu"]), folder / "graph.json")
            self._save_compared()
            self.joint = joint.joint_graph_without_memory(self.build)
            self.verified = {
                with_plan: prove.verify(self.build, plan=self.plan if with_plan else None, costs="roofline")
                for with_plan in (False, True)
            }

    def _save_compared(self) -> None:
        """Write results and traces for `diff`: of the step, and of one with a larger batch."""
        larger = load(str(self.folder / "step.py") + ":build", trainfit.StepOptions(batch=512)).build
        for name, trace in (
            ("old", self.traces["h100"]),
            ("new", capturing.capture(larger, device=self.h100)),
        ):
            trainfit.save_trace(trace, self.folder / f"{name}-trace.json")
            trainfit.save_result(trainfit.estimate(trace, device=self.h100), self.folder / f"{name}.json")
        planned = choose.plan_step(Request(self.traces["h100"], self.h100))
        trainfit.save_result(planned, self.folder / "planned.json")

    def run(self, words: tuple[str, ...], *, real: bool) -> Outcome:
        """Run a command in the folder, as from a shell."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        code: object = None
        error: BaseException | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(self.folder))
            stack.enter_context(mock.patch.multiple(sys, argv=["trainfit", *words], stdout=out, stderr=err))
            stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
            stack.enter_context(self._fixed_speeds())
            if not real:
                stack.enter_context(self._quick())
            try:
                cli.main()
            except SystemExit as left:
                code = left.code or 0
            except Exception as found:
                error = found
            texts = []
            for stream in (out, err):
                stream.flush()
                texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        return Outcome(code, *texts, error)

    @contextlib.contextmanager
    def _fixed_speeds(self) -> Iterator[None]:
        """Take fixed figures for this machine's speed, and formulas for what would be measured."""

        def with_speed(device: Device, **_: Any) -> tuple[Device, float]:
            return replace(device, bandwidth_bytes_per_second=1e10, flops={"fp32": 1e11, "bf16": 1e11}), 0.0

        def formulas(trace: Trace, device: Device, *, host: Any, **_: Any) -> Any:
            return replace(roofline_costs(trace, device), host=host)

        def gauge(instrument: Instrument, *_: Any) -> CalibrationResult:
            device = replace(instrument.device, constants={"uncertainty": 0.2}, source="measured")
            figure = MeasuredFigure("fp32 product", "matrix products", 1e11, "FLOP/s", 0.1, None)
            return CalibrationResult(device, (figure,), (), (), (), "2", {}, None, ())

        host = replace(host_of(CALIBRATED), runs_kernels=True)
        with (
            mock.patch.object(this_machine, "with_speed", with_speed),
            mock.patch.object(this_machine, "host", lambda **_: (host, 0.0)),
            mock.patch.object(measured, "measured_costs", formulas),
            mock.patch.object(gauge_machine, "gauge", gauge),
        ):
            yield

    @contextlib.contextmanager
    def _quick(self) -> Iterator[None]:
        """Answer with what was made once instead of capturing and running a step."""

        def capture(
            build: Any, *, device: str | Device = "cpu", target: str = "", settings: Settings, **_: Any
        ) -> Trace:
            kind = device.kind if isinstance(device, Device) else device
            architecture = device.architecture if isinstance(device, Device) and kind == "cuda" else ""
            found = self.traces["h100" if kind == "cuda" else "cpu"]
            return replace(found, target=target, settings=settings, architecture=architecture)

        def run_for_real(*_: Any, plan: Plan | None, **__: Any) -> Any:
            found = self.verified[plan is not None]
            return found.measured, found.comparison and replace(found.comparison, plan=plan)

        with (
            mock.patch.object(capturing, "capture", capture),
            mock.patch.object(sweep_grid, "LocalCrew", InProcessCrew),
            mock.patch.object(sweep_grid, "RayCrew", InProcessCrew),
            mock.patch.object(prove, "run_for_real", run_for_real),
            mock.patch.object(joint, "joint_graph_without_memory", lambda build: self.joint),
        ):
            yield


GRID = """
target = ["step.py:build", "step.py:raises", "gpt2-tiny"]
batch = [1, 2]
device = ["h100", "l4"]
budget = ["none", "device"]
"""


class InProcessCrew:
    """The one worker of a sweep, in this process: another one would not have the stand-ins."""

    size = 1

    def __init__(self, *_: Any) -> None:
        """Nothing is done yet."""
        self._runner = RowRunner()
        self._events: list[WorkerEvent] = []

    def start(self, worker: int) -> None:
        """It can begin at once."""
        self._events.append(WorkerEvent(worker, "ready"))

    def give(self, worker: int, task: RowTask) -> None:
        """Do the row now; as a line of JSON would bring it."""
        row = json.loads(json.dumps(self._runner.run(task), allow_nan=False))
        self._events.append(WorkerEvent(worker, "row", row))

    def wait(self) -> list[WorkerEvent]:
        """Return what has happened."""
        events, self._events = self._events, []
        return events

    def end(self, worker: int) -> None:
        """Forget what it has."""
        self._runner = RowRunner()

    def close(self) -> None:
        """There is nothing to end."""


DEVICE = {
    "name": "my-gpu",
    "kind": "cuda",
    "memory_bytes": "24GiB",
    "bandwidth_bytes_per_second": 9e11,
    "flops": {"fp32": 8e13, "bf16": 1.6e14},
    "sm_count": 128,
    "architecture": "sm_89",
    "pcie_bytes_per_second": 3e10,
    "aliases": ["mine"],
}


def small_plan(trace: Trace, device: Device) -> Plan:
    """Return a plan that has regions."""
    least = choose.plan_step(Request(trace, device), budget=1).plan
    assert least.regions
    return least


@functools.cache
def workbench() -> Workbench:
    """Return the one workbench of this process; its folder goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="trainfit-fuzzing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Workbench(folder)
