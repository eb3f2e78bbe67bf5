"""Make plans for tests without a planner: regions by module name, decisions by a function of the op."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from trainfit.planning.certify import parts_of_rank
from trainfit.planning.model_calls import forward_ops
from trainfit.planning.region_flow import flow_of
from trainfit.planning.regions import saved_inside
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import OpDecision, Plan, Region, RegionKind
from trainfit.traces.trace import Signature, Trace
from trainfit.traces.trace_store import operators_hash

Policy = Callable[[Signature, int], bool]
"""Says of an op, by its signature and its number in the region, whether its results are saved."""
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.", "aten._scaled_dot")


def recompute_everything(signature: Signature, number: int) -> bool:
    return False


def as_a_whole(signature: Signature, number: int) -> bool:
    """Save nothing, so that torch alone may compute regions again."""
    return False


def save_everything(signature: Signature, number: int) -> bool:
    return True


def save_products(signature: Signature, number: int) -> bool:
    return signature.name.startswith(PRODUCTS)


def plan_for(trace: Trace, modules: Sequence[str], policy: Policy) -> Plan:
    """Return a plan that makes every call of the named modules a region, with decisions by `policy`."""
    kinds: dict[RegionKind, int] = {}
    regions: list[Region] = []
    counts: dict[str, int] = {}
    for number, call in enumerate(trace.calls):
        name = trace.module_name(call.module)
        if call.recompute or name not in modules:
            continue
        kind = region_kind(trace, number, policy)
        counts[name] = counts.get(name, -1) + 1
        numbers = (counts[name], kinds.setdefault(kind, len(kinds)), 0)
        regions.append(Region(name, *numbers, 0.0, whole=policy is as_a_whole))
    assert regions, f"none of {modules} is called"
    return Plan(
        target=trace.target,
        device=trace.device,
        torch=trace.torch,
        trace_hash=operators_hash(trace),
        budget_bytes=0,
        kinds=tuple(kinds),
        regions=tuple(regions),
        peak_bytes=0,
        memory_bytes=0,
        step_seconds=0.0,
        baseline_peak_bytes=0,
        baseline_step_seconds=0.0,
        bound_seconds=0.0,
        reserve_bytes=int(trace.depends_on_data),
        cluster=trace.cluster,
        parts=parts_of_rank(trace),
    )


def region_kind(trace: Trace, call: int, policy: Policy) -> RegionKind:
    """Decide for each op: saved if the policy says so, else recomputed if something needs it."""
    ops, end = forward_ops(trace, call), trace.calls[call].body.stop
    signatures = [trace.signatures[trace.ops[position].signature] for position in ops]
    saved = [not s.view and policy(s, number) for number, s in enumerate(signatures)]
    decisions = [Decision.SAVE if each else Decision.RECOMPUTE for each in saved]
    flow = flow_of(trace, (call,), saved_inside(trace, ops, end, trace.calls[call].backward_start))
    kept = {
        storage
        for number, position in enumerate(ops)
        if saved[number]
        for storage in (*trace.ops[position].creates, *trace.ops[position].writes)
    }
    again = flow.runs_again(kept, flow.first_draws(lambda op: decisions[bisect_left(ops, op)]))
    for number, (position, signature) in enumerate(zip(ops, signatures)):
        if not saved[number] and position not in again and not signature.view:
            decisions[number] = Decision.SKIP
    return RegionKind(
        tuple(
            OpDecision(s.name, tuple(output.shape for output in s.outputs), decision, s.random)
            for s, decision in zip(signatures, decisions)
        )
    )
