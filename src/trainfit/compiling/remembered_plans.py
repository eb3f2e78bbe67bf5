"""What was planned for graphs whose compiled code torch's cache keeps: that knows the code, and not the plan.

If compiled code is found again, no partitioner is called. What it would have said is read from a file beside
what was measured on this machine, under what decides a plan: the identity of the partitioner, and the graph.
Without that file the graph is compiled anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import FileKind, canonical, write_whole
from trainfit.compiling.compile_plan import PlannedGraph
from trainfit.devices.measured_cache import default_path, key_of
from trainfit.errors import FileFormatError

FILE = FileKind("planned-graph", schema=1, remedy="it is made again when the model is compiled")


@dataclass(frozen=True)
class RememberedGraph:
    """What a partitioner said of one graph."""

    graph: PlannedGraph
    standing_bytes: int
    """What is there all the time, as it is known since."""


def key_of_graph(identity: object, gm: GraphModule, inputs: Sequence[Any]) -> str:
    """Return what a graph is remembered by: what it computes, of which inputs, and who divides it."""
    shapes = [
        (str(value.dtype), [str(n) for n in value.shape], str(value.device), value.requires_grad)
        if isinstance(value, torch.Tensor)
        else str(value)
        for value in inputs
    ]
    return key_of(repr(identity), torch.__version__, gm.code, shapes)


def has_gradients(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph of Dynamo's will have a backward, and so a partition."""
    given = (*gm.parameters(), *(value for value in inputs if isinstance(value, torch.Tensor)))
    return torch.is_grad_enabled() and any(value.requires_grad for value in given)


def remember(key: str, found: RememberedGraph) -> None:
    """Write down what was planned; if that cannot be done, the graph is planned again next time."""
    content = json.loads(json.dumps(dataclasses.asdict(found)))
    document = {**FILE.head(canonical(content)), FILE.name: content}
    try:
        _path(key).parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(key), json.dumps(document).encode())
    except (OSError, FileFormatError):
        return


def recalled(key: str) -> RememberedGraph | None:
    """Return what was planned in an earlier process; None if that is not known."""
    if not os.path.exists(_path(key)):
        return None
    try:
        return decode(RememberedGraph, FILE.read(_path(key)))
    except (FileFormatError, Malformed):
        return None


def note_refusal(identity: object) -> None:
    """Write down that not all of a plan was carried out, so that its compiled code is not used again."""
    try:
        path = _path(f"refused-{key_of(repr(identity))}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return


def was_refused(identity: object) -> bool:
    """Whether not all of a plan was carried out before."""
    return os.path.exists(_path(f"refused-{key_of(repr(identity))}"))


def _path(key: str) -> Path:
    return default_path().parent / "compiled" / f"{key}.json"
