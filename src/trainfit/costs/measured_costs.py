"""Measured costs: every distinct operator of a trace is run on the device at hand, and its time remembered.

An operator is timed in the situations that the step has: with its inputs in the cache or not
(`timing/locality.py`). Its cost is the mean over its ops. What cannot be run alone is priced by `fallback`,
and its source says so. Figures that were taken while the machine was busy with other work are used with a
warning, and measured again as soon as it is quiet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.basics.doing import Measuring
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.costs.this_machine import machine_of, refuse_absent
from trainfit.devices.device_table import Device
from trainfit.devices.measured_cache import Entry, MeasuredCache, key_of
from trainfit.timing.load import LoadMeter, busiest, busy_warning, is_busy
from trainfit.traces.trace import Signature, Trace

if TYPE_CHECKING:
    from trainfit.timing.bench import Situation

BUDGET_SECONDS = 5.0
"""Measuring takes about this long, if every operator can run a few times within it."""
UNCERTAINTY = 0.14
"""Nine of ten steps of `benchmarks/time_accuracy_cpu.py` are within this of what was predicted (13.4 %)."""
_BATCH = 150
"""How many operators are measured together and written to the cache at once."""
_STEADY = 0.5
"""Figures whose calls were further apart than this, relative to their median, are used but not kept."""
_COMPANY = 40
"""With fewer operators than this in a round, each finds its code warmer than in a step: others join in."""


def measured_costs(
    trace: Trace,
    device: Device,
    *,
    fallback: Callable[[Signature], OpCost],
    host: Host,
    refresh: bool = False,
    progress: Measuring | None = None,
    cache_path: Path | None = None,
    between: Callable[[], object] | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    meter: LoadMeter | None = None,
) -> CostTable:
    """Price a trace by running its operators on this machine; from the cache what was measured before.

    `refresh` measures everything again. `between` is called after every round of operators. The `meter`
    tells how busy the machine is with other work.
    """
    from trainfit.timing.bench import situations_of
    from trainfit.workspace.processor_faults import refuse_faulty

    refuse_absent(device)
    if device.kind == "cpu":
        refuse_faulty(trace.signatures)
    situations = situations_of(trace)
    with MeasuredCache(machine_of(device), cache_path) as cache:
        known = _look_up(
            situations, device, cache, refresh, progress, between, budget_seconds, meter or LoadMeter()
        )
        warnings = ((cache.warning,) if cache.warning else ()) + _busy_warning(known)
    costs = tuple(
        _cost(fallback(signature), found, known) for signature, found in zip(trace.signatures, situations)
    )
    return CostTable(device, host, costs, UNCERTAINTY, warnings)


def _look_up(
    situations: Sequence[Counter[Situation]],
    device: Device,
    cache: MeasuredCache,
    refresh: bool,
    progress: Measuring | None,
    between: Callable[[], object] | None,
    budget_seconds: float,
    meter: LoadMeter,
) -> dict[Situation, Entry]:
    """Return the entry of every situation: from the cache, else measured now. Some cannot be measured."""
    from trainfit.timing.bench import Bench

    keys = {situation: _key(situation) for found in situations for situation in found}
    stored = {} if refresh else cache.entries(keys.values())
    known = {situation: stored[key] for situation, key in keys.items() if key in stored}
    missing = [s for s in keys if s not in known or meter.should_repeat(known[s].load)]
    if not missing:
        return known
    bench = Bench(device.kind)
    for begin in range(0, len(missing), _BATCH):
        batch = missing[begin : begin + _BATCH]
        company = [situation for situation in known if situation not in set(batch)]
        company = company[: max(_COMPANY - len(batch), 0)]
        budget = budget_seconds * len(batch) / len(keys)
        with meter.watching() as watch:
            timings = bench.time(batch, budget, company=company, progress=progress, between=between)
        measured = {
            situation: Entry(situation.signature.name, timing.seconds, timing.spread, load=watch.share)
            for situation, timing in zip(batch, timings)
            if timing is not None
            and (situation not in known or (watch.share or 0.0) <= (known[situation].load or 0.0))
        }
        cache.store({keys[situation]: e for situation, e in measured.items() if e.spread < _STEADY})
        known |= measured
    return known


def _busy_warning(known: dict[Situation, Entry]) -> tuple[str, ...]:
    doubtful = [entry for entry in known.values() if is_busy(entry.load)]
    return busy_warning(
        busiest(entry.load for entry in doubtful),
        f"{len(doubtful)} of the step's {len(known)} distinct operators were measured",
        "the predicted time may be too long. They are measured again when it is quiet, or by --refresh.",
    )


def _cost(formula: OpCost, situations: Counter[Situation], known: dict[Situation, Entry]) -> OpCost:
    """Return the mean over an operator's situations, or the formula if some were not measured."""
    if not situations or any(situation not in known for situation in situations):
        return formula
    seconds = sum(known[situation].seconds * count for situation, count in situations.items())
    return replace(formula, seconds=seconds / situations.total(), source="measured")


def _key(situation: Situation) -> str:
    signature, where = situation.signature, situation.locality
    inputs = [(spec.dtype, spec.shape, spec.stride) for spec in signature.inputs]
    return key_of(signature.name, signature.arguments, inputs, where.inputs, where.results, where.warm_code)
