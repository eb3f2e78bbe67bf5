"""Random graphs of the shapes that schedulers meet. The same seed gives the same graph everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from trainfit.ordering.graph import Buffer, BufferGraph, Node

SIZES = (1, 2, 4, 8, 16, 32, 64, 100, 256)


class GraphBuilder:
    """Collects nodes one at a time; names are given in order."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.nodes: list[Node] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str] = []
        self._read: set[str] = set()

    def size(self) -> int:
        return self.numbers.choice(SIZES) * self.numbers.randint(1, 4)

    def input(self, size: int) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs.append(name)
        self.buffers[name] = Buffer(name, size, size)
        return name

    def add(self, reads: Sequence[str], size: int | None = None, after: Sequence[str] = ()) -> str:
        """Add a node that reads buffers and makes one; return that buffer."""
        size = self.size() if size is None else size
        return self._node(reads, after, [Buffer(f"buf{len(self.buffers)}", size, size)])

    def mutate(self, target: str, reads: Sequence[str] = ()) -> str:
        """Add a node that changes a buffer in place; return its new name. Earlier readers must run before."""
        earlier = [node.name for node in self.nodes if target in node.reads]
        name = f"buf{len(self.buffers)}"
        return self._node([target, *reads], earlier, [Buffer(name, 0, 0, alias_of=target)])

    def parts(self, reads: Sequence[str], sizes: Sequence[int]) -> list[str]:
        """Add a node with several outputs, and one node for each of them; return the parts."""
        whole = self._node(reads, (), [Buffer(f"buf{len(self.buffers)}", sum(sizes), 0)])
        return [self._node([whole], (), [Buffer(f"buf{len(self.buffers)}", 0, size)]) for size in sizes]

    def finish(self, outputs: Sequence[str] = (), share_of_ends: float = 0.5) -> BufferGraph:
        """Return the graph; besides `outputs`, a share of the buffers without readers are outputs."""
        chosen = set(outputs)
        for name in [name for name in self.inputs if name not in self._read]:
            self.inputs.remove(name)  # torch does not know inputs without readers
            del self.buffers[name]
        for name in self.buffers:
            if name not in self._read and self.numbers.random() < share_of_ends:
                chosen.add(name)
        buffers = tuple(
            Buffer(b.name, b.size_alloc, b.size_free, b.name in chosen, b.alias_of)
            for b in self.buffers.values()
        )
        return BufferGraph(tuple(self.nodes), buffers, tuple(self.inputs))

    def _node(self, reads: Sequence[str], after: Sequence[str], made: Sequence[Buffer]) -> str:
        name = f"op{len(self.nodes)}"
        self.nodes.append(Node(name, tuple(b.name for b in made), tuple(dict.fromkeys(reads)), tuple(after)))
        self.buffers.update((b.name, b) for b in made)
        self._read.update(reads)
        return made[0].name


def anything(seed: int, count: int) -> BufferGraph:
    """Mix everything: inputs, mutations, several outputs, ordering-only edges; exactly `count` nodes."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    available = [build.input(build.size()) for _ in range(numbers.randint(0, 3))]
    density = numbers.choice((0.8, 1.5, 2.5))
    mutated: set[str] = set()
    while len(build.nodes) < count:
        most = max(0, min(len(available), round(numbers.expovariate(1 / density))))
        reads = numbers.sample(available, most)
        room = count - len(build.nodes)
        kind = numbers.random()
        if kind < 0.12 and reads and reads[0] not in mutated and reads[0] not in build.inputs:
            mutated.add(reads[0])
            available.remove(reads[0])
            available.append(build.mutate(reads[0], reads[1:]))
        elif kind < 0.25 and room >= 3:
            available += build.parts(reads, [build.size() for _ in range(numbers.randint(2, room - 1))][:3])
        else:
            earlier = [node.name for node in build.nodes]
            after = numbers.sample(earlier, 1) if earlier and numbers.random() < 0.1 else []
            available.append(build.add(reads, after=after))
    outputs = [name for name in build.buffers if name not in mutated and numbers.random() < 0.1]
    return build.finish(outputs)


def layered(seed: int, count: int) -> BufferGraph:
    """Layers of some width; each node reads some of the layer before, and now and then one further back."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    width = numbers.randint(3, 12)
    layers: list[list[str]] = [[build.add([]) for _ in range(width)]]
    while len(build.nodes) < count:
        layer = []
        for _ in range(min(numbers.randint(2, width), count - len(build.nodes))):
            reads = numbers.sample(layers[-1], min(len(layers[-1]), numbers.randint(1, 3)))
            if numbers.random() < 0.15:
                reads.append(numbers.choice(layers[numbers.randrange(len(layers))]))
            layer.append(build.add(reads))
        layers.append(layer)
    return build.finish()


