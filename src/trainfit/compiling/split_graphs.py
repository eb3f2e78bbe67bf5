"""A joint graph divided as a partition says: the graphs of forward and backward that torch compiles.

The division itself, the order of what both graphs take and return, and the random states of what the user's
checkpoints compute again are torch's own functions: AOTAutograd relies on how they do it. Which values cross
is ours, and so is the order of backward's nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.graph_compile import is_opaque_node
from torch._functorch._aot_autograd.utils import _is_bwd_seed_offset, _is_primal
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from trainfit.compiling.backward_orders import quick_order
from trainfit.compiling.joint_problem import CannotPlan
from trainfit.compiling.recompute_problem import Partition, RecomputeProblem, Role
from trainfit.order_fronts.fx import buffer_graph, in_order
from trainfit.ordering.best_order import best_order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.ordering_problem import OrderingProblem, peak_of, problem_of
from trainfit.ordering.tighten import tighten

WITH_STATES = (
    torch.ops.higher_order.run_and_save_rng_state,
    torch.ops.higher_order.run_with_rng_state,
)
"""How torch computes random operators of the user's checkpoints again: their states are kept."""
_NEAR = 1.001
"""A peak so near to what no order is below is good enough."""


def prepared(module: GraphModule, forward_outputs: int) -> GraphModule:
    """Return the joint graph without what is computed twice or for nobody, its tags as torch reads them.

    What only backward needs, but could be computed in forward, is moved to where forward would compute it.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    module.recompile()
    if partitioners.has_recomputable_ops(module):
        module = partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    partitioners.force_save_bw_mutation_src(module)
    for node in module.graph.find_nodes(op="placeholder"):
        if partitioners._is_backward_state(node) or _is_bwd_seed_offset(node):
            raise CannotPlan(f"it takes {node.name!r}, a state of backward or of random numbers")
        if is_opaque_node(node):
            raise CannotPlan(f"it takes {node.name!r}, which is no tensor")
    _move_up(module.graph, forward_outputs)
    return module


@contextlib.contextmanager
def as_while_traced(module: GraphModule) -> Iterator[None]:
    """Let torch find the graph's fake tensors, as it does while it compiles the graph.

    Its partitioner looks for them where it gives states to random operators of the user's checkpoints.
    """
    if detect_fake_mode() is not None:
        yield
        return
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(detect_fake_mode(values))):
        yield


def _move_up(graph: Graph, forward_outputs: int) -> None:
    """Move what neither forward returns nor a gradient decides right behind what it reads."""
    output = next(node for node in graph.nodes if node.op == "output")
    needed: set[Node] = set()
    pending = [node for node in tree_leaves(output.args)[:forward_outputs] if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    after = {node for node in inputs if "tangents" in str(node.target)}
    place: dict[Node, tuple[int, int]] = {}
    tails: dict[int, Node] = {}
    for number, node in enumerate(list(graph.nodes)):
        place[node] = (number, 0)
        if node in after or any(source in after for source in node.all_input_nodes):
            after.add(node)
            continue
        if node.op != "call_function" or node in needed or not inputs or node.is_impure():
            continue
        latest = max((*node.all_input_nodes, inputs[-1]), key=place.__getitem__)
        group = place[latest][0]
        tails.get(group, latest).append(node)
        tails[group] = node
        place[node] = (group, number + 1)


def split(
    module: GraphModule,
    partition: Partition,
    problem: RecomputeProblem,
    nodes: Sequence[Node],
    *,
    forward_outputs: int,
    static_inputs: Sequence[int] = (),
) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward as the partition says."""
    again = set(partition.repeated)
    read = {n for number in (*problem.backward_nodes, *again) for n in problem.nodes[number].reads}
    read |= set(problem.backward_outputs)
    inputs = [n for n in sorted(read) if problem.nodes[n].role is Role.INPUT and nodes[n].op == "placeholder"]
    crossing = [nodes[n] for n in sorted({*inputs, *partition.kept})]
    symbols = [node for node in crossing if isinstance(node.meta.get("val"), torch.SymInt)]
    tensors = [node for node in crossing if node not in set(symbols)]
    primals = [node for node in nodes if _is_primal(node)]
    static = [node for place, node in enumerate(primals) if place in set(static_inputs)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        tensors,
        saved_sym_nodes=symbols,
        saved_opaque_nodes=[],
        num_fwd_outputs=forward_outputs,
        static_lifetime_input_nodes=OrderedSet(static),
    )
    if partitioners.has_recomputable_ops(module) and partitioners.has_recomputable_rng_ops(module):
        with as_while_traced(module):
            forward, backward = partitioners.functionalize_rng_ops(module, forward, backward, len(symbols))
        for part in (forward, backward):
            _say_results(part, module)
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    return (
        partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
        partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
    )


