"""Tables as PyTorch's tools print them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], tabular: bool) -> None:
    """Print rows in columns; `tabular`: as a table of the package tabulate."""
    if tabular:
        print(tabulated()(list(rows), headers=headers, tablefmt="rst"))
        return
    table = [headers, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("\t".join(f"{cell:<{width}}" for cell, width in zip(row, widths)))


def tabulated() -> Callable[..., str]:
    """Return the function of the package tabulate, which only tables need."""
    try:
        found: Callable[..., str] = importlib.import_module("tabulate").tabulate
    except ImportError as error:
        raise ImportError("tables need the package tabulate: pip install tabulate.") from error
    return found
