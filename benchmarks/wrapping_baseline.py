"""PyTorch's proposed `fsdp_ilp`, in a formulation of our own: which modules to wrap under a budget.

It decides about nothing but which modules are units of FSDP: here each block is one, or its parts are, or it
belongs to the root. Figures of modules are added up: a gather is hidden behind what the unit before computes,
in backward together with the reduction of the one after it, and what is not hidden is exposed. Memory is that
of the step as it is, with the parameters of the root whole and those of two neighbours. Of all choices (three
to the power of the blocks) the one with the least exposed communication is returned, as the program would.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

from torch import nn

from trainfit.api.request import Request
from trainfit.costs.schedule import schedule
from trainfit.models.parallel.unit_grain import Grain, units_among, units_are
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

Wrapping = Literal["root", "block", "parts"]
KINDS: tuple[Wrapping, ...] = ("root", "block", "parts")


@dataclass(frozen=True)
class UnitFigures:
    """What fsdp_ilp knows of a module."""

    gather: float = 0.0
    reduce: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    whole_bytes: int = 0


def chosen_wrapping(request: Request, budget_bytes: int) -> tuple[Wrapping, ...] | None:
    """Return what each block should be; None if no choice fits without checkpoints."""
    found: dict[Grain, dict[str, UnitFigures]] = {}
    peak_bytes = 0
    for grain in ("blocks", "parts"):
        with units_are(grain):
            trace = request.trace()
        found[grain] = _figures(request, trace)
        if grain == "blocks":
            peak_bytes = simulate(trace).peak_bytes
    root, *blocks = found["blocks"]
    own = found["blocks"]
    parts = {
        b: [f for name, f in found["parts"].items() if name.startswith(f"{b}.") or name == b] for b in blocks
    }
    largest = sorted((own[b].whole_bytes for b in blocks), reverse=True)[:2]
    rest = peak_bytes - own[root].whole_bytes - sum(largest)
    best: tuple[float, tuple[Wrapping, ...]] | None = None
    for kinds in itertools.product(KINDS, repeat=len(blocks)):
        in_root = [own[b] for b, kind in zip(blocks, kinds) if kind == "root"]
        units = [u for b, kind in zip(blocks, kinds) for u in _units(kind, own[b], parts[b])]
        whole = own[root].whole_bytes + sum(one.whole_bytes for one in in_root)
        pairs = [a.whole_bytes + b.whole_bytes for a, b in itertools.pairwise([UnitFigures(), *units])]
        if rest + whole + max(pairs, default=0) > budget_bytes:
            continue
        at_once = own[root].gather + sum(one.gather for one in in_root)
        last = own[root].reduce + sum(one.reduce for one in in_root)
        seconds = at_once + last + _exposed(units)
        if best is None or seconds < best[0]:
            best = (seconds, kinds)
    return None if best is None else best[1]


def _units(kind: Wrapping, block: UnitFigures, parts: list[UnitFigures]) -> list[UnitFigures]:
    return {"root": [], "block": [block], "parts": parts}[kind]


def _exposed(units: Sequence[UnitFigures]) -> float:
    """Return what is not hidden of the gathers and reductions of units in a row."""
    if not units:
        return 0.0
    seconds = units[0].gather + units[-1].gather + units[0].reduce
    for one, following in itertools.pairwise(units):
        seconds += max(following.gather - one.forward, 0.0)
        seconds += max(one.gather - following.backward, 0.0)
        seconds += max(following.reduce - one.backward, 0.0)
    return seconds


def _figures(request: Request, trace: Trace) -> dict[str, UnitFigures]:
    """Return the figures of each unit, the root first."""
    times = schedule(trace, request.price(trace))
    unit_of: list[int] = []
    for number, module in enumerate(trace.modules):
        unit_of.append(number if module.unit or module.parent < 0 else unit_of[module.parent])
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for number, op in enumerate(trace.ops):
        if op.module < 0 or op.phase == "optimizer":
            continue
        of_unit, seconds = sums[unit_of[op.module]], float(times.device_seconds[number])
        collective = trace.signatures[op.signature].collective
        if collective is None:
            of_unit[op.phase] += seconds
        elif op.exchange == "reduce":
            of_unit["reduce"] += seconds
        elif op.phase == "forward":
            of_unit["gather"] += seconds
            of_unit["bytes"] += collective.bytes
    names = sorted(sums)
    return {
        trace.modules[n].name: UnitFigures(
            sums[n]["gather"],
            sums[n]["reduce"],
            sums[n]["forward"],
            sums[n]["backward"],
            int(sums[n]["bytes"]),
        )
        for n in names
    }


def wrapped_trace(request: Request, kinds: Sequence[Wrapping]) -> Trace:
    """Return the step whose blocks are wrapped so."""

    def units(blocks: Sequence[nn.Module]) -> list[nn.Module]:
        return list(_chosen(blocks, kinds))

    with patch("trainfit.models.parallel.data_parallel.units_among", units):
        return request.trace()


def _chosen(blocks: Sequence[nn.Module], kinds: Sequence[Wrapping]) -> Iterator[nn.Module]:
    for block, kind in zip(blocks, kinds, strict=True):
        if kind != "root":
            with units_are("parts" if kind == "parts" else "blocks"):
                yield from units_among([block])
