"""Data, style and scripts inside of one HTML file: nothing in the data can become markup or code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import Any

from trainfit.basics.visible_text import visible

SCRIPTS = (
    *("formats", "elements", "theme", "tables", "columns", "x_axis", "memory_picture", "memory_panel"),
    *("lanes", "treemap", "trade_off", "bars", "main"),
)
"""The scripts in the order in which they are put together."""
_NUMBERS = {int, float, bool, type(None)}
_AS_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


def escaped(text: str) -> str:
    """Return text as HTML that shows just this text, in an element or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def embedded_json(data: Any) -> str:
    """Return data as JSON that can stand in a `script` element: no sign in it can end the element.

    Texts are as they are shown, with signs that cannot be seen written out.
    """
    text = json.dumps(_shown(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate(_AS_ESCAPES)


def _shown(data: Any) -> Any:
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, dict):
        return {name: _shown(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        # Most columns are long and have only numbers, in which nothing is to be written out.
        return data if set(map(type, data)) <= _NUMBERS else [_shown(one) for one in data]
    return data


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
