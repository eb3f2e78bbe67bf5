"""The values of a joint graph's forward by what computes them: module, operator, and which of its calls.

Dynamo writes into every node which modules it was called in, and AOTAutograd hands that on. Views and sizes
have no names: the former are never kept, the latter always. Attention has one name, whichever of
torch's kernels computes it: that depends on the device.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from trainfit.compiling.node_costs import hint, tensors_in
from trainfit.compiling.recompute_problem import Fusing, RecomputeProblem, Role
from trainfit.operators.families import ATTENTION
from trainfit.plans.compiled_plan import ValueName

_ATTENTION_NAME = "attention"
_ROOT = re.compile(r"^L\[(['\"])\w+\1\]")
"""What Dynamo calls the module that is compiled: `L['self']`, and what comes after it is the name below."""
_ACCESS = re.compile(r"\._modules\[(['\"])(.*?)\1\]|\[(['\"]?)(\w+)\3\]")
"""Other ways in which it writes that a module is inside of another."""


@dataclass(frozen=True)
class GraphValues:
    """The named values of one graph."""

    names: dict[int, ValueName]
    """By the number of the node in its problem; those that may be kept, and their operators."""
    operators: tuple[tuple[str, str], ...]
    """Module and operator of everything that is computed in forward, in order."""
    shapes: tuple[str, ...]
    """Of the results of each."""

    @cached_property
    def numbers(self) -> dict[ValueName, int]:
        """The nodes by name."""
        return {name: number for number, name in self.names.items()}

    @cached_property
    def operators_hash(self) -> str:
        """What is computed, whatever the sizes."""
        return _hash(f"{module} {called}" for module, called in self.operators)

    @cached_property
    def shapes_hash(self) -> str:
        """The same with the sizes."""
        pairs = zip(self.operators, self.shapes)
        return _hash(f"{module} {called} {shape}" for (module, called), shape in pairs)


def named_values(problem: RecomputeProblem, nodes: Sequence[Node]) -> GraphValues:
    """Return the values of a graph's forward by name; `nodes` are those of the problem."""
    names: dict[int, ValueName] = {}
    operators: list[tuple[str, str]] = []
    shapes: list[str] = []
    counted: Counter[tuple[str, str]] = Counter()
    for number, (entry, node) in enumerate(zip(problem.nodes, nodes)):
        if entry.role is not Role.FORWARD or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if node.target is operator.getitem:
            parent = names.get(entry.reads[0]) if entry.reads else None
            if parent is not None:
                place = node.args[1]
                result = place if isinstance(place, int) else 0
                names[number] = ValueName(parent.module, parent.operator, parent.number, result)
        elif entry.fusing is not Fusing.VIEW or isinstance(node.meta.get("val"), tuple | list):
            # Of several views that an operator returns each can be kept.
            called = (module_of(node), _operator(node))
            names[number] = ValueName(*called, counted[called])
            counted[called] += 1
            operators.append(called)
            shapes.append(_shapes(node.meta.get("val")))
    return GraphValues(names, tuple(operators), tuple(shapes))


def module_of(node: Node) -> str:
    """Return the innermost module that a node was called in, by its name below the compiled one."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    inner = _ROOT.sub("", path)
    return _ACCESS.sub(lambda found: "." + (found[2] or found[4]), inner).lstrip(".")


def _operator(node: Node) -> str:
    name = str(node.target)
    return _ATTENTION_NAME if name in ATTENTION else name


def _shapes(value: Any) -> str:
    return ";".join(f"{tensor.dtype}{[hint(size) for size in tensor.shape]}" for tensor in tensors_in(value))


def _hash(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
