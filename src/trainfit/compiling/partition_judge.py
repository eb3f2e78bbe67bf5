"""What a choice of kept values costs: what runs again, where in backward, and the most bytes alive.

The rules are those of `partition_memory.py`. This is part of the compiled core: a search asks it for
thousands of choices.
"""

from __future__ import annotations

from trainfit.compiling.fused_runs import fused_peak, fused_run, kept_last
from trainfit.compiling.graph_rows import NEVER, GraphRows

FUSED_SHARE = 0.05
"""Of the seconds of a pointwise node, where it is computed inside of other kernels."""


class Judgement:
    """One choice: what is kept and runs again, in order, and what comes of it."""

    def __init__(self, kept: list[int], repeated: list[int], order: list[int]) -> None:
        """Begin with what runs."""
        self.kept = kept
        self.repeated = repeated
        self.order = order
        self.seconds = 0.0
        self.kept_bytes = 0
        self.held_bytes = 0
        self.forward_bytes = 0
        self.backward_bytes = 0
        self.running: list[int] = []
        """What forward runs, in order."""
        self.forward_place = 0
        """Where forward needs most; not known where nodes are fused."""
        self.backward_place = 0


class PartitionJudge:
    """Answers for one problem what choices need."""

    def __init__(self, rows: GraphRows) -> None:
        """Take what does not depend on the choice."""
        self.rows = rows
        self._backwards = rows.useful[::-1]
        is_useful = [False] * rows.count
        for number in rows.useful:
            is_useful[number] = True
        self._useful_reads = [[r for r in reads if is_useful[r]] for reads in rows.reads]
        self._own = [False] * rows.count
        for number in rows.backward:
            self._own[number] = True
        self._nobody = [False] * len(rows.sizes)
        self._base = [False] * rows.count
        """Whether forward runs a node for what it returns."""
        self._mark_forward(rows.forward_results, self._base)
        self._base_order = [n for n in range(rows.count) if self._base[n]]
        self._kept_callers = [c or o for c, o in zip(rows.callers, rows.outputs)]
        self._kept_staying = [c or s for c, s in zip(rows.callers, rows.staying)]
        self._peak_place = 0
        self._given_bytes = 0
        self._output_bytes = 0
        for storage in range(len(rows.sizes)):
            if rows.given[storage]:
                self._given_bytes += rows.sizes[storage]
            if rows.outputs[storage]:
                self._output_bytes += rows.sizes[storage]

    def needed(self, chosen: list[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Return what is kept, what runs again, and for each node before which place; the last nodes first.

        None if something is needed that cannot run again.
        """
        rows = self.rows
        repeatable, keepable, useful_reads = rows.repeatable, rows.keepable, self._useful_reads
        chose = [False] * rows.count
        for number in chosen:
            chose[number] = True
        # Whoever reads a node has a higher number, so that it is known by then when it is needed.
        when = rows.first.copy()
        never = NEVER
        kept: list[int] = []
        repeated: list[int] = []
        for number in self._backwards:
            at = when[number]
            if at == never:
                continue
            if chose[number] and keepable[number]:
                kept.append(number)
            elif repeatable[number]:
                repeated.append(number)
                for read in useful_reads[number]:
                    if at < when[read]:
                        when[read] = at
            else:
                return None
        return kept, repeated, when

    def judge(self, chosen: list[int]) -> Judgement | None:
        """Return what keeping these nodes means; None if something is needed that cannot run again."""
        rows = self.rows
        found = self.needed(chosen)
        if found is None:
            return None
        kept, repeated, when = found
        order = self._order(repeated, when)
        kept.reverse()
        repeated.reverse()
        result = Judgement(kept, repeated, order)
        sizes, callers, outputs = rows.sizes, rows.callers, rows.outputs
        there = rows.given.copy()
        held = self._kept_callers.copy()
        kept_bytes = shared = given = 0
        keeping: list[int] = []
        mine = self._nobody.copy()
        for number in kept:
            for storage in rows.storages[number]:
                if callers[storage] or mine[storage]:
                    continue
                mine[storage] = True
                keeping.append(storage)
                kept_bytes += sizes[storage]
                if outputs[storage]:
                    shared += sizes[storage]
                if there[storage]:
                    given += sizes[storage]
        for storage in keeping:
            there[storage] = held[storage] = True
        result.kept_bytes = kept_bytes
        result.held_bytes = kept_bytes + self._output_bytes - shared
        begin = kept_bytes + self._given_bytes - given
        running, runs = self._forward(kept)
        if rows.fuses:
            self._judge_fused(result, running, held, there, begin)
            return result
        total = 0.0
        for number in repeated:
            total += rows.seconds[number]
        result.seconds = total
        result.running = running
        result.forward_bytes = self._peak(running, runs, self._nobody, held, 0)
        result.forward_place = self._peak_place
        runs = self._own.copy()
        for number in repeated:
            runs[number] = True
        result.backward_bytes = self._peak(order, runs, there, self._kept_staying, begin)
        result.backward_place = self._peak_place
        return result

    def _order(self, repeated: list[int], when: list[int]) -> list[int]:
        """Return what backward runs: each node computed again just before the first that needs it."""
        rows = self.rows
        waiting = [-1] * rows.places
        following = [-1] * rows.count
        # From the last to the first, so that those of one place are in order.
        for number in repeated:
            place = when[number]
            following[number] = waiting[place]
            waiting[place] = number
        order: list[int] = []
        own, count = rows.backward, len(rows.backward)
        for place in range(rows.places):
            number = waiting[place]
            while number >= 0:
                order.append(number)
                number = following[number]
            if place < count:
                order.append(own[place])
        return order

    def _mark_forward(self, results: list[int], found: list[bool]) -> None:
        """Mark what forward runs for these results."""
        forward, reads = self.rows.forward, self.rows.reads
        pending = results.copy()
        while pending:
            number = pending.pop()
            if not found[number] and forward[number]:
                found[number] = True
                pending.extend(reads[number])

    def _forward(self, kept: list[int]) -> tuple[list[int], list[bool]]:
        """Return what forward runs for what is kept, in order, and whether it runs a node."""
        base = self._base
        more = [number for number in kept if not base[number]]
        if not more:
            return self._base_order, base
        runs = base.copy()
        self._mark_forward(more, runs)
        return [n for n in range(self.rows.count) if runs[n]], runs

    def _peak(
        self, order: list[int], runs: list[bool], there: list[bool], staying: list[bool], begin: int
    ) -> int:
        """Return the most bytes alive, where `begin` bytes are `there` before, and `staying` never go.

        Goes from the end to the beginning: where a storage is met first, it is touched last.
        """
        rows = self.rows
        sizes, workspaces, touches = rows.sizes, rows.workspaces, rows.touches
        makes, maker = rows.makes, rows.maker
        seen = self._nobody.copy()
        # Compared with the end, where that is not known yet.
        alive = most = 0
        self._peak_place = 0
        for place in range(len(order) - 1, -1, -1):
            number = order[place]
            for storage in touches[number]:
                if not seen[storage]:
                    seen[storage] = True
                    if not staying[storage]:
                        by = maker[storage]
                        if there[storage] or (by >= 0 and runs[by]):
                            alive += sizes[storage]
            here = alive + workspaces[number]
            for storage in makes[number]:
                # A node with several results makes all of them anew, even those that are there.
                if there[storage]:
                    here += sizes[storage]
                else:
                    alive -= sizes[storage]
            if here > most:
                most = here
                self._peak_place = place
        return max(begin, begin - alive + most)

    def _judge_fused(
        self, result: Judgement, running: list[int], held: list[bool], there: list[bool], begin: int
    ) -> None:
        """Say what a choice needs where pointwise nodes are computed inside of others."""
        rows = self.rows
        stays = [False] * rows.count
        for number in rows.forward_results:
            stays[number] = True
        for number in result.kept:
            stays[number] = True
        running = kept_last(rows, running, result.kept)
        run = fused_run(rows, running, stays)
        result.forward_bytes = fused_peak(rows, running, run, self._nobody, held, 0)
        stays = [False] * rows.count
        for number in rows.backward_results:
            stays[number] = True
        run = fused_run(rows, result.order, stays)
        result.backward_bytes = fused_peak(rows, result.order, run, there, self._kept_staying, begin)
        total = 0.0
        for number in result.repeated:
            total += rows.seconds[number] * (FUSED_SHARE if run.fused[number] else 1.0)
        result.seconds = total
