"""`RuntimeEstimator` of `torch.distributed._tools.runtime_estimator`: milliseconds of each module.

    estimator = RuntimeEstimator(device="a100-sxm-40gb")
    with FakeTensorMode(), estimator("operator-level-cost-model"):
        step()

No GPU is needed for the cost model, and no fake tensors: what runs is observed. `operator-level-benchmark`
runs each distinct operator on this machine, so the device is the one that is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from trainfit.compat.observing_estimator import ObservingEstimator
from trainfit.compat.op_runtimes import op_milliseconds
from trainfit.compat.seen_calls import Seen
from trainfit.devices.device_table import Device
from trainfit.traces.trace import Trace

__all__ = ["RuntimeEstimator"]

_GLOBAL = "Global"


class RuntimeEstimator(ObservingEstimator):
    """Estimates what the operators that run while it is entered take, for each module and in all."""

    def __init__(self, device: str | Device | None = None) -> None:
        """Prepare; `device` names what the operators would run on, else it is the one that tensors are on."""
        super().__init__(device)
        self.mod_runtimes: dict[str, dict[str, float]] = _empty()
        """Milliseconds of each module and what is inside: `fw` and `bw`."""
        self.mod_fw_pre_order: list[str] = []
        self.mod_bw_pre_order: list[str] = []
        self.mod_fw_post_order: list[str] = []
        self.mod_bw_post_order: list[str] = []
        self.total_runtime = 0.0
        """Milliseconds of all operators."""

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Stop, and say what everything takes."""
        super().__exit__(kind, error, traceback)
        if error is None:
            print(f"Estimated ({self._mode})total_time: {self.total_runtime:.3f} ms")

    def _read(self, seen: Seen) -> None:
        trace = seen.trace
        runtimes = op_milliseconds(trace, self._mode, self._device)
        self.total_runtime = sum(runtimes)
        self.mod_runtimes = _empty()
        around = _modules_around(trace)
        for op, milliseconds in zip(trace.ops, runtimes):
            pass_ = "bw" if op.phase == "backward" else "fw"
            for name in (_GLOBAL, *around[op.module]):
                self.mod_runtimes[name][pass_] += milliseconds
        calls = [number for number, call in enumerate(trace.calls) if not call.recompute]
        again = {number for number, call in enumerate(trace.calls) if call.recompute}
        self.mod_fw_pre_order = list(trace.call_names(tuple(calls)))
        self.mod_fw_post_order = _names(trace, trace.forward_post_order, again)
        self.mod_bw_pre_order = _names(trace, trace.backward_pre_order, again)
        self.mod_bw_post_order = _names(trace, trace.backward_post_order, again)

    def display_modulewise_stats(self, depth: int = 2) -> None:
        """Print the orders of execution, and the milliseconds of all modules down to a depth."""
        for title, order in (("Forward", self.mod_fw_pre_order), ("Backward", self.mod_bw_pre_order)):
            print(f"Pre-{title} Execution Order: ")
            for name in _down_to(depth, order):
                print(name)
        for name in _down_to(depth, self.mod_runtimes):
            runtimes = self.mod_runtimes[name]
            print(f"{name} fw: {runtimes.get('fw', 0.0):.3f}ms bw: {runtimes.get('bw', 0.0):.3f}ms")


def _empty() -> dict[str, dict[str, float]]:
    return defaultdict(lambda: defaultdict(float))


def _modules_around(trace: Trace) -> dict[int, tuple[str, ...]]:
    """Return the names of each module and of those around it that are called; none for -1."""
    called = {call.module for call in trace.calls}
    found: dict[int, tuple[str, ...]] = {-1: ()}
    for number, module in enumerate(trace.modules):
        found[number] = (*found[module.parent], *([module.name] if number in called else ()))
    return found


def _names(trace: Trace, order: tuple[int, ...], without: set[int]) -> list[str]:
    return list(trace.call_names(tuple(number for number in order if number not in without)))


def _down_to(depth: int, names: Any) -> Iterator[str]:
    return (name for name in names if name.count(".") < depth)
