"""How people name the allocator's options: `default`, `expandable`, torch's own text, or a file with it.

`none` counts the bytes that are asked for, as if memory were never cut up.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.conf_strings import parse_conf
from trainfit.errors import OptionError

DEFAULT_OPTIONS = AllocatorOptions()
_NAMED: dict[str, AllocatorOptions | None] = {
    "default": DEFAULT_OPTIONS,
    "expandable": AllocatorOptions(expandable_segments=True),
    "none": None,
}


def named_options(setting: str | AllocatorOptions | None) -> AllocatorOptions | None:
    """Return the options that are meant; None for no allocator at all; `OptionError` if nothing is."""
    if setting is None or isinstance(setting, AllocatorOptions):
        return setting
    if not isinstance(setting, str):
        raise OptionError(
            f"allocator is a text such as 'expandable' or an AllocatorOptions, got {setting!r:.80}."
        )
    text = setting.strip()
    if text.lower() in _NAMED:
        return _NAMED[text.lower()]
    if os.path.isfile(text):
        return _read(Path(text))
    if ":" not in text:
        raise OptionError(
            f"--allocator {setting}: there is no such file. Write {', '.join(_NAMED)}, a text such as "
            "expandable_segments:True,max_split_size_mb:512, or the name of a file with one."
        )
    return parse_conf(text)


def _read(path: Path) -> AllocatorOptions:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"--allocator {path} cannot be read: {reason}.") from None
    # As a shell has it: PYTORCH_ALLOC_CONF=..., with or without `export`.
    return parse_conf(text.strip().rpartition("=")[2].strip().strip("\"'"))
