"""What torch's own partitioner would keep of a joint graph: a choice that ours is never worse than.

It is asked for nothing but the choice; the graph is divided elsewhere. Torch's choice for a fraction of the
memory (`activation_memory_budget`) takes several times as long as the one without.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._functorch import partitioners
from torch.fx import GraphModule, Node

_FAR = 10**9
"""From backward: torch's mark of a node that backward does not need."""


class NoChoice(Exception):
    """Torch's partitioner has failed on the graph; the message says with what."""


def torch_choice(
    module: GraphModule, forward_outputs: int, static_inputs: Sequence[int] = (), fraction: float = 1.0
) -> list[Node]:
    """Return the nodes that torch would keep; nothing if there is no backward, `NoChoice` if it fails."""
    nodes = partitioners.classify_nodes(module, list(static_inputs), forward_outputs)
    if not nodes.required_bw_nodes:
        return []
    for node in reversed(module.graph.nodes):
        if node.op == "output" or nodes.is_required_fw(node):
            nearest = min((user.dist_from_bw + 1 for user in node.users), default=_FAR)
            node.dist_from_bw = _FAR if node.op == "output" else min(nearest, _FAR)
        else:
            node.dist_from_bw = 0
    try:
        return list(partitioners.choose_saved_values_set(module.graph, nodes, fraction))
    except Exception as error:
        # Whatever torch's code raises: compiled without us, the graph would fail with it.
        raise NoChoice(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
