"""The large parameters are kept in the host's memory, and come to the device while their module needs them.

That is in forward, in backward, and for their update: three copies of each in, one out. They run on the queue
of the kernels, one after the other, and nothing overlaps with them. Gradients stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import PLAN, StepChange
from trainfit.changes.kinds.state_on_host import OTHER_OPTIMIZERS
from trainfit.changes.least_copies import least_updated_bytes
from trainfit.changes.offloaded_parameters import SMALL_SHARE, keep_parameters_on_host
from trainfit.changes.step_in_parts import BY_PARAMETER
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import APPLIED_WITH_OPTIMIZER, BIT_EQUAL, ChangeMade
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

PARAMETERS_ON_HOST = "on the host"
_LEAST_COPIES = 3
"""Of what gets a gradient: in for forward, in for the update, and out again. Not all need it in backward."""
_EXCLUDED = OTHER_OPTIMIZERS | {"loss", PLAN}
"""A head whose loss is in chunks uses its weights after its forward; and what a plan computes again would
need parameters that its replay does not know to be away."""


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield it for steps with torch's optimizers."""
    if step.optimizers and set(step.optimizers) <= set(BY_PARAMETER):
        code = APPLIED_WITH_OPTIMIZER
        made = ChangeMade("parameters", PARAMETERS_ON_HOST, code, BIT_EQUAL, by_apply=True)
        least = _LEAST_COPIES * least_updated_bytes(step, SMALL_SHARE)
        yield StepChange(
            made, make=_on_host, excludes=_EXCLUDED, refused_by=_used_away, least_copied_bytes=least
        )


def _on_host(step: Step) -> Step:
    keep_parameters_on_host(step.model, step.optimizers)
    return step


def _used_away(trace: Trace) -> str | None:
    """Say which operator finds a parameter on the host: on a GPU it would fail."""
    if trace.device == "cpu":
        return None
    away = {
        number
        for number, storage in enumerate(trace.storages)
        if storage.category == "parameter" and storage.bytes == 0 and not storage.resizes
    }
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        if away.intersection(op.reads) and signature.moved_bytes and not signature.over_link:
            where = trace.module_name(op.module)
            return f"{signature.name} in {where} uses a parameter outside of its module's forward"
    return None
