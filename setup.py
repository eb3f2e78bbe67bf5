"""Compiles the allocator's core with mypyc; where that cannot be done, the same source runs as plain Python.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "trainfit" / "allocator"


def extensions() -> list[Any]:
    """Return the compiled core as an extension that may fail to build, or nothing if mypyc is not there."""
    try:
        from mypyc.build import mypycify

        sys.path.insert(0, str(SOURCES))
        from core_source import COMPILED_NAME, joined_source

        folder = ROOT / "build" / "compiled_allocator"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{COMPILED_NAME}.py"
        file.write_text(joined_source(SOURCES), encoding="utf-8")
        found = mypycify([str(file)], opt_level="3", target_dir=str(folder))
    except (Exception, SystemExit) as reason:  # whatever it is, plain Python does the same, slower
        print(f"the allocator is not compiled: {type(reason).__name__}: {reason}")
        return []
    for extension in found:
        extension.name = f"trainfit.allocator.{extension.name}"
        extension.optional = True
    return found


setup(ext_modules=extensions())
