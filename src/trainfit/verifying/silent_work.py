"""What a call of a silent group returns: whoever waits for it first writes the results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class SilentWork(dist.Work):
    """Exchanged bytes that have to be written to tensors of the step, by a thread of the step."""

    def __init__(
        self,
        finish: Callable[[], int | None],
        is_ready: Callable[[], bool],
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """`finish` waits for other ranks and writes; it may return the rank that something came from."""
        super().__init__()
        self._finish: Callable[[], int | None] | None = finish
        self._is_ready = is_ready
        # Weak: somebody may keep the work for longer than its results, which are the step's own. Until they
        # are written, `finish` keeps them.
        self._outputs = [weakref.ref(output) for output in outputs]
        self._source: int | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other ranks, and write the results."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._source = finish()
        return True

    def synchronize(self) -> None:
        """Wait: there is no device besides."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the results are there; writes them as soon as they can be."""
        if self._finish is not None and self._is_ready():
            self.wait()
        return self._finish is None

    def is_success(self) -> bool:
        """Return whether the results are there: what fails raises."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: what fails raises."""

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the results."""
        outputs = [output for reference in self._outputs if (output := reference()) is not None]
        self.wait()
        return outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a future that has the results."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def source_rank(self) -> int:
        """Return who has sent what was received, by its rank in the group."""
        assert self._source is not None, "nothing was received"
        return self._source

    _source_rank = source_rank
