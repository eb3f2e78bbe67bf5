"""Tests here share the fake machine of the tests of costs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "costs"))
