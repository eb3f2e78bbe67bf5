"""What each storage is (a parameter, a gradient, an activation): by who holds it, or else who made it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainfit.capturing.ledger import Ledger, LiveStorage
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.recorder import FORWARD, Recorder
from trainfit.capturing.rows import Row
from trainfit.steps.step import Step
from trainfit.traces import trace as t

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


class Recording(Protocol):
    """Where a run was recorded: in the session of a capture, or in an observation."""

    @property
    def device(self) -> str:
        """The kind of device that it is for."""

    @property
    def ledger(self) -> Ledger:
        """Every storage."""

    @property
    def recorder(self) -> Recorder:
        """What happened to them."""

    @property
    def modules(self) -> ModuleTable:
        """The modules that were called."""


def categories_now(session: Session, step: Step) -> dict[int, str]:
    """Return what the storages of a step's models and optimizers are at this moment."""
    return known_categories(session, (*step.optimizers, *session.optimizers.values()))


def lives_of(recording: Recording, tensors: Iterable[torch.Tensor]) -> Iterator[LiveStorage]:
    """Yield the storages of tensors."""
    parts = (part for tensor in tensors for part in strided_parts(tensor))
    return (live for live in map(recording.ledger.find, parts) if live is not None)


def known_categories(recording: Recording, optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
    """Return what the storages of models and optimizers are at this moment, by id of their entry."""
    labels: dict[int, str] = {}

    def label(tensors: Iterable[Any], category: str) -> None:
        for live in lives_of(recording, tensors):
            labels.setdefault(id(live), category)

    for root in recording.modules.roots:
        label(root.parameters(), "parameter")
        label(root.buffers(), "buffer")
        label((p.grad for p in root.parameters() if p.grad is not None), "gradient")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            label(group["params"], "parameter")
        for state in optimizer.state.values():
            label(_tensors(state), "optimizer_state")
    return labels


_MAY_BE_AWAY = ("parameter", "optimizer_state")


def with_visitors(labels: dict[int, str], rows: list[Row]) -> dict[int, str]:
    """Add new memory that what is kept on the host is copied to: it is on the device what that is there."""
    found: dict[int, str] = {}
    for number, row in enumerate(rows):
        if row.call.operator.name != "aten.copy_.default" or len(row.reads) != 2:
            continue
        target, source = row.reads
        is_away = source.nbytes == 0 < source.storage_bytes and labels.get(id(source)) in _MAY_BE_AWAY
        if is_away and 0 <= target.producer_op == number - 1 and id(target) not in labels:
            found[id(target)] = labels[id(source)]
    return labels | found


def category_by_origin(live: LiveStorage, rows: list[Row]) -> str:
    """Return what a storage is that belongs to no model and no optimizer."""
    if live.gradient_since is not None or live.was_gradient:
        return "gradient"
    # Saved for backward, it is an activation like any other: a gathered sequence, for instance.
    if live.exchanged and not live.saved:
        return "communication"
    if live.producer_op < 0:
        return "input"
    # What a functional collective returns is a result like any other: of a layer, or of backward.
    row = rows[live.producer_op]
    return "activation" if row.phase == FORWARD or row.recompute else "temporary"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def with_gathered(trace: t.Trace, session: Session) -> t.Trace:
    """Say which storages parameters are gathered into, for the module of each parameter."""
    # It loads FSDP.
    from trainfit.capturing.distributed.sharded_units import gathered_parameters, sharded_units

    found: dict[int, set[int]] = {}
    units: set[int] = set()
    for root in session.modules.roots:
        units.update(map(session.modules.index, sharded_units(root)))
        for module, tensor in gathered_parameters(root):
            lives = lives_of(session, (tensor,))
            found.setdefault(session.modules.index(module), set()).update(live.index for live in lives)
    taken = {storage for module in trace.modules for storage in module.parameters}
    gathered = {number for numbers in found.values() for number in numbers} - taken - {-1}
    storages = list(trace.storages)
    for number in gathered:
        storages[number] = replace(storages[number], category="parameter", gathered=True)
    modules = tuple(
        replace(module, gathered=tuple(sorted(found.get(number, set()) & gathered)), unit=number in units)
        for number, module in enumerate(trace.modules)
    )
    return replace(trace, storages=tuple(storages), modules=modules)
