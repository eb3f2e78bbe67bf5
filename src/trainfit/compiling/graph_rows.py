"""A `RecomputeProblem` as lists of numbers, all that judging a choice needs; part of the compiled core."""

from __future__ import annotations

NEVER = 2**40
"""A place behind all places."""
NOTHING, VIEW, POINTWISE, REDUCTION = 0, 1, 2, 3
"""What a compiler that fuses makes of a node, as numbers."""


class GraphRows:
    """One entry for each node, or for each storage."""

    def __init__(
        self,
        reads: list[list[int]],
        forward: list[bool],
        repeatable: list[bool],
        keepable: list[bool],
        seconds: list[float],
        workspaces: list[int],
        kinds: list[int],
    ) -> None:
        """Take what is said of each node: which others it reads, each once, whether it is forward."""
        self.count = len(reads)
        self.reads = reads
        self.forward = forward
        self.repeatable = repeatable
        self.keepable = keepable
        self.seconds = seconds
        self.workspaces = workspaces
        self.kinds = kinds
        self.fuses = POINTWISE in kinds
        self.users: list[list[int]] = [[] for _ in range(self.count)]
        for number in range(self.count):
            for read in reads[number]:
                self.users[read].append(number)
        self.picks = [False] * self.count
        """Whether a node only takes one of several results of what it reads."""
        self.storages: list[list[int]] = []
        self.makes: list[list[int]] = []
        self.touches: list[list[int]] = []
        """The storages of what a node reads and makes."""
        self.sizes: list[int] = []
        self.maker: list[int] = []
        """The node that allocates each storage; -1: nobody here."""
        self.own_bytes: list[int] = []
        """For each node the bytes of its result's storages that are not the caller's."""
        self.callers: list[bool] = []
        """Whether a storage is the caller's."""
        self.outputs: list[bool] = []
        """Whether forward returns it, and it is not the caller's."""
        self.given: list[bool] = []
        """Whether it is there when backward begins, whatever is kept."""
        self.staying: list[bool] = []
        """Whether it stays until the end of backward."""
        self.backward: list[int] = []
        """Backward's own nodes, in order."""
        self.useful: list[int] = []
        self.first: list[int] = []
        """For each node the first place in backward that reads it itself, or `NEVER`."""
        self.places = 0
        """How many places there are: backward's own nodes and its outputs."""
        self.forward_results: list[int] = []
        self.backward_results: list[int] = []

    def set_storages(
        self,
        sizes: list[int],
        storages: list[list[int]],
        makes: list[list[int]],
        touches: list[list[int]],
        callers: list[bool],
    ) -> None:
        """Take which storages there are, and which the nodes have, make and touch."""
        self.sizes, self.callers = sizes, callers
        self.storages, self.makes, self.touches = storages, makes, touches
        self.maker = [-1] * len(sizes)
        for number in range(self.count):
            for storage in makes[number]:
                self.maker[storage] = number
            total = 0
            for storage in storages[number]:
                if not callers[storage]:
                    total += sizes[storage]
            self.own_bytes.append(total)

    def set_results(self, forward: list[int], backward: list[int], tangents: list[int]) -> None:
        """Take what forward and backward return, and which nodes are gradients from outside."""
        self.forward_results, self.backward_results = forward, backward
        count = len(self.sizes)
        self.outputs = [False] * count
        for number in forward:
            for storage in self.storages[number]:
                self.outputs[storage] = not self.callers[storage]
        self.given = self.outputs.copy()
        for number in tangents:
            for storage in self.storages[number]:
                self.given[storage] = True
        self.staying = self.given.copy()
        for number in backward:
            for storage in self.storages[number]:
                self.staying[storage] = True

    def set_backward(self, nodes: list[int], useful: list[int]) -> None:
        """Take backward's own nodes and the forward nodes that it may need, both in order."""
        self.backward, self.useful = nodes, useful
        self.first = [NEVER] * self.count
        for place in range(len(self.backward_results) - 1, -1, -1):
            number = self.backward_results[place]
            self.first[number] = len(nodes) + place
        for place in range(len(nodes) - 1, -1, -1):
            for read in self.reads[nodes[place]]:
                self.first[read] = place
        self.places = len(nodes) + len(self.backward_results)
