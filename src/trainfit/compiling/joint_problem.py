"""The joint graph of AOTAutograd as a `RecomputeProblem`.

What depends on the gradients of forward's outputs is backward. Views are computed again for nothing, so that
only what they are views of can be kept; of an operator with several results each result by itself. What must
not run again: random operators, whatever writes to its inputs, effects, collectives, operators of others
(nobody says what those do besides) and what the user's own checkpoints save. What the user's checkpoints
compute again cannot be kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import AOTOutput, InputMutationAOTOutput
from torch._functorch.partitioners import _has_tag_is_backward, _has_tag_must_be_in_backward
from torch.fx import GraphModule, Node
from torch.fx.experimental.sym_node import SymNode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from trainfit.capturing.schemas import describe
from trainfit.compiling.node_costs import NodeCosts, hint, signature_of_node, tensors_in
from trainfit.compiling.recompute_problem import Fusing, ProblemNode, RecomputeProblem, Role
from trainfit.operators.families import ATTENTION
from trainfit.operators.names import OperatorSet
from trainfit.traces.trace import Signature

_REDUCTIONS = OperatorSet.of(
    "sum mean var var_mean std std_mean prod amax amin max min argmax argmin any all logsumexp"
)
"""What the compiler writes as a loop that adds up what it computes on the way."""
_POINTWISE = OperatorSet.of(
    """
    clone _to_copy copy full full_like zeros zeros_like ones ones_like empty empty_like arange scalar_tensor
    index _unsafe_index embedding gather constant_pad_nd slice_scatter select_scatter fill where
    new_full new_zeros new_ones expand_copy native_dropout tril triu
    """
)
"""What it computes where it is read, although torch does not call it pointwise."""
_POINTWISE_OTHERS = (
    "prims.convert_element_type.default",
    "prims.iota.default",
    "prims.inductor_random.default",
    "prims.inductor_lookup_seed.default",
    "prims.inductor_randint.default",
)
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_KNOWN_NAMESPACES = ("aten", "prims", "inductor_prims")
_TOKEN_OPERATORS = ("prims.inductor_seeds.default", "prims.inductor_seed.default")
"""Make seeds out of torch's random state; what is drawn from a seed is always the same."""


class CannotPlan(Exception):
    """The graph has something that is not planned here; the message says what. Torch partitions it."""


def read_joint_graph(
    module: GraphModule, forward_outputs: int, costs: NodeCosts, *, fuses: bool
) -> tuple[RecomputeProblem, tuple[Node, ...]]:
    """Return the problem of a joint graph, and the graph's node for each of its nodes.

    `forward_outputs` is how many of the graph's outputs are forward's; `fuses` whether a compiler that fuses
    pointwise operators makes code of it.
    """
    return _JointReader(module, forward_outputs, costs, fuses).read()


