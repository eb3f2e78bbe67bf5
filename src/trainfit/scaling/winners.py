"""The best mesh of each size: which of them are confirmed, and what a reader sees of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainfit.report.scale_data import ScaleData, SizeOfCluster
from trainfit.scaling.confirming import Confirmed, confirmed, whole_step
from trainfit.scaling.found_scale import Scale
from trainfit.scaling.mesh_judge import Judged, MeshJudge
from trainfit.scaling.mesh_search import LeftOut
from trainfit.scaling.scale_question import Depth
from trainfit.scaling.scale_rows import compared_sizes, mesh_row, other_rows
from trainfit.traces.settings import Settings, describe, settings_json
from trainfit.traces.trace import Trace

_TRIES = 3
"""How many meshes of one size are captured whole, if what was worked out for them does not hold."""
_AS_FAST = 0.01
"""By what share of its step another mesh may be worked out to be faster than one that is confirmed: what is
worked out is not more exact than that, and a capture of each of several that are alike would say no more."""


@dataclass
class Winners:
    """What is found for each size, and which of it is confirmed."""

    judge: MeshJudge
    seconds_limit: float
    seq: int | None
    tries: int = 0
    """How many meshes were captured whole."""
    _found: dict[int, tuple[list[Judged], list[LeftOut]]] = field(default_factory=dict)
    _confirmed: dict[int, Confirmed] = field(default_factory=dict)
    _derived: dict[int, Judged] = field(default_factory=dict)

    def add(self, ranks: int, judged: list[Judged], left_out: list[LeftOut]) -> None:
        """Remember what was found out about the meshes of a size."""
        self._found[ranks] = (judged, left_out)

    def best(self, ranks: int) -> Judged | None:
        """Return the fastest mesh of a size that fits."""
        fitting = [one for one in self._found[ranks][0] if one.fits]
        fastest = min(fitting, key=lambda one: one.seconds_per_sample, default=None)
        known = self._confirmed.get(ranks)
        if fastest is None or known is None or not known.judged.fits:
            return fastest
        as_fast = known.judged.seconds_per_sample <= (1 + _AS_FAST) * fastest.seconds_per_sample
        return known.judged if as_fast else fastest

    def confirm_those(self, which: str) -> None:
        """Capture winners whole; where one does not hold, the next is tried."""
        if which == "none":
            return
        cheapest = self._cheapest_first()
        for ranks in sorted(cheapest) if which == "all" else cheapest[:1]:
            for _ in range(_TRIES):
                if self._holds(ranks):
                    break

    def expect(self, which: str) -> None:
        """Say which whole model would be captured if nothing better is found any more."""
        for ranks in self._cheapest_first()[:1] if which != "none" else ():
            best = self.best(ranks)
            assert best is not None, "one that fits"
            self.judge.captures.source.rather(whole_step(best))

    def _cheapest_first(self) -> list[int]:
        """Return the sizes of which a mesh fits, the one with the most throughput per GPU first."""
        found = {ranks: self.best(ranks) for ranks in self._found}
        seconds = {
            ranks: best.seconds_per_sample * ranks for ranks, best in found.items() if best is not None
        }
        return sorted(seconds, key=lambda ranks: seconds[ranks])

    def _holds(self, ranks: int) -> bool:
        """Confirm the best mesh of a size as it is now; whether it is still the best that fits."""
        best = self.best(ranks)
        if best is None:
            return True
        known = self._confirmed.get(ranks)
        if known is not None and known.judged is best:
            return True
        judged, judge = self._found[ranks][0], self.judge
        found = confirmed(judge.captures.source, best, judge.allocator, judge.budget, self.seconds_limit)
        judged[judged.index(best)] = found.judged
        self.tries += 1
        self._confirmed[ranks], self._derived[ranks] = found, best
        return self.best(ranks) is found.judged

    def result(
        self, batch: int | None, words: str, dimensions: tuple[str, ...], seconds: dict[str, float]
    ) -> Scale:
        """Return all of it."""
        captures = self.judge.captures
        sizes = compared_sizes([self._size(ranks) for ranks in self._found])
        fitting = [one for one in sizes if one.efficiency is not None]
        traces = captures.first_traces
        settings = whole_settings(traces, captures.depths, self.judge.depth)
        known = {ranks: one for ranks, one in self._confirmed.items() if one.judged is self.best(ranks)}
        data = ScaleData(
            target=traces[0].target,
            device=captures.question.device.name,
            torch=traces[0].torch,
            settings=settings_json(settings),
            description=describe(settings),
            seconds=seconds,
            captures=captures.count + self.tries,
            layers_captured=tuple(depth.layers for depth in captures.depths if depth.layers is not None),
            gpus_per_node=captures.question.cluster.gpus_per_node,
            global_batch=batch,
            global_batch_words=words,
            dimensions=dimensions,
            sizes=sizes,
            frontier=tuple(one.world_size for one in sizes if one.on_frontier),
            most_efficient=max(fitting, key=lambda o: o.efficiency or 0.0).world_size if fitting else None,
            warnings=_once([traces[0].warnings, *(one.warnings for one in known.values())]),
        )
        return Scale(data, {ranks: one.plan for ranks, one in known.items() if one.plan is not None})

    def _size(self, ranks: int) -> SizeOfCluster:
        judged, left_out = self._found[ranks]
        best, flops = self.best(ranks), self.judge.peak_flops
        known, derived = self._confirmed.get(ranks), self._derived.get(ranks)
        holds = known is not None and best is known.judged
        row = None if best is None else mesh_row(best, self.seq, flops, best, confirmed=holds)
        return SizeOfCluster(
            world_size=ranks,
            winner=row,
            others=other_rows(judged, left_out, best, self.seq, flops),
            looked_at=len(judged) + len(left_out),
            efficiency=None,
            on_frontier=False,
            derived_step_seconds=derived.seconds if derived is not None and holds else None,
            derived_memory_bytes=derived.memory_bytes if derived is not None and holds else None,
        )


def whole_settings(traces: Sequence[Trace], depths: Sequence[Depth], depth: int) -> Settings:
    """Return what step it is, with all layers; `traces` are of models with fewer, one of each depth."""
    settings = replace(traces[0].settings, batch=None)
    if len(traces) < 2:
        return settings
    low, high = (one.layers or 0 for one in depths)

    def grown(name: str) -> int:
        first, second = (getattr(trace.settings, name) for trace in traces)
        return int(first + (second - first) * (depth - low) // (high - low))

    model = tuple((key, str(depth) if key == depths[0].setting else text) for key, text in settings.model)
    counts = {name: grown(name) for name in ("parameters", "trainable_parameters", "modules")}
    return replace(settings, model=model, **counts)  # type: ignore[arg-type]


def _once(found: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for texts in found for text in texts))
