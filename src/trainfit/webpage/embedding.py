"""Data, style and scripts inside of one HTML file: nothing in the data can become markup or code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import Any

SCRIPTS = (
    *("formats", "elements", "theme", "tables", "columns", "x_axis", "memory_picture", "memory_panel"),
    *("lanes", "treemap", "trade_off", "bars", "main"),
)
"""The scripts in the order in which they are put together."""
_AS_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def escaped(text: str) -> str:
    """Return text as HTML that shows just this text, in an element or a quoted attribute.

    What cannot be seen but turns text around is isolated by the style (`unicode-bidi`), not removed.
    """
    unprintable = "\N{REPLACEMENT CHARACTER}"
    return html.escape("".join(s if s.isprintable() or s == "\n" else unprintable for s in text), quote=True)


def embedded_json(data: Any) -> str:
    """Return data as JSON that can stand in a `script` element: no sign in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # A lone half of a surrogate pair is no text that a file can hold.
    return text.translate(_AS_ESCAPES).encode("utf-8", "backslashreplace").decode()


@cache
def asset(name: str) -> str:
    """Return a file of the page."""
    return resources.files("trainfit.webpage").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return all scripts as one, whose names nobody else sees."""
    parts = "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def content_policy(*inline: tuple[str, str]) -> str:
    """Return a policy that allows nothing but the given inline texts: pairs of a kind and a text."""
    allowed = {"style": ["style-src"], "script": ["script-src"]}
    for kind, text in inline:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    rules = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    return "; ".join([*rules, *(" ".join(sources) for sources in allowed.values())])
