"""The forms in which an operator's name is written, and sets of operators.

Traces, plans and graphs write `aten.add_.Tensor`: namespace, name, overload. What the registry says of
torch's own operators holds for all of their overloads, so it is kept by the name alone (`add_`). Operators of
other namespaces are not in it, whatever they are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

CAST = "aten._to_copy.default"
"""What `tensor.to(dtype)` and autocast call."""


@lru_cache(maxsize=8192)
def aten_name(name: str) -> str:
    """Return the name alone, of an operator of torch's: `aten.add_.Tensor` is `add_`; others as they are."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else name


def is_operator(name: str) -> bool:
    """Whether a trace's op is an operator call; memory made without one has a name of two parts."""
    return name.count(".") >= 2


def functional_name(name: str) -> str:
    """Return the name of the form that makes a new tensor: `add` for `aten.add_.Tensor`."""
    return aten_name(name).removesuffix("_")


@dataclass(frozen=True)
class OperatorSet:
    """Operators of torch's. `in` takes a name as traces write it; iterating yields the names alone."""

    names: frozenset[str]

    @classmethod
    def of(cls, text: str) -> OperatorSet:
        """Return the operators whose names are in a text."""
        return cls(frozenset(text.split()))

    def __contains__(self, name: str) -> bool:
        """Whether an operator such as `aten.add_.Tensor` is one of them."""
        return aten_name(name) in self.names

    def __or__(self, other: OperatorSet) -> OperatorSet:
        """Return the operators of both."""
        return OperatorSet(self.names | other.names)

    def __iter__(self) -> Iterator[str]:
        """Yield the names without namespace and overload."""
        return iter(self.names)
