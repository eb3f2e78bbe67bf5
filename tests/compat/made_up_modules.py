"""Tables of modules with figures of our own, whose parts fit together as those of a real step do."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product

from trainfit.compat.ilp_utils import Graph, ModStats, ModuleInfo, Node, parse_module_info

MIB = 1 << 20


@dataclass
class Part:
    """A module of a made-up model; what a leaf keeps and takes, what a module around leaves is their sum."""

    name: str
    inside: list[Part] = field(default_factory=list)
    parameters: int = 0
    activations: int = 0
    unsaved: int = 0
    """What its ops make and autograd does not keep."""
    milliseconds: float = 0.0
    temporary: int = 0
    lines: tuple[tuple[float, float], ...] = ((0.4, 0.0), (1.6, -0.6))
    """Slope and intercept of the fit, for what is no leaf."""

    def every(self) -> list[Part]:
        """Return the module and all inside, in the order in which they begin."""
        return [self, *(part for inner in self.inside for part in inner.every())]

    def ended(self) -> list[Part]:
        """Return them in the order in which they end."""
        return [part for inner in self.inside for part in inner.ended()] + [self]

    def total(self, what: str) -> float:
        """Return the sum of a figure over the module and all inside."""
        return sum(getattr(part, what) for part in self.every())


def table(root: Part) -> ModuleInfo:
    """Return the statistics as the trackers would give them; sizes are in MiB."""
    ended = root.ended()
    stats = []
    for part in root.every():
        end = ended.index(part)
        later = ended[end + 1 :] if part is not root else []
        stats.append(
            _stats(
                part,
                act_total=sum(one.activations for one in ended[: end + 1]),
                grad_total=sum(one.parameters for one in later),
            )
        )
    begins, ends = [part.name for part in root.every()], [part.name for part in ended]
    return {
        "mod_order": {
            "fw_pre_order": begins,
            "fw_post_order": ends,
            "bw_pre_order": ends[::-1],
            "bw_post_order": begins[::-1],
        },
        "mod_stats": stats,
    }


def _stats(part: Part, act_total: int, grad_total: int) -> ModStats:
    leaf = not part.inside
    activations = int(part.total("activations")) * MIB
    parameters = int(part.total("parameters")) * MIB
    milliseconds = part.total("milliseconds")
    return {
        "fqn": part.name,
        "param_per_module": parameters,
        "grad_per_module": parameters,
        "grad_total": grad_total * MIB,
        "act_fw_per_module": activations,
        "act_bw_per_module": activations,
        "act_grad_per_module": part.temporary * MIB,
        "act_total": act_total * MIB,
        "input_per_module": 0,
        "output_per_module": 0,
        "fw_runtime_per_module": milliseconds,
        "bw_runtime_per_module": 2 * milliseconds,
        "is_leaf": leaf,
        "sac_runtime": 0 if leaf else milliseconds,
        "sac_memory": 0 if leaf else activations + int(part.total("unsaved")) * MIB,
        "n_segments": 0 if leaf else len(part.lines),
        "slopes": [] if leaf else [slope for slope, _ in part.lines],
        "intercepts": [] if leaf else [intercept for _, intercept in part.lines],
        "breakpoints": [] if leaf else [0.0, 0.5, 1.0],
        "tradeoff_curve": OrderedDict(),
    }


def transformer(layers: int = 4) -> Part:
    """Return a model of layers that are alike, each of attention and a feed-forward part.

    The parts by themselves have less to trade than the layer.
    """

    def layer(name: str) -> Part:
        attention = [
            Part(f"{name}.attention.{key}", parameters=2, activations=20, unsaved=6, milliseconds=0.5)
            for key in ("qkv", "out")
        ]
        feed = [
            Part(f"{name}.feed_forward.{key}", parameters=4, activations=40, unsaved=4, milliseconds=0.75)
            for key in ("up", "down")
        ]
        dear = ((1.0, 0.15),)
        return Part(
            name,
            [
                Part(f"{name}.attention", attention, lines=dear),
                Part(f"{name}.feed_forward", feed, lines=dear),
            ],
        )

    blocks = [layer(f"Net.layers.{number}") for number in range(layers)]
    head = Part("Net.output", parameters=30, activations=60, milliseconds=2.0, temporary=60)
    return Part(
        "Net", [Part("Net.embedding", parameters=30, activations=10, milliseconds=0.1), *blocks, head]
    )


def random_model(seed: int) -> Part:
    """Return two or three blocks with one or two parts each, with figures by chance."""
    numbers = random.Random(seed)

    def leaf(name: str) -> Part:
        return Part(
            name,
            parameters=numbers.randint(0, 20),
            activations=numbers.randint(1, 60),
            unsaved=numbers.choice((0, 0, 5, 20)),
            milliseconds=round(numbers.uniform(0.5, 9), 2),
            temporary=numbers.randint(0, 15),
        )

    blocks = []
    for number in range(numbers.randint(2, 3)):
        name = f"Net.{number}"
        inner = [
            Part(f"{name}.{k}", [leaf(f"{name}.{k}.linear"), leaf(f"{name}.{k}.act")], lines=_lines(numbers))
            for k in range(numbers.randint(1, 2))
        ]
        blocks.append(Part(name, [*inner, leaf(f"{name}.norm")], lines=_lines(numbers)))
    return Part("Net", [*blocks, leaf("Net.head")], lines=_lines(numbers))


def _lines(numbers: random.Random) -> tuple[tuple[float, float], ...]:
    """Return one or two rising lines, the second steeper; a fit may exceed 1 at its end."""
    first = round(numbers.uniform(0.1, 1.1), 3)
    if numbers.random() < 0.3:
        return ((first, round(numbers.uniform(-0.05, 0.1), 3)),)
    second, place = round(first + numbers.uniform(0.2, 2), 3), numbers.uniform(0.2, 0.8)
    return ((first, 0.0), (second, round((first - second) * place, 3)))


def graph_of(root: Part) -> Graph:
    return parse_module_info(table(root))


def recompute_milliseconds(node: Node, share: float) -> float:
    lines = zip(node["slopes"], node["intercepts"])
    return node["sac_runtime"] * max(0.0, *(slope * share + intercept for slope, intercept in lines))


def freed_bytes(node: Node, share: float) -> float:
    return node["act_fw_per_module"] - node["sac_memory"] * (1 - share)


def peak_bytes(graph: Graph, decisions: dict[str, float], world_size: int = 1) -> float:
    """Return the peak of decisions by the definition, module by module."""
    peak = 0.0
    for node in graph.nodes:
        states = (graph.nodes[0]["param_per_module"] + node["grad_total"]) / world_size
        others = node["act_total"] + node["act_grad_per_module"]
        before = graph.fw_post_order[: graph.fw_post_order.index(node["fqn"])]
        away = sum(
            freed_bytes(graph.name2node[name], share) for name, share in decisions.items() if name in before
        )
        peak = max(peak, states + others - away)
    return peak


def best_on_a_grid(
    graph: Graph, budget: float, world_size: int, names: Sequence[str], steps: int = 8
) -> float:
    """Return the least milliseconds of every set of modules, none inside another, with shares on a grid."""
    best = float("inf")
    for chosen in chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)):
        if any(inner.startswith(f"{outer}.") for outer in chosen for inner in chosen):
            continue
        nodes = [graph.name2node[name] for name in chosen]
        least = [1 - node["act_fw_per_module"] / node["sac_memory"] for node in nodes]
        grids = [[low + (1 - low) * step / steps for step in range(steps + 1)] for low in least]
        for shares in product(*grids):
            cost = sum(map(recompute_milliseconds, nodes, shares))
            if cost < best and peak_bytes(graph, dict(zip(chosen, shares)), world_size) <= budget + 1:
                best = cost
    return best
