"""`KernelWorkspace`: what a kernel allocates inside itself: what is likely, and the most that it may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelWorkspace:
    """Bytes; both are the same where it is known which kernel runs."""

    likely_bytes: int
    most_bytes: int

    def plus(self, known_bytes: int) -> KernelWorkspace:
        """Return the workspace with something more that is surely there."""
        return KernelWorkspace(self.likely_bytes + known_bytes, self.most_bytes + known_bytes)


def most_of(parts: Iterable[KernelWorkspace]) -> KernelWorkspace:
    """Return the workspace of kernels that run one after the other."""
    known = tuple(parts)
    likely = max((part.likely_bytes for part in known), default=0)
    return KernelWorkspace(likely, max((part.most_bytes for part in known), default=0))