def series_parallel(seed: int, count: int) -> BufferGraph:
    """Forks and joins inside forks and joins, as blocks of networks are."""
    build = GraphBuilder(seed)

    def compose(source: str, nodes: int) -> str:
        if nodes <= 1:
            return build.add([source])
        if build.numbers.random() < 0.5 or nodes < 4:
            first = build.numbers.randint(1, nodes - 1)
            return compose(compose(source, first), nodes - first)
        branches = build.numbers.randint(2, min(4, nodes - 2))
        share = (nodes - 1) // branches
        ends = [compose(source, share) for _ in range(branches)]
        return build.add(ends)

    end = build.add([])
    while len(build.nodes) < count:
        end = compose(end, min(count - len(build.nodes), build.numbers.randint(8, 40)))
    return build.finish([end])


def wide(seed: int, count: int) -> BufferGraph:
    """Many branches of a few nodes from one source, joined in small groups."""
    build = GraphBuilder(seed)
    source = build.add([])
    ends: list[str] = []
    while len(build.nodes) < count - count // 8:
        end = source
        for _ in range(build.numbers.randint(1, 5)):
            end = build.add([end])
        ends.append(end)
    build.numbers.shuffle(ends)
    while len(build.nodes) < count:
        taken, ends = ends[:6], ends[6:]
        ends.append(build.add(taken or [source], size=build.numbers.randint(1, 16)))
    return build.finish()


def mutations(seed: int, count: int) -> BufferGraph:
    """Layers in which every fourth node changes a buffer in place."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    window = [build.add([]) for _ in range(numbers.randint(3, 8))]
    while len(build.nodes) < count:
        reads = numbers.sample(window, min(len(window), numbers.randint(1, 3)))
        if numbers.random() < 0.25:
            made = build.mutate(reads[0], reads[1:])
            window[window.index(reads[0])] = made
        else:
            window.append(build.add(reads))
            if len(window) > 10:
                window.pop(numbers.randrange(len(window) - 1))
    return build.finish()


def several_outputs(seed: int, count: int) -> BufferGraph:
    """Nodes with two to four outputs of different sizes, read at different times."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    window = [build.add([]) for _ in range(4)]
    while len(build.nodes) < count - 5:
        reads = numbers.sample(window, min(len(window), numbers.randint(1, 3)))
        if numbers.random() < 0.3:
            window += build.parts(reads, [build.size() for _ in range(numbers.randint(2, 4))])
        else:
            window.append(build.add(reads))
        while len(window) > 14:
            window.pop(numbers.randrange(len(window) - 1))
    while len(build.nodes) < count:
        window.append(build.add(numbers.sample(window, 2)))
    return build.finish()


def freeable_inputs(seed: int, count: int) -> BufferGraph:
    """A backward graph: saved activations come in and are released as gradients go from layer to layer."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    gradient = build.input(build.size())
    outputs = []
    while len(build.nodes) < count:
        saved = [build.input(build.size()) for _ in range(numbers.randint(1, 3))]
        inner = build.add([gradient, numbers.choice(saved)])
        outputs.append(build.add([inner, numbers.choice(saved)]))
        side = [build.add([inner, name]) for name in saved if numbers.random() < 0.6]
        gradient = build.add([inner, *side[: numbers.randint(0, len(side))]])
    return build.finish([gradient, *outputs])


def training(seed: int, count: int) -> BufferGraph:
    """A forward and its backward: activations are read again in reverse, weight gradients are outputs."""
    build = GraphBuilder(seed)
    numbers = build.numbers
    layers = max(2, count // 7)
    saved: list[tuple[str, str]] = []
    current = build.add([])
    for _ in range(layers):
        hidden = build.add([current])
        branch = build.add([current]) if numbers.random() < 0.5 else hidden
        following = build.add([hidden, branch])
        saved.append((current, hidden))
        current = following
    gradient = build.add([current], size=1)
    outputs = []
    for before, hidden in reversed(saved):
        inner = build.add([gradient, hidden])
        outputs += [build.add([inner, before]), build.add([gradient, hidden])]
        gradient = build.add([inner, before])
    return build.finish([gradient, *outputs])


SHAPES: dict[str, Callable[[int, int], BufferGraph]] = {
    "layered": layered,
    "series-parallel": series_parallel,
    "wide": wide,
    "mutations": mutations,
    "several outputs": several_outputs,
    "freeable inputs": freeable_inputs,
    "training": training,
    "anything": anything,
}
