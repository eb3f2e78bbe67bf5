"""What the two estimators have in common: they observe code, or read one captured step, for a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from trainfit.capturing.observing import Observation
from trainfit.compat.captured_step import CapturedStep
from trainfit.compat.op_runtimes import COST_MODEL, check_mode
from trainfit.compat.seen_calls import Seen, seen_by
from trainfit.compat.target_device import named_device
from trainfit.devices.device_table import Device
from trainfit.steps.step import Step


class ObservingEstimator(ABC):
    """A context manager that works out its figures when it is left; it can be entered again."""

    _refuses_writes = True
    """Whether backward inside of it refuses what was written to, as it does without it."""

    def __init__(self, device: str | Device | None = None) -> None:
        """Prepare; `device` names what the operators would run on, else it is the one that tensors are on."""
        self._device = named_device(device)
        self._mode = COST_MODEL
        self._observation: Observation | None = None

    @classmethod
    def of(
        cls,
        captured: CapturedStep | Callable[[], Step],
        device: str | Device | None = None,
        estimate_mode_type: str = COST_MODEL,
    ) -> Self:
        """Return the estimator of one captured step, or of the step that a function builds."""
        step = captured if isinstance(captured, CapturedStep) else CapturedStep(captured, device)
        estimator = cls(step.target)
        estimator(estimate_mode_type)
        estimator._read(step.seen())
        return estimator

    def __call__(self, estimate_mode_type: str) -> Self:
        """Choose `operator-level-cost-model` (a roofline) or `operator-level-benchmark` (each op is run)."""
        self._mode = check_mode(estimate_mode_type)
        return self

    def __enter__(self) -> Self:
        """Begin anew."""
        self._observation = Observation(self._device, refuses_writes=self._refuses_writes)
        self._observation.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Stop, and work out the figures."""
        assert self._observation is not None
        self._observation.__exit__(kind, error, traceback)
        if error is None:
            self._read(seen_by(self._observation))
        self._observation = None

    @abstractmethod
    def _read(self, seen: Seen) -> None:
        """Take the figures from what was seen."""