class _JointReader:
    """Goes through the nodes in order."""

    def __init__(self, module: GraphModule, forward_outputs: int, costs: NodeCosts, fuses: bool) -> None:
        self._nodes = [node for node in module.graph.nodes if node.op != "output"]
        self._count = forward_outputs
        self._costs = costs
        self._fuses = fuses
        self._outputs: Sequence[Any] = tree_leaves(
            next(node for node in module.graph.nodes if node.op == "output").args
        )
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self._sizes: list[int] = []
        self._storage: dict[int, int] = {}
        self._held: list[tuple[int, ...]] = []
        self._roles: list[Role] = []
        self._changed = _changed_inputs(module)
        """Inputs that have another value once forward is done, and views of them."""
        self._saved = {
            _behind_view(node)
            for node in self._nodes
            if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
        }
        """What must be kept, if backward needs it. Of a view (of a weight that two checkpoints share, say)
        what it is a view of: the view itself costs nothing."""

    def read(self) -> tuple[RecomputeProblem, tuple[Node, ...]]:
        calls = {node: signature_of_node(node) for node in self._nodes}
        workspaces = self._costs.workspaces_of(calls, fuses=self._fuses)
        nodes = tuple(self._read(node, calls[node], workspaces.get(node, 0)) for node in self._nodes)
        forward = self._numbers(self._outputs[: self._count])
        backward = self._numbers(self._outputs[self._count :])
        return RecomputeProblem(nodes, tuple(self._sizes), forward, backward), tuple(self._nodes)

    def _numbers(self, outputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._number[node] for node in outputs if isinstance(node, Node)))

    def _read(self, node: Node, call: Signature | None, workspace: int) -> ProblemNode:
        role = self._role(node)
        self._roles.append(role)
        reads = tuple(self._number[source] for source in node.all_input_nodes)
        is_view = _is_view(node)
        before = len(self._sizes)
        storages = self._storages(node, reads, is_view)
        self._held.append(storages)
        fresh = self._changed.isdisjoint(node.all_input_nodes)
        if is_view and not fresh:
            self._changed.add(node)
        made = tuple(s for s in storages if s >= before)
        several = isinstance(node.meta.get("val"), tuple | list)
        return ProblemNode(
            name=node.name,
            role=role,
            reads=reads,
            storages=storages,
            makes=made if role in (Role.FORWARD, Role.BACKWARD) else (),
            seconds=0.0 if is_view or role is not Role.FORWARD else self._costs.seconds(call),
            workspace_bytes=workspace,
            repeatable=fresh and _is_repeatable(node) and node not in self._saved,
            keepable=_is_keepable(node, is_view)
            and not several
            and (node in self._saved or not _user_repeats(node)),
            picks=node.target is operator.getitem,
            fusing=self._fusing(node, is_view),
        )

    def _role(self, node: Node) -> Role:
        if node.op == "placeholder":
            return Role.TANGENT if "tangents" in str(node.target) else Role.INPUT
        if node.op == "get_attr":
            return Role.INPUT
        if node.op != "call_function":
            raise CannotPlan(f"it has a node of kind {node.op}")
        after = any(
            self._roles[self._number[source]] in (Role.TANGENT, Role.BACKWARD)
            for source in node.all_input_nodes
        )
        marked = _has_tag_must_be_in_backward(node) or (_has_tag_is_backward(node) and _writes(node))
        return Role.BACKWARD if after or marked else Role.FORWARD

    def _storages(self, node: Node, reads: tuple[int, ...], is_view: bool) -> tuple[int, ...]:
        """Return the numbers of the storages of a result: known ones for views, new ones for the others."""
        found: list[int] = []
        for tensor in tensors_in(node.meta.get("val")):
            if not torch._C._has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            number = self._storage.get(storage._cdata)
            if number is None and is_view and node.target is not operator.getitem and reads:
                number = next(iter(self._held[reads[0]]), None)
            if number is None:
                number = len(self._sizes)
                self._sizes.append(_bytes(storage.nbytes()))
            self._storage[storage._cdata] = number
            found.append(number)
        return tuple(dict.fromkeys(found))

    def _fusing(self, node: Node, is_view: bool) -> Fusing:
        if node.op != "call_function" or is_view or node.target is operator.getitem:
            return Fusing.VIEW
        if not self._fuses or not isinstance(node.target, torch._ops.OpOverload):
            return Fusing.NOTHING
        name = str(node.target)
        if torch.Tag.pointwise in node.target.tags or name in _POINTWISE or name in _POINTWISE_OTHERS:
            return Fusing.POINTWISE
        return Fusing.REDUCTION if name in _REDUCTIONS else Fusing.NOTHING


def _changed_inputs(module: GraphModule) -> set[Node]:
    """Return the inputs that forward changes: by a copy at its end, or through what it returns."""
    found = {
        node.args[0]
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if isinstance(node.args[0], Node)
    }
    output = next(node for node in module.graph.nodes if node.op == "output")
    returned = tree_leaves(output.meta.get("desc", ()), is_leaf=lambda leaf: isinstance(leaf, AOTOutput))
    changed = {desc.mutated_input for desc in returned if isinstance(desc, InputMutationAOTOutput)}
    for node in module.graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") in changed:
            found.add(node)
    return found


def _bytes(size: Any) -> int:
    """Return a size in bytes; of a symbol the largest that was declared, else the one it was traced with."""
    if isinstance(size, int):
        return size
    node: SymNode = size.node
    bounds = node.shape_env.bound_sympy(node.expr) if node.shape_env is not None else None
    upper = None if bounds is None else bounds.upper
    if upper is not None and upper.is_finite and upper < 2**50:
        return int(upper)
    return hint(size)


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # A getitem takes one of several results; everything else of Python's is about sizes.
        return target is operator.getitem
    return describe(target).is_view


def _behind_view(node: Node) -> Node:
    while _is_view(node) and node.target is not operator.getitem and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_keepable(node: Node, is_view: bool) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return True
    if not isinstance(value, torch.Tensor) or not torch._C._has_storage(value):
        return False
    return not is_view or node.target is operator.getitem


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_repeatable(node: Node) -> bool:
    """Whether a node computes the same again and does nothing else."""
    if node.op != "call_function":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)
    if _writes(node) or str(target) in _TOKEN_OPERATORS:
        return False
    # Where the user's own checkpoint has it run again, torch gives it the same random state.
    if _drops_nothing(node):
        return True
    if describe(target).random or describe(target).collective:
        return _user_repeats(node)
    return target.namespace in _KNOWN_NAMESPACES and not node.is_impure()


def _drops_nothing(node: Node) -> bool:
    """Whether it is attention without dropout: torch calls it random all the same."""
    if str(node.target) not in ATTENTION:
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return isinstance(given, int | float) and given == 0.0
    return False


def _user_repeats(node: Node) -> bool:
    return node.meta.get("recompute") in _AGAIN
