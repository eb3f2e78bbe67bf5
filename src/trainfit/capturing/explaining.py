"""Errors that a step raises only because it is captured: they are ours, and say so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trainfit.capturing.values import user_line_of
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


def explained(session: Session, error: BaseException) -> CaptureError | None:
    """Return what to say instead of an error that a real run would not raise; None if it would."""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return CaptureError(
            f"{user_line_of(error)} asks for values that only a real run has ({error}); "
            "capture cannot follow it."
        )
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | os.PathLike):
        path = os.path.abspath(error.filename)
        if path in session.disk.files:
            return CaptureError(session.disk.refusal(path, user_line_of(error)))
    return None
