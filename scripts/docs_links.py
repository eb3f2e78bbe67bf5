"""A hook of mkdocs: links from the pages to files of the repository lead to copies of them in the site.

On GitHub `../examples/lora.py` is a file beside `docs`. The site has such files under `source/`, so that it
is whole by itself; what they link to comes along. A link to a file that does not exist is left as it is, and
the strict build refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")


def place_in_repository(uri: str) -> str:
    """Return where the page of this address of the site is in the repository."""
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def place_in_site(path: str) -> str:
    """Return the address in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def linked(path: str) -> dict[str, str]:
    """Return the links of a page of the repository, and the files of the repository that they lead to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {
        link: posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in LINK.findall(text)
    }
    return {link: target for link, target in found.items() if (ROOT / target).is_file()}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of `docs` that pages link to, and those that these link to."""
    waiting = [place_in_repository(file.src_uri) for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        for path in linked(waiting.pop()).values():
            if path not in known and not path.startswith("docs/"):
                known.add(path)
                files.append(File.generated(config, place_in_site(path), abs_src_path=str(ROOT / path)))
                waiting += [path] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """Make links of a page lead to where the files are in the site."""
    uri = page.file.src_uri
    there = linked(place_in_repository(uri))

    def moved(link: re.Match[str]) -> str:
        path = there.get(link[1])
        return link[1] if path is None else posixpath.relpath(place_in_site(path), posixpath.dirname(uri))

    return LINK.sub(moved, markdown)
