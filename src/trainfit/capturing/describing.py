"""Reads from a step what its target does not say: parameters, dtypes, optimizer, what is on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainfit.basics.units import format_bytes
from trainfit.capturing.modules import class_name
from trainfit.capturing.recorder import OPTIMIZER
from trainfit.capturing.rows import Row
from trainfit.operators.families import list_kind
from trainfit.steps.step import Step
from trainfit.traces.assumptions import Assumption
from trainfit.traces.settings import Settings, dtype_name

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

NO_OPTIMIZER = "none"


def described(settings: Settings, step: Step, session: Session) -> Settings:
    """Complete what the target says about its step with what the step itself shows."""
    parameters = list(step.model.parameters())
    classes = [type(optimizer).__name__ for optimizer in step.optimizers]
    optimizer_class = "+".join(dict.fromkeys(classes)) or None
    batch, seq = step.samples if settings.batch is None else settings.batch, settings.seq
    if seq is None and settings.image_size is None and batch and step.tokens and not step.tokens % batch:
        seq = step.tokens // batch
    return replace(
        settings,
        batch=batch,
        seq=seq,
        dtype=dtype_name(_stored(parameters), sorted(session.recorder.autocast)),
        optimizer=settings.optimizer or optimizer_class or NO_OPTIMIZER,
        optimizer_class=optimizer_class,
        optimizer_kernels=_kernels(session.recorder.rows) if classes else None,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        modules=sum(1 for _ in step.model.modules()),
        model_class=class_name(step.model),
    )


def _stored(parameters: Iterable[nn.Parameter]) -> list[str]:
    """Return the dtypes that parameters are stored in, the one with the most numbers first."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return [name for name, _ in counts.most_common()]


def _kernels(rows: Iterable[Row]) -> str | None:
    """Say by which kernels the optimizer runs (fused, foreach, for-loop); None if it ran none."""
    names = {row.call.operator.name for row in rows if row.phase is OPTIMIZER}
    if not names:
        return None
    kinds = set(map(list_kind, names))
    return next((kind for kind in ("fused", "foreach") if kind in kinds), "for-loop")


def on_the_host(step: Step, session: Session) -> tuple[Assumption, ...]:
    """Warn if a step for a GPU keeps parameters on the host, where they are not counted."""
    lives = {session.ledger.find(parameter) for parameter in step.model.parameters()}
    total = sum(live.storage_bytes for live in lives if live is not None and live.on_host)
    if not total:
        return ()
    text = (
        f"{format_bytes(total)} of the model's parameters are on the host, and are not counted: only what is "
        "on the GPU is."
    )
    return (Assumption("device", text),)


def autocast_dtype(context: torch.autocast) -> str | None:
    """Return the dtype of an autocast block that is switched on, by its name."""
    enabled: bool = context._enabled
    dtype: torch.dtype | None = context.fast_dtype
    return str(dtype).removeprefix("torch.") if enabled and dtype is not None else None
