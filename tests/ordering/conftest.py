"""Tests of ordering use the benchmarks' random graphs and torch's functions on them: `order_graphs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