def _say_results(part: GraphModule, joint: GraphModule) -> None:
    """Say of operators that are given a random state what they return: torch says it of what is picked only.

    All of it is allocated, and is there while the operator still has what it reads.
    """
    known = {
        (node.target, str(node.args)): node.meta["val"] for node in joint.graph.nodes if "val" in node.meta
    }
    for node in part.graph.nodes:
        if node.target is torch.ops.higher_order.run_with_rng_state:
            node.meta.setdefault("val", known.get((node.args[1], str(node.args[2:]))))
        elif node.target is torch.ops.higher_order.run_and_save_rng_state:
            state = next(iter(user.meta["val"] for user in node.users if user.args[1] == 0), None)
            node.meta.setdefault("val", (state, known.get((node.args[0], str(node.args[1:])))))


def given_away(backward: GraphModule) -> list[str]:
    """Return the placeholders of backward that nobody else has: values kept for it alone."""
    found = []
    for node in backward.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if isinstance(node.meta.get("val"), torch.Tensor) and not name.startswith(("primals", "tangents")):
            found.append(node.name)
    return found


def results_of(module: GraphModule) -> list[object]:
    """Return what a graph returns, in order."""
    return tree_leaves(next(node for node in module.graph.nodes if node.op == "output").args)


def names_in_backward(forward: GraphModule, backward: GraphModule, forward_outputs: int) -> list[str]:
    """Return what backward calls each thing that forward hands to it, in the order in which it does.

    They have one name in both graphs, but for random states, which are handed on in their order.
    """
    taken = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    leaves = results_of(forward)[forward_outputs:]
    names = [leaf.name if isinstance(leaf, Node) else "" for leaf in leaves]
    others = (name for name in taken if name not in set(names) and "tangents" not in name)
    return [name if name in set(taken) else next(others, "") for name in names]


def graph_peak(
    module: GraphModule, freeable: Sequence[str] = (), workspaces: Mapping[str, int] | None = None
) -> int:
    """Return the most bytes alive above the inputs when the graph runs node by node.

    `workspaces` are bytes that kernels need inside, by the node's name.
    """
    counted = _counted(module, buffer_graph(module, freeable), workspaces or {})
    return peak_of(counted, range(counted.count))


def _counted(module: GraphModule, graph: BufferGraph, workspaces: Mapping[str, int]) -> OrderingProblem:
    called = {node.name: node for node in module.graph.nodes}
    problem = problem_of(graph)
    inside = (node_workspace(called[node.name], workspaces) for node in graph.nodes)
    return replace(problem, rise=[rise + extra for rise, extra in zip(problem.rise, inside)])


def node_workspace(node: Node, workspaces: Mapping[str, int]) -> int:
    """Return what a node's kernel needs inside, also that of an operator that is given a random state."""
    if node.target in WITH_STATES:
        run = [value for value in node.args if isinstance(value, torch._ops.OpOverload)]
        # Whoever is given a state puts back the one that was there.
        given = node.target is torch.ops.higher_order.run_with_rng_state
        own = torch.get_rng_state().nbytes if given else 0
        return own + sum(workspaces.get(str(operator), 0) for operator in run)
    return workspaces.get(node.name, 0)


def with_better_order(backward: GraphModule, workspaces: Mapping[str, int]) -> tuple[GraphModule, int]:
    """Return backward in a better order, where there is one that lowers its peak; and its peak."""
    freeable = given_away(backward)
    graph = buffer_graph(backward, freeable)
    counted = _counted(backward, graph, workspaces)
    before = peak_of(counted, range(counted.count))
    steps, peak, bound = quick_order(counted)
    if peak > _NEAR * bound:
        others = best_order(graph).steps
        steps, peak = min((steps, peak), tighten(counted, others), key=lambda found: found[1])
    if peak >= before:
        return backward, before
    # All results of an operator live until the last of them is taken: they are taken at once.
    better = raise_getitems(in_order(backward, [graph.nodes[step].name for step in steps]))
    after = graph_peak(better, freeable, workspaces)
    return (better, after) if after < before else (backward, before)
