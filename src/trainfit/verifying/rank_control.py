"""What the processes of a verification tell each other besides the step's own exchanges, over a store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainfit.errors import StepError
from trainfit.traces.ranks import Cluster

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECONDS = 1800.0
"""How long one process waits for another: a prediction may take minutes."""
_POLL_SECONDS = 0.02
_verifications = 0


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that torchrun, or something like it, has started."""
    return all(environment.get(name) for name in _NEEDED) and all(
        environment[name].isdigit() for name in ("RANK", "WORLD_SIZE")
    )


@dataclass
class RankControl:
    """This process among all of them; every rank has to ask the same questions in the same order."""

    cluster: Cluster
    store: Any
    seconds: float = _SECONDS
    _asked: int = field(default=0, init=False)

    @classmethod
    def from_environment(cls) -> Self:
        """Find the others, by what torchrun says."""
        global _verifications
        _verifications += 1
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
        cluster = Cluster(world_size=size, rank=rank, gpus_per_node=per_node)
        cluster.check()
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=_SECONDS)))
        return cls(cluster, PrefixStore(f"trainfit/{_verifications}", store))

    def gathered(self, value: Any) -> list[Any]:
        """Return what every rank says here, as JSON can say it, in the order of the ranks."""
        self._asked += 1
        ranks = range(self.cluster.world_size)
        self.store.set(f"{self._asked}/{self.cluster.rank}", json.dumps(value))
        return [json.loads(self._get(f"{self._asked}/{rank}")) for rank in ranks]

    def any(self, here: bool) -> bool:
        """Return whether something is so on any rank."""
        return any(self.gathered(bool(here)))

    def all(self, here: bool) -> bool:
        """Return whether something is so on every rank."""
        return all(self.gathered(bool(here)))

    def leave(self) -> None:
        """End the conversation: the first rank, which may keep the store, waits for the others to go."""
        self.store.set(f"left/{self.cluster.rank}", "yes")
        if self.cluster.rank == 0:
            for rank in range(self.cluster.world_size):
                self._get(f"left/{rank}")

    def failed(self, message: str) -> None:
        """Tell the others that this rank cannot go on."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with the first rank
            self.store.set("failed", json.dumps([self.cluster.rank, message]))

    def failure(self, seconds: float = 0.0) -> str | None:
        """Return what another rank has failed with, if one tells within some seconds."""
        end = time.monotonic() + seconds
        while True:
            if self.store.check(["failed"]):
                rank, message = json.loads(self.store.get("failed"))
                return None if rank == self.cluster.rank else f"rank {rank} has failed: {message}"
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_SECONDS)

    def _get(self, key: str) -> Any:
        end = time.monotonic() + self.seconds
        while not self.store.check([key]):
            if (failure := self.failure()) is not None:
                raise StepError(failure)
            if time.monotonic() > end:
                raise StepError(f"another rank has not answered for {self.seconds:.0f} seconds.")
            time.sleep(_POLL_SECONDS)
        return self.store.get(key)
