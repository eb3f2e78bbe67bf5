"""A machine whose load is what a test says."""

from __future__ import annotations

from trainfit.timing.load import LoadMeter, ProcessorTimes


class FakeMachine:
    """Has ten processor-seconds between any two looks; others take `share` of them, and we a tenth."""

    def __init__(self, share: float) -> None:
        """Begin with this share; a test may change it."""
        self.share = share
        self._now = ProcessorTimes(1000.0, 400.0, 7.0)

    def read(self) -> ProcessorTimes:
        """Return the counters, ten processor-seconds later than before."""
        now = self._now
        self._now = ProcessorTimes(now.total + 10.0, now.busy + 10.0 * self.share + 1.0, now.own + 1.0)
        return self._now

    def meter(self) -> LoadMeter:
        """Return a meter that looks at this machine, and does not wait."""
        return LoadMeter(self.read, sleep=lambda seconds: None)
