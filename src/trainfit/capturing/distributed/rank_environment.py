"""The environment variables that torchrun sets for each process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from trainfit.traces.ranks import Cluster

_ADDRESS, _PORT = "127.0.0.1", "29500"
"""Where a process would look for the others; nobody does."""


@contextlib.contextmanager
def rank_variables(cluster: Cluster) -> Iterator[None]:
    """Set what a process of the cluster finds in its environment, and put back what was there."""
    variables = {
        "RANK": str(cluster.rank),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_RANK": str(cluster.local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.local_world_size),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": _PORT,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
