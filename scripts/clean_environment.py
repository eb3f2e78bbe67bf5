"""Make an environment with a wheel and what it declares that it needs, and nothing else.

    python scripts/clean_environment.py WHEEL FOLDER [EXTRA ...]

Downloading torch again would take minutes and hundreds of megabytes. So the packages are links to those of
the environment that runs this: exactly the ones that follow from the wheel's own requirements, so that a
package which is imported and not declared is missed. What an extra needs and is not installed here is
printed. The wheel itself is installed by pip.
"""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def requirements_of_wheel(wheel: Path) -> list[str]:
    """Return the requirements in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []


def closure(requirements: list[str], extras: set[str]) -> tuple[dict[str, Distribution], list[str]]:
    """Return the installed packages that follow from requirements, and the names of those not here."""
    found: dict[str, Distribution] = {}
    missing: list[str] = []
    waiting = [(text, frozenset(extras)) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        text, asked = waiting.pop()
        if (text, asked) in seen:
            continue
        seen.add((text, asked))
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            continue
        try:
            package = distribution(wanted.name)
        except PackageNotFoundError:
            missing.append(wanted.name)
            continue
        found[wanted.name.lower()] = package
        waiting += [(inner, frozenset(wanted.extras)) for inner in package.requires or ()]
    return found, missing


def link(package: Distribution, site: Path) -> None:
    """Link the files of an installed package into another environment."""
    for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
        origin, place = Path(str(package.locate_file(top))), site / top
        if origin.exists() and not place.exists():
            place.symlink_to(origin.resolve())


def main() -> None:
    """Make the environment."""
    wheel, folder, extras = Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:])
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )
    packages, missing = closure(requirements_of_wheel(wheel), extras)
    for package in packages.values():
        link(package, site)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    print(f"{wheel.name} and {len(packages)} packages that it declares, in {folder}")
    if missing:
        print(f"declared, but not installed here and so not tried: {', '.join(sorted(set(missing)))}")


if __name__ == "__main__":
    main()
