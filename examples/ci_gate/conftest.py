"""The option that renews the baseline."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-baseline", action="store_true", help="Store what the step needs now.")
