"""Finds the machine whose load a test chooses, which the tests of costs have."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "costs"))
