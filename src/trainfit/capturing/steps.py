"""Runs the step until it is steady, and on as long as runs may differ; keeps the run with the largest peak.

The first runs are not like the others: optimizers make their state, caches fill. The runs that count begin
when every optimizer has stepped. If such a run ends with the bytes that it began with, and nothing in Python
that it could decide by has changed, all later runs are like it. Otherwise more runs are looked at.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainfit.basics.doing import counted
from trainfit.basics.units import format_bytes
from trainfit.basics.user_errors import data_ended
from trainfit.capturing.assemble import assemble
from trainfit.capturing.growth import Leftovers, growth_of, leftovers_of
from trainfit.capturing.lbfgs import decides_by_values, history_assumptions
from trainfit.capturing.python_state import PythonState
from trainfit.errors import UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.assumptions import Assumption
from trainfit.traces.step_runs import Steps
from trainfit.traces.trace import Trace

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_MOST_WARM_UPS = 20
_USUAL_RUNS = 12
"""How many runs are looked at where they may differ."""
_MOST_RUNS = 36
"""How many, while memory still grows."""
_LOOKING_SECONDS = 5.0
"""Of this thread's time, for further runs, if their number was not given."""
_MOST_KEPT = 3
_MOST_NAMES = 3
_SETTLED_RUNS = 3
"""Memory that has been the same for this many runs has stopped growing."""

Call = Callable[[Callable[[], Any]], Any]
"""Runs a function of the user, and raises its errors as the user's."""


@dataclass(frozen=True)
class Kept:
    """A run whose trace is kept."""

    number: int
    course: int
    peak_bytes: int
    trace: Trace


class NotSettled(Exception):
    """Results of operators turned out to have other strides or storages: the step has to run again."""


