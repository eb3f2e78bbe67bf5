"""What all tests share: a processor that runs, measurements of their own, nothing left replaced."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from slow_tests import is_slow
from trainfit.workspace.processor_faults import REMEDY, announces_amx, dies


def pytest_configure() -> None:
    """Run the tests without AMX where the processor announces it and does not run it, also in workers.

    Before torch's first kernel: it looks only once.
    """
    name, value = REMEDY
    if name not in os.environ and announces_amx() and dies("bfloat16"):
        os.environ[name] = value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `scripts/test --slow` what takes long and has a quicker test of its kind beside it."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Other processes that tests start have it as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _nothing_stays_replaced() -> Iterator[None]:
    """A function that stays replaced makes later tests fail, far from the one that is to blame."""
    yield
    replacing = sys.modules.get("trainfit.capturing.replacing")
    assert replacing is None or replacing._installed == []
    assert {function.__module__ for function in (os.remove, shutil.rmtree)} == {"posix", "shutil"}
