"""What all tests share: a cache of measurements of their own, whatever this machine remembers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Other processes that tests start have it as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
