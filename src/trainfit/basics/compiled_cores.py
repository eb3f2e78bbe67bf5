"""The cores that mypyc compiles: some files each, as one module with a digest that says which they were.

`setup.py` compiles them when the package is installed. A compiled core whose digest is not that of the files
here is not used, so that nobody tests or runs what they have changed since. Without it the same source runs
as plain Python, slower.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CompiledCore:
    """Files of one folder that are compiled together."""

    folder: str
    """Of `trainfit`."""
    compiled_name: str
    """The module that comes of it, in the same folder."""
    modules: tuple[str, ...]
    """What is compiled, in the order in which one needs the other; they need nothing else of ours."""
    variable: str
    """Of the environment: `python` chooses plain Python."""

    def source_digest(self, folder: Path) -> str:
        """Return what identifies the core's files as they are in a folder."""
        digest = hashlib.sha256()
        for module in self.modules:
            digest.update((folder / f"{module}.py").read_bytes())
        return digest.hexdigest()

    def joined_source(self, folder: Path) -> str:
        """Return the core's files in a folder as one module; the imports among them are gone."""
        parts = ["from __future__ import annotations\n", f'SOURCE_DIGEST = "{self.source_digest(folder)}"\n']
        among_them = rf"^from trainfit\.{self.folder}\.\w+ import (\([^)]*\)|.*)\n"
        for module in self.modules:
            text = (folder / f"{module}.py").read_text(encoding="utf-8")
            text = re.sub(r"^from __future__ .*\n", "", text, flags=re.MULTILINE)
            parts.append(re.sub(among_them, "", text, flags=re.MULTILINE))
        return "\n\n".join(parts)

    def load(self) -> Any:
        """Return the compiled module if there is one and it was made of these files; None otherwise."""
        if os.environ.get(self.variable) == "python":
            return None
        try:
            module = importlib.import_module(f"trainfit.{self.folder}.{self.compiled_name}")
        except ImportError:
            return None
        digest = self.source_digest(Path(__file__).parent.parent / self.folder)
        return module if digest == module.SOURCE_DIGEST else None


ALLOCATOR = CompiledCore(
    folder="allocator",
    compiled_name="compiled_core",
    modules=(
        "block_pools",
        "stand_in_device",
        "stream_table",
        "allocator_state",
        "expandable_memory",
        "releasing",
        "caching_core",
        "replay_loop",
    ),
    variable="TRAINFIT_ALLOCATOR_CORE",
)
PARTITIONS = CompiledCore(
    folder="compiling",
    compiled_name="compiled_partitions",
    modules=(
        "graph_rows",
        "fused_runs",
        "partition_judge",
        "value_worth",
        "peak_relief",
        "price_network",
        "price_cuts",
    ),
    variable="TRAINFIT_PARTITION_CORE",
)
CORES = (ALLOCATOR, PARTITIONS)
