"""The forms in which an operator's name is written.

Traces, plans and graphs write `aten.add_.Tensor`: namespace, name, overload. The registry is kept by the name
alone (`add_`), because what it says holds for all overloads.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=8192)
def base_name(name: str) -> str:
    """Return the name without namespace and overload: `aten.add_.Tensor` is `add_`."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name


def namespace(name: str) -> str:
    """Return who defines the operator: `aten.add_.Tensor` is of `aten`; empty for what is no operator."""
    parts = name.split(".")
    return parts[0] if len(parts) == 3 else ""