class Runs:
    """All runs of one step in a capture."""

    def __init__(
        self, session: Session, step: Step, target: str, call: Call, settled: Callable[[], bool]
    ) -> None:
        """`settled` says, after a run that may be kept, whether what was recorded still holds."""
        self._session = session
        self._step = step
        self._target = target
        self._call = call
        self._settled = settled
        self._peaks: list[int] = []
        self._kept: list[Kept] = []
        """One run per sequence of ops, the largest peak first."""
        self._courses: set[int] = set()
        self._levels: list[int] = []
        """Bytes alive between runs, from the beginning of the first run that counts."""
        self._leftovers: list[Leftovers] = []
        self._first = 0
        self._changing: tuple[str, ...] = ()
        self._counting: tuple[str, ...] = ()
        """The numbers among what changes in Python."""
        self._wanted: int | None = None
        self._complete = True
        self._idle: list[int] = []
        """Numbers of the runs that count and did nothing at all."""
        self.backward_seen = self.backward_counted = False
        """Whether any run had a backward; whether any of those that count had."""

    def warm_up(self, wanted: int | None) -> None:
        """Run the step until every optimizer has stepped."""
        begin = time.thread_time()
        most = max(_MOST_WARM_UPS, wanted or 0)
        fewest = 2 if self._makes_buckets() else 1
        while len(self._peaks) < most:
            self._run(keep=False)
            in_time = wanted is not None or time.thread_time() - begin < _LOOKING_SECONDS
            if len(self._peaks) >= fewest and (self._all_stepped() or not in_time):
                return
            gc.collect()

    def _makes_buckets(self) -> bool:
        """Whether there is a DistributedDataParallel, which makes its buckets anew in the second run."""
        modules = (module for root in self._session.modules.roots for module in root.modules())
        return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)

    def look(self, wanted: int | None) -> None:
        """Look at the runs that count: as many as wanted, or as it takes."""
        self._wanted = wanted
        self._first = len(self._peaks) + 1
        values = self._session.values
        values.optimizer_lacked_values = bool(values.assumptions) and decides_by_values(self._step.optimizers)
        gc.collect()
        before = self._python_state()
        answers = values.answers
        self._levels.append(self._level())
        self._run(keep=True)
        self._levels.append(self._level())
        after = self._python_state()
        self._changing, self._counting = before.changes_to(after), before.counts_to(after)
        if answers != values.answers:
            self._changing += ("values that the step reads from tensors",)
        del before, after
        begin = time.thread_time()
        while self._wants_more():
            if wanted is None and time.thread_time() - begin > _LOOKING_SECONDS:
                self._complete = False
                break
            self._session.recorder.notes_lines = self._levels[-1] > self._levels[0]
            try:
                self._run(keep=True)
            except UserCodeError as error:
                if error.__cause__ is None or not data_ended(error.__cause__):
                    raise
                # The data has come to its end, as it would in a real run.
                self._complete = False
                break
            self._levels.append(self._level())
        self._session.recorder.notes_lines = False

    def traces(self) -> list[Trace]:
        """Return the traces of the runs with the largest peaks, one per sequence of ops; largest first."""
        growing = growth_of(self._leftovers, self._session.ledger.memory) if self._grows() else ()
        found = []
        for kept in self._kept:
            steps = Steps(
                recorded=kept.number,
                first=self._first,
                peaks=tuple(self._peaks),
                kinds=len(self._courses),
                changing=self._changing,
                complete=self._complete,
                all_stepped=self._all_stepped(),
                grows=growing,
            )
            said = (*sentences_about(steps), *self._about_counters(), *self._about_idle_runs())
            assumptions = kept.trace.assumptions + tuple(Assumption("runs", text) for text in said)
            found.append(replace(kept.trace, steps=steps, assumptions=assumptions))
        return found

    def _python_state(self) -> PythonState:
        ledger = self._session.ledger

        def known_number(tensor: torch.Tensor) -> object:
            live = ledger.find(tensor) if tensor.layout is torch.strided and tensor.numel() == 1 else None
            if live is None or not live.known or live.assumption:
                return None
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                return torch.ops.aten._local_scalar_dense(tensor)

        return PythonState(self._step, known_number)

    def _about_counters(self) -> Iterator[str]:
        """Note that a counter may decide something in a run that was not looked at."""
        said_otherwise = len(self._courses) > 1 or not self._complete or self._grows()
        if self._counting and self._wanted is None and not said_otherwise:
            yield (
                f"{self._looked_at} runs of the step were looked at, and are alike; but "
                f"{_listed(self._counting)} changes from run to run, and may make a later one do more. "
                "--steps says how many to look at."
            )

    def _about_idle_runs(self) -> Iterator[str]:
        if self._idle:
            yield (
                f"the step did nothing in {len(self._idle)} of the first {len(self._peaks)} runs, first in "
                f"run {self._idle[0]}: has its data ended? Those runs do not count."
            )

    def _run(self, *, keep: bool) -> None:
        session = self._session
        # The run before has shown how many there are; it is not said of the first.
        before = len(session.recorder.rows) if self._peaks else 0
        with counted(lambda: len(session.recorder.rows), before, "operators"):
            result = self._call(lambda: session.record_step(self._step))
        with session.ledger.lock:  # what other threads do from here on is not the run's
            self._look_at_recording(keep=keep)
        del result
        if keep:
            with session.ledger.lock:
                self._leftovers.append(leftovers_of(session))

    def _look_at_recording(self, *, keep: bool) -> None:
        session = self._session
        rows = session.recorder.rows
        self.backward_seen = self.backward_seen or session.recorder.backward_seen
        begin = session.recorder.start_bytes
        peak = max((row.live_bytes for row in rows), default=begin)
        self._peaks.append(peak)
        if not keep:
            return
        self.backward_counted = self.backward_counted or session.recorder.backward_seen
        if not rows:
            self._idle.append(len(self._peaks))
            return
        did = [(row.call.operator.name, row.module, row.phase, row.live_bytes - begin) for row in rows]
        course = hash(tuple(did))
        self._courses.add(course)
        worse = [kept for kept in self._kept if kept.course == course and kept.peak_bytes < peak]
        if worse or all(kept.course != course for kept in self._kept):
            if not self._settled():
                raise NotSettled
            trace = assemble(session, self._step, self._target)
            history = history_assumptions(self._step.optimizers)
            trace = replace(trace, assumptions=trace.assumptions + history)
            kept = Kept(len(self._peaks), course, peak, trace)
            others = [other for other in self._kept if other not in worse]
            self._kept = sorted([*others, kept], key=lambda kept: -kept.peak_bytes)[:_MOST_KEPT]

    def _level(self) -> int:
        """Return the bytes alive between two runs, without what only a cycle of references holds."""
        ledger = self._session.ledger
        if self._levels and ledger.live_bytes != self._levels[-1]:
            gc.collect()
        return ledger.live_bytes

    def _all_stepped(self) -> bool:
        for optimizer in self._step.optimizers:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if own and own.isdisjoint(self._session.stepped):
                return False
        return True

    @property
    def _looked_at(self) -> int:
        return len(self._peaks) - self._first + 1

    def _wants_more(self) -> bool:
        if self._wanted is not None:
            return self._looked_at < self._wanted
        if self._looked_at >= _MOST_RUNS:
            return False
        varies = bool(self._changing) or len(self._courses) > 1 or self._levels[1] != self._levels[0]
        return varies and (self._looked_at < _USUAL_RUNS or self._grows() or not self._has_settled())

    def _grows(self) -> bool:
        """Whether memory between runs still grows: its lowest level, so that a period does not count."""
        half = len(self._levels) // 2
        if half == 0 or self._has_settled():
            return False
        return min(self._levels[-half:]) > min(self._levels[-2 * half : -half])

    def _has_settled(self) -> bool:
        """Whether memory has been the same for longer than it ever was before it grew once more."""
        lowest_later = list(accumulate(reversed(self._levels), min))[::-1]
        rises = [n for n in range(1, len(lowest_later)) if lowest_later[n] > lowest_later[n - 1]]
        if not rises:
            return True
        # The first pause may have begun before the runs that count.
        rests = [rises[0] + self._first - 1, *(n - before for before, n in pairwise(rises))]
        return len(self._levels) - rises[-1] > max(_SETTLED_RUNS - 1, *rests)


