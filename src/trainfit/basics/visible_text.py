"""Text of other people's making as it is shown: every sign of it seen, no longer than there is room for."""

from __future__ import annotations

_HALF = 2


def visible(text: str) -> str:
    r"""Return text in which what cannot be seen is written out: a mark that turns text around as `\u202e`.

    Such signs would steer a terminal, or make a name look like another one. Line ends stay.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else _written(sign) for sign in text)


def _written(sign: str) -> str:
    code = ord(sign)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def shortened(text: str, longest: int) -> str:
    """Return at most so many signs of a text: its beginning and its end, where names differ."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // _HALF
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def short_operator(name: str) -> str:
    """Return an operator's name as people say it: `mm` for `aten.mm.default`."""
    return name.removeprefix("aten.").removesuffix(".default")
