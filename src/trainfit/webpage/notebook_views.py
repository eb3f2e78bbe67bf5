"""What a notebook shows of a result: the first screen and the memory picture, without any script.

Notebooks keep scripts from running where nobody trusts them; this is whole without. Its style names only what
is inside of it, and takes the colours of text and background from the notebook.
"""

from __future__ import annotations

from typing import Any

from trainfit.webpage.embedding import asset, escaped
from trainfit.webpage.first_screen import first_screen_html
from trainfit.webpage.page import answer, limit_of, timeline_of
from trainfit.webpage.saved_report import data_of
from trainfit.webpage.static_picture import static_picture


def notebook_html(result: Any) -> str:
    """Return what a notebook shows of a result."""
    data = data_of(result)
    timeline = timeline_of(result)
    screen = first_screen_html(answer(data, timeline), level=3)
    picture = "" if timeline is None else static_picture(timeline, limit_of(data))
    if picture:
        steps = "Memory over the step, op by op; the line is what there is (predicted)"
        picture = f'<figure><figcaption class="tf-settings">{escaped(steps)}</figcaption>{picture}</figure>'
    return f'<div class="tf-notebook"><style>{asset("notebook.css")}</style>{screen}{picture}</div>'