def sentences_about(steps: Steps) -> Iterator[str]:
    """Note that runs differ, that memory grows, or that not all runs were looked at."""
    if not steps.all_stepped:
        yield (
            f"an optimizer has not stepped in the first {steps.first - 1} runs of the step: the state that "
            "it makes then is not counted. --steps looks at more runs."
        )
    if not steps.complete:
        names = f"; {_listed(steps.changing)} changes from run to run" if steps.changing else ""
        yield (
            f"only {steps.looked_at} runs of the step were looked at{names}: a later one may need more. "
            "--steps says how many to look at."
        )
    early, reported = max(steps.peaks[: steps.first - 1], default=0), steps.peaks[steps.recorded - 1]
    if early > reported:
        yield (
            f"run {steps.peaks.index(early) + 1} of the step, before it is steady, has a peak of "
            f"{format_bytes(early)}: {format_bytes(early - reported)} more than the run that is reported."
        )
    if steps.grows:
        yield _about_growth(steps)


def _about_growth(steps: Steps) -> str:
    parts = []
    for growth in steps.grows[:_MOST_NAMES]:
        where = f" in {growth.module}" if growth.module else ""
        line = f" ({growth.line})" if growth.line else ""
        parts.append(
            f"{format_bytes(growth.bytes_per_step)} of {growth.producer}{where}{line}, held by "
            f"{'autograd, for a result that Python holds' if growth.holder == 'autograd' else 'Python'}"
        )
    more = f" and {len(steps.grows) - _MOST_NAMES} more" if len(steps.grows) > _MOST_NAMES else ""
    names = f" In Python {_listed(steps.changing)} changes." if steps.changing else ""
    return (
        f"memory grows by {format_bytes(steps.growth_bytes)} with every run of the step, and still did after "
        f"{steps.looked_at} runs: {'; '.join(parts)}{more}.{names}"
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(f"`{name}`" if " " not in name else name for name in names[:_MOST_NAMES]) + more
