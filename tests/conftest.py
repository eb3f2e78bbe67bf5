"""What all tests share: a processor that runs, and a cache of measurements of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trainfit.workspace.processor_faults import REMEDY, announces_amx, dies


def pytest_configure() -> None:
    """Run the tests without AMX where the processor announces it and does not run it, also in workers.

    Before torch's first kernel: it looks only once.
    """
    name, value = REMEDY
    if name not in os.environ and announces_amx() and dies("bfloat16"):
        os.environ[name] = value


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Other processes that tests start have it as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
