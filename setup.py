"""Compiles the cores with mypyc; where that cannot be done, the same source runs as plain Python.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "trainfit"


def extensions() -> list[Any]:
    """Return the compiled cores as extensions that may fail to build, or nothing if mypyc is not there."""
    found: list[Any] = []
    try:
        from mypyc.build import mypycify

        sys.path.insert(0, str(SOURCES / "basics"))
        from compiled_cores import CORES

        for core in CORES:
            folder = ROOT / "build" / f"compiled_{core.folder}"
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{core.compiled_name}.py"
            file.write_text(core.joined_source(SOURCES / core.folder), encoding="utf-8")
            for extension in mypycify([str(file)], opt_level="3", target_dir=str(folder)):
                extension.name = f"trainfit.{core.folder}.{extension.name}"
                extension.optional = True
                found.append(extension)
    except (Exception, SystemExit) as reason:  # whatever it is, plain Python does the same, slower
        print(f"not everything is compiled: {type(reason).__name__}: {reason}")
    return found


setup(ext_modules=extensions())
