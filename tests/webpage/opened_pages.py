"""Where the browser is, how a test opens a page in it, and where what it looks like is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCREENSHOTS = Path(__file__).parent.parent.parent / "build" / "screenshots"
"""What the tests see, kept to be looked at."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
Open = Callable[..., "Page"]


def kept(page: Page, name: str, **options: Any) -> None:
    """Keep what the page looks like."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", **options)
