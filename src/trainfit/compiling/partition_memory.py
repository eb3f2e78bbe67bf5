"""What a choice of kept values costs: what runs again, in which order, and the bytes alive at every step.

Backward runs its own nodes in the order of the graph. What is computed again runs just before its first need,
once. A storage is alive from the node that makes it to the last that reads it; what is kept, returned or the
caller's stays.

A pointwise result that only fused kernels near it read is no memory: whoever reads it reads what it was
computed from. Near means that no kernel of its own (`Fusing.NOTHING`) runs between the first and the last
reader, and that it reads few tensors itself: else the compiler writes it to memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set

from trainfit.compiling.recompute_problem import Fusing, Partition, RecomputeProblem, Role

_MOST_FUSED_READS = 4
"""A pointwise result that several kernels read and that reads more tensors is written to memory."""
FUSED_SHARE = 0.05
"""Of the seconds of a pointwise node, where it is computed inside of other kernels."""


def partition_of(problem: RecomputeProblem, chosen: Collection[int]) -> Partition | None:
    """Return what keeping these nodes means; None if something is needed that cannot run again.

    Nodes that nobody needs in backward are not kept, even if they are among the chosen.
    """
    found = needed_again(problem, chosen)
    if found is None:
        return None
    kept, repeated = found
    nodes = problem.nodes
    running = _forward_nodes(problem, kept)
    outputs = problem.output_storages
    keeping = {storage for n in kept for storage in nodes[n].storages} - problem.input_storages
    kept_bytes = sum(problem.sizes[storage] for storage in keeping)
    forward = _GraphRun(problem, running, (*problem.forward_outputs, *kept))
    forward_peak = forward.peak(set(), outputs | keeping)
    order = backward_order(problem, repeated)
    tangents = {s for node in problem.nodes if node.role is Role.TANGENT for s in node.storages}
    backward = _GraphRun(problem, order, problem.backward_outputs)
    returned = {storage for n in problem.backward_outputs for storage in nodes[n].storages}
    # The caller has what forward returned while backward runs.
    backward_peak = backward.peak(keeping | tangents | outputs, returned | tangents | outputs)
    seconds = sum(nodes[n].seconds * (FUSED_SHARE if n in backward.fused else 1.0) for n in repeated)
    return Partition(
        tuple(sorted(kept)),
        tuple(sorted(repeated)),
        tuple(order),
        seconds,
        kept_bytes,
        sum(problem.sizes[storage] for storage in keeping | outputs),
        forward_peak,
        backward_peak,
    )


def needed_again(problem: RecomputeProblem, chosen: Collection[int]) -> tuple[set[int], set[int]] | None:
    """Return which of the chosen nodes backward reads, and which others it has to run again."""
    kept: set[int] = set()
    repeated: set[int] = set()
    pending = list(problem.wanted)
    while pending:
        number = pending.pop()
        node = problem.nodes[number]
        if node.role is not Role.FORWARD or number in kept or number in repeated:
            continue
        if number in chosen and node.keepable:
            kept.add(number)
        elif node.repeatable:
            repeated.add(number)
            pending += node.reads
        else:
            return None
    return kept, repeated


def backward_order(problem: RecomputeProblem, repeated: Collection[int]) -> list[int]:
    """Return what backward runs: each node computed again just before the first that needs it."""
    waiting = set(repeated)
    order: list[int] = []
    outputs = [n for n in problem.backward_outputs if n in waiting]
    for number in (*problem.backward_nodes, *outputs):
        missing: set[int] = set()
        reads = (number,) if number in waiting else problem.nodes[number].reads
        pending = [read for read in reads if read in waiting]
        while pending:
            read = pending.pop()
            if read not in missing:
                missing.add(read)
                pending += [n for n in problem.nodes[read].reads if n in waiting]
        order += sorted(missing)
        waiting -= missing
        if problem.nodes[number].role is Role.BACKWARD:
            order.append(number)
    return order


def _forward_nodes(problem: RecomputeProblem, kept: Iterable[int]) -> list[int]:
    """Return what forward runs, in order: what its outputs and the kept values need."""
    found: set[int] = set()
    pending = [*problem.forward_outputs, *kept]
    while pending:
        number = pending.pop()
        if number not in found and problem.nodes[number].role is Role.FORWARD:
            found.add(number)
            pending += problem.nodes[number].reads
    return sorted(found)


class _GraphRun:
    """Nodes that run in an order, as one graph: which of them are fused into others, and the memory."""

    def __init__(self, problem: RecomputeProblem, order: Sequence[int], results: Iterable[int]) -> None:
        self._problem = problem
        self._order = order
        self._results = set(results)
        self._place = {number: place for place, number in enumerate(order)}
        self.fused = self._fused() if any(n.fusing is Fusing.POINTWISE for n in problem.nodes) else set()
        self._sources: dict[int, tuple[int, ...]] = {}
        """For each fused node, and each view of one, the storages that are read instead of its own."""

    def peak(self, alive: Set[int], staying: Set[int]) -> int:
        """Return the most bytes alive: `alive` are storages that are there before, `staying` never go."""
        problem = self._problem
        sizes = problem.sizes
        touched = self._touched()
        last: dict[int, int] = {}
        for place, storages in enumerate(touched):
            last.update(dict.fromkeys(storages, place))
        ending: list[list[int]] = [[] for _ in self._order]
        for storage, place in last.items():
            if storage not in staying and storage not in problem.input_storages:
                ending[place].append(storage)
        here = set(alive)
        memory = sum(sizes[storage] for storage in here)
        most = memory
        for place, number in enumerate(self._order):
            node = problem.nodes[number]
            if number not in self.fused:
                for storage in node.makes:
                    if storage not in here:
                        here.add(storage)
                        memory += sizes[storage]
            most = max(most, memory + node.workspace_bytes)
            for storage in ending[place]:
                if storage in here:
                    here.remove(storage)
                    memory -= sizes[storage]
        return most

    def _touched(self) -> list[list[int]]:
        """Return for each place the storages that must be there while its node runs."""
        nodes = self._problem.nodes
        found: list[list[int]] = []
        for number in self._order:
            node = nodes[number]
            read = node.storages if node.picks else [s for r in node.reads for s in self._read(r)]
            if number in self.fused:
                # It is computed by those that read it, and so are views of it.
                self._sources[number] = tuple(dict.fromkeys(read))
                found.append([])
            elif node.fusing is Fusing.VIEW and any(r in self._sources for r in node.reads):
                self._sources[number] = tuple(dict.fromkeys(read))
                found.append([])
            else:
                found.append([*read, *node.storages, *node.makes])
        return found

    def _read(self, number: int) -> tuple[int, ...]:
        return self._sources.get(number, self._problem.nodes[number].storages)

    def _fused(self) -> set[int]:
        """Return the pointwise nodes that are computed inside of the kernels that read them."""
        nodes, users = self._problem.nodes, self._problem.users
        kernels = [0]
        for number in self._order:
            kernels.append(kernels[-1] + (nodes[number].fusing is Fusing.NOTHING))
        fused: set[int] = set()
        # For each node that may be read inside of kernels: the first and the last place of such kernels.
        inside: dict[int, tuple[int, int]] = {}
        for place in range(len(self._order) - 1, -1, -1):
            number = self._order[place]
            node = nodes[number]
            if node.fusing not in (Fusing.POINTWISE, Fusing.VIEW) or number in self._results:
                continue
            places: list[int] = []
            for user in users[number]:
                at = self._place.get(user)
                if at is None:
                    continue
                kind = nodes[user].fusing
                if kind is Fusing.NOTHING or (kind is Fusing.VIEW and user not in inside):
                    places = []
                    break
                places += inside[user] if kind is Fusing.VIEW or user in fused else (at,)
            if not places:
                continue
            first, last = min(places), max(places)
            if kernels[first] != kernels[last]:
                continue
            many = len(set(places)) > 1 and len(set(node.reads)) > _MOST_FUSED_READS
            if node.fusing is Fusing.POINTWISE and not many:
                fused.add(number)
                inside[number] = first, last
            elif node.fusing is Fusing.VIEW:
                inside[number] = first, last
        return fused
