"""What operators did when they ran alone, and how that is written down for the next process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import trainfit
from trainfit.basics.decoding import Malformed, decode, encode, parse_json
from trainfit.devices.measured_cache import MeasuredCache, key_of
from trainfit.traces.trace import Signature

_RULE = 1
"""Raise it when operators are run in another way, or with other arguments (`made_up_arguments.py`)."""


@dataclass(frozen=True)
class ResultLayout:
    """How one result lies in memory; results with the same `group` share a storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    group: int


@dataclass(frozen=True)
class Measured:
    """What an operator did when it ran alone: its workspace, and how its new results lie in memory."""

    workspace_bytes: int
    results: tuple[ResultLayout, ...]


def decisive(signature: Signature) -> Signature:
    """Return the part of a signature that decides what a kernel does; the rest follows from it, or is ours.

    The results belong to it: values that are made up for the inputs may depend on the size of a result.
    """
    return Signature(
        signature.name, signature.inputs, signature.outputs, signature.arguments,
        view=False, in_place=False, random=False,
    )  # fmt: skip


def recall(cache: MeasuredCache, operators: Iterable[Signature]) -> dict[Signature, Measured | None]:
    """Return what is known of these operators; None for one that cannot be run alone."""
    keys = {operator: _key(operator) for operator in operators}
    texts = cache.workspaces(keys.values())
    found: dict[Signature, Measured | None] = {}
    for operator, key in keys.items():
        if key in texts:
            with contextlib.suppress(Malformed):  # Somebody has changed the file: it is measured again.
                found[operator] = _decode(texts[key])
    return found


def remember(cache: MeasuredCache, measured: dict[Signature, Measured | None]) -> None:
    """Write down what was measured now."""
    cache.store_workspaces(
        {_key(operator): json.dumps(encode(found)) for operator, found in measured.items()}
    )


def _key(operator: Signature) -> str:
    specs = [
        [(spec.dtype, spec.shape, spec.stride) for spec in some]
        for some in (operator.inputs, operator.outputs)
    ]
    return key_of(trainfit.__version__, _RULE, operator.name, operator.arguments, *specs)


def _decode(text: str) -> Measured | None:
    value = parse_json(text)
    if value is None:
        return None
    found = decode(Measured, value, rows=True)
    for result in found.results:
        if len(result.size) != len(result.stride):
            raise Malformed("a result has as many strides as dimensions")
        if min(*result.size, *result.stride, result.offset, result.storage_bytes, result.group) < 0:
            raise Malformed("sizes are counts")
    if found.workspace_bytes < 0:
        raise Malformed("a workspace is a number of bytes")
    return found
