"""The allocator's core as one module, for mypyc: the same source, with a digest that says which one it was.

`setup.py` compiles it when the package is installed. A compiled core whose digest is not that of the files
here is not used, so that nobody tests or runs what they have changed since.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

COMPILED_NAME = "compiled_core"
MODULES = (
    "block_pools",
    "stand_in_device",
    "stream_table",
    "allocator_state",
    "expandable_memory",
    "releasing",
    "caching_core",
    "replay_loop",
)
"""What is compiled, in the order in which one needs the other."""


def source_digest(folder: Path) -> str:
    """Return what identifies the files of the core as they are."""
    digest = hashlib.sha256()
    for module in MODULES:
        digest.update((folder / f"{module}.py").read_bytes())
    return digest.hexdigest()


def joined_source(folder: Path) -> str:
    """Return the files of the core as one module; the imports among them are gone."""
    parts = ["from __future__ import annotations\n", f'SOURCE_DIGEST = "{source_digest(folder)}"\n']
    for module in MODULES:
        text = (folder / f"{module}.py").read_text(encoding="utf-8")
        text = re.sub(r"^from __future__ .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^from trainfit\.allocator\.\w+ import (\([^)]*\)|.*)\n", "", text, flags=re.MULTILINE)
        parts.append(text)
    return "\n\n".join(parts)
