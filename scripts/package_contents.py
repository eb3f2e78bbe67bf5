"""Look into a wheel: are all files of the package in it, which extras has it, and can they be imported?

python scripts/package_contents.py WHEEL                  every tracked file of src/trainfit is in it
python scripts/package_contents.py WHEEL --extras         the extras that a user may ask for
python scripts/package_contents.py WHEEL --import EXTRA   import what an extra brings, as far as it is here
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

FOR_DEVELOPERS = {"dev", "docs", "benchmarks"}


def metadata(wheel: Path) -> Message:
    """Return the wheel's metadata."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


def check_files(wheel: Path) -> None:
    """Refuse a wheel that lacks a file of the package, data files and `py.typed` among them."""
    root = Path(__file__).parent.parent
    line = ["git", "ls-files", "src/trainfit"]
    tracked = subprocess.run(line, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    missing = [name for name in tracked if name.removeprefix("src/") not in inside]
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size:,} bytes")
    sys.path.insert(0, str(root / "src" / "trainfit" / "basics"))
    from compiled_cores import CORES

    for core in CORES:
        name = re.compile(rf"trainfit/{core.folder}/{core.compiled_name}\..*(so|pyd)$")
        compiled = any(name.search(file) for file in inside)
        said = "compiled" if compiled else "not compiled: it runs as plain Python, slower"
        print(f"the core of {core.folder} is {said}")


def import_extra(wheel: Path, extra: str) -> None:
    """Import every package that an extra names and that is installed."""
    for text in metadata(wheel).get_all("Requires-Dist") or []:
        if f'extra == "{extra}"' not in text.replace("'", '"'):
            continue
        name = re.match(r"[\w.-]+", text)[0]  # type: ignore[index]
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            print(f"{extra}: {name} is not installed here and was not tried")
            continue
        tops = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
        for top in sorted(tops) or [name.replace("-", "_")]:
            importlib.import_module(top)
            print(f"{extra}: {top} {distribution(name).version} can be imported")


def main() -> None:
    """Do what the arguments say."""
    wheel = Path(sys.argv[1])
    if sys.argv[2:] == ["--extras"]:
        print(*sorted(set(metadata(wheel).get_all("Provides-Extra") or []) - FOR_DEVELOPERS))
    elif sys.argv[2:3] == ["--import"]:
        import_extra(wheel, sys.argv[3])
    else:
        check_files(wheel)


if __name__ == "__main__":
    main()
