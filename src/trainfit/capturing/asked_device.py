"""What a step asks about the GPU that it runs on, for whoever wants to use its trace on another one.

A step that asks for the name or the memory of its GPU may do something else on another; one that asks for the
compute capability may do so on another architecture. `Gpu` notes it here while somebody listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Question = Literal["device", "architecture"]
_asked: ContextVar[set[Question] | None] = ContextVar("asked_about_the_gpu", default=None)


@contextmanager
def questions_asked() -> Iterator[set[Question]]:
    """Yield a set that gets what is asked inside."""
    found: set[Question] = set()
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def note_question(question: Question) -> None:
    """Remember that the step has asked."""
    found = _asked.get()
    if found is not None:
        found.add(question)
