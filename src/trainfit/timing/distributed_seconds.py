"""What Python of DTensor and FSDP2 takes around the operators of a rank's step, measured on this machine.

Small steps of one of two ranks are really run, over a process group that exchanges nothing, and their
operators timed in turn with them. What neither the operators explain, nor what the host takes in any step,
belongs to DTensor and FSDP2. A sharded step has distributed tensors in its optimizer only, and units of FSDP
only before that; a step of tensor parallelism adds conversions between local and distributed tensors.

All of that in a Python of its own: this one may belong to a process group, or is to belong to one later.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from trainfit.basics.doing import unheard
from trainfit.basics.other_python import say, started, talk
from trainfit.errors import DeviceError
from trainfit.models.recipe import StepOptions
from trainfit.steps.step import Step
from trainfit.timing.clocks import cpu_clock
from trainfit.timing.host import UnexplainedPhase, add_sample
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import PHASES

_SAMPLES = ("gpt2-tiny", "llama-tiny")
_SMALL, _MEDIUM = StepOptions(batch=2, seq=64), StepOptions(batch=8, seq=128)
"""In steps of the second size operators fill the core's cache: Python is slower after each of them."""
_BUDGET_SECONDS = 1.5


def distributed_seconds(host: Mapping[str, float]) -> dict[str, float]:
    """Measure the figures, given what the host takes in any step: other fields of `costs.table.Host`."""
    with tempfile.TemporaryFile() as errors:
        process = started(serve_distributed_seconds, errors)
        answer, _ = process.communicate(json.dumps(dict(host)).encode() + b"\n")
        if process.returncode or not answer:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or ["no word"]
            raise DeviceError(f"what distributed tensors take could not be measured here: {said[-1]}")
    found: dict[str, float] = json.loads(answer)
    return found


def serve_distributed_seconds() -> None:
    """Measure in the other Python, and answer."""
    told, answers = talk()
    host = json.loads(told.readline())
    torch.set_num_threads(1)
    say(answers, json.dumps(measured(host)).encode())


def measured(host: Mapping[str, float]) -> dict[str, float]:
    """Measure here, in a process that belongs to no group."""
    sharded, divided = (_rest(kind, _SMALL, host) for kind in ("dp", "tp"))
    optimizer, before = sharded["optimizer"], [sharded[phase] for phase in ("forward", "backward")]
    wrapped = max(optimizer.rest / optimizer.wrapped, 0.0)
    unit = max(sum(phase.rest for phase in before) / sum(phase.unit_ops for phase in before), 0.0)
    converting = divided.values()
    rest = sum(phase.rest - wrapped * phase.wrapped for phase in converting)
    conversion = max(rest / sum(phase.converted for phase in converting), 0.0)
    larger = [phase for kind in ("dp", "tp") for phase in _rest(kind, _MEDIUM, host).values()]
    slower = sum(
        phase.rest - wrapped * phase.wrapped - conversion * phase.converted - unit * phase.unit_ops
        for phase in larger
    )
    again = max(slower / sum(phase.rank_reloads for phase in larger), 0.0)
    return {"wrapped_op": wrapped, "conversion": conversion, "unit_op": unit, "rank_reload": again}


def _rest(kind: str, options: StepOptions, host: Mapping[str, float]) -> dict[str, UnexplainedPhase]:
    """Return what the host's figures leave of steps of one of two ranks, and the calls in them."""
    from trainfit.capturing import capture
    from trainfit.capturing.distributed.fake_groups import rank_of
    from trainfit.targets.parse import load

    cluster = Cluster(2, 0, mesh=((kind, 2),))
    phases = {phase: UnexplainedPhase() for phase in PHASES}
    for name in _SAMPLES:
        build = load(name, replace(options, cluster=cluster)).build
        with unheard():
            trace = capture(build, device="cpu", steps=1, cluster=cluster)
        with rank_of(cluster):
            add_sample(phases, _phases_timed(build()), trace, _BUDGET_SECONDS)
    for phase_name, phase in phases.items():
        phase.rest -= phase.explained(host, f"{phase_name}_op") + phase.reloads * host["reload"]
    return phases


def _phases_timed(step: Step) -> Callable[[], dict[str, float]]:
    """Return what runs a step and tells its phases apart: what is before the optimizer counts as forward."""
    clock, begun = cpu_clock(), [0.0]

    def optimizer_begins(*_: Any) -> None:
        begun[0] = clock()

    for optimizer in step.optimizers:
        optimizer.register_step_pre_hook(optimizer_begins)

    def run() -> dict[str, float]:
        begin = clock()
        step.run()
        return {"forward": begun[0] - begin, "backward": 0.0, "optimizer": clock() - begun[0]}

    return run
