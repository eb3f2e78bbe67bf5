"""How long the stages of a question take."""

from __future__ import annotations

import time


class Stopwatch:
    """Wall time by stage: what has passed since the last lap belongs to the stage that the next one names."""

    def __init__(self) -> None:
        """Start."""
        self._begin = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage, or add to one that ended before."""
        now = time.perf_counter()
        self._stages[stage] = self._stages.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each stage, and in `total` all until now."""
        return {**self._stages, "total": time.perf_counter() - self._begin}
