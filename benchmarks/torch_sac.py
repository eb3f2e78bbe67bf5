"""PyTorch's own planner (`torch.distributed._tools`) on our traces: same statistics in, its decisions out.

`TorchPlanner` builds the tables that PyTorch's estimators would hand over (`ModuleInfo`, `SACStats`) from a
trace and its costs, calls PyTorch's trade-off fit, `sac_milp` and per-module policy, and returns what its
decisions do to the trace, executed as PyTorch executes them: what is not stored is recomputed, up to the
last value that backward needs.

Needs pulp and pwlf: `pip install -c constraints.txt -e '.[benchmarks]'`.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import CATEGORIES, Trace

GIBIBYTE = 1 << 30


def missing() -> str | None:
    """Say what has to be installed, if anything."""
    if all(importlib.util.find_spec(name) for name in ("pulp", "pwlf")):
        return None
    return "PyTorch's planner needs pulp and pwlf: pip install -c constraints.txt -e '.[benchmarks]'"


class TorchPlanner:
    """PyTorch's planner for one trace: statistics once, decisions for as many budgets as wanted."""

    def __init__(self, trace: Trace, costs: CostTable, seed: int = 0) -> None:
        from torch.distributed._tools.ilp_utils import parse_module_info

        np.random.seed(seed)  # pwlf fits by chance, and some of its fits leave the program without a solution
        self.trace = trace
        self.timeline = simulate(trace)
        self._seconds = schedule(trace, costs).marginal_seconds.tolist()
        self.regions = self._regions()
        self.sac_stats = {name: self._sac_stats(region) for name, region in self.regions.items()}
        self._fits: dict[str, Any] = {}
        """Modules that are alike are fitted once."""
        self.graph = parse_module_info(self._module_info())

    @property
    def unplanned_bytes(self) -> int:
        """The step's peak without a plan in PyTorch's own model, which its budgets are compared with."""
        from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline

        return int(get_peak_memory_runtime_baseline(self.graph)[0])

    def effects(self, budget_bytes: int) -> list[Effect] | None:
        """Return what PyTorch's plan for a budget (in its own model) does, or None if it finds none."""
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

        decisions, _, peak = sac_milp(self.graph, budget_bytes / GIBIBYTE)
        if peak == -1:
            return None
        policies: dict[tuple[str, float], list[int]] = {}
        effects: list[Effect] = []
        for name, share in decisions.items():
            # Modules that are alike get the same policy: PyTorch's function is asked once.
            key = (repr(self.sac_stats[name]), round(share, 9))
            if key not in policies:
                stored = min(max(1.0 - share, 0.0), 1.0)
                policies[key] = get_optimal_checkpointing_policy_per_module(self.sac_stats[name], stored)
            effects.append(
                effect_of(self.trace, self.regions[name], _executed(self.regions[name], policies[key]))
            )
        return effects

    def _regions(self) -> dict[str, RegionGraph]:
        """Return the graphs of what PyTorch would not call a leaf."""
        parents = {module.parent for module in self.trace.modules}
        found: dict[str, RegionGraph] = {}
        for number in candidate_calls(self.trace):
            call = self.trace.calls[number]
            if call.module in parents and self.trace.modules[call.module].name not in found:
                region = region_graph(self.trace, number, self._seconds)
                if region is not None and any(group.bytes for group in region.groups):
                    found[self.trace.modules[call.module].name] = region
        return found

    def _first_calls(self) -> list[int]:
        """Return the first call of every module: PyTorch's tables have one row for each."""
        parents = {module.parent for module in self.trace.modules}
        first: dict[int, int] = {}
        for number, call in enumerate(self.trace.calls):
            if (
                not call.recompute
                and first.setdefault(call.module, number) != number
                and call.module in parents
            ):
                name = self.trace.modules[call.module].name
                raise ValueError(f"{name} is called twice, which PyTorch's parse_module_info cannot follow")
        return list(first.values())

    def _sac_stats(self, region: RegionGraph) -> Any:
        from torch.distributed._tools.sac_estimator import SACStats

        trace, ops = self.trace, list(region.ops)
        position = {op: place for place, op in enumerate(ops)}
        groups = [region.groups[region.group_of_op[op]] for op in ops]
        signatures = [trace.signatures[trace.ops[op].signature] for op in ops]
        runtimes = [1e3 * self._seconds[op] for op in ops]
        memory = [sum(trace.storages[s].bytes for s in trace.ops[op].creates) for op in ops]
        # PyTorch's policy fails for an op that neither takes time nor memory and is no view.
        nothing = [not runtime and not size for runtime, size in zip(runtimes, memory)]
        return SACStats(
            func_names=[signature.name for signature in signatures],
            runtimes=runtimes,
            memory=memory,
            view_like_ops=[place for place, group in enumerate(groups) if group.free or nothing[place]],
            rand_ops=[place for place, signature in enumerate(signatures) if signature.random],
            saved_autograd_ops=[place for place, group in enumerate(groups) if group.needed],
            inplace_ops=[
                (place, position[group.ops[0]])
                for place, group in enumerate(groups)
                if ops[place] != group.ops[0] and trace.ops[ops[place]].writes
            ],
            force_store_random=False,
        )

    def _module_info(self) -> Any:
        trace = self.trace
        calls = self._first_calls()
        names = {number: trace.modules[trace.calls[number].module].name for number in calls}
        called = set(calls)
        return {
            "mod_order": {
                "fw_pre_order": [names[number] for number in calls],
                "fw_post_order": [names[n] for n in trace.forward_post_order if n in called],
                "bw_pre_order": [names[n] for n in trace.backward_pre_order if n in called],
                "bw_post_order": [names[n] for n in trace.backward_post_order if n in called],
            },
            "mod_stats": [self._mod_stats(number) for number in calls],
        }

    def _mod_stats(self, number: int) -> dict[str, Any]:
        trace, call = self.trace, self.trace.calls[number]
        name = trace.modules[call.module].name
        alive = _Alive(self.timeline)
        forward, backward = (call.forward_start, call.forward_end), (call.backward_start, call.backward_end)
        parameters = sum(_own_and_below(trace, call.module))
        output = sum(trace.storages[s].bytes for s in _outputs(trace, number))
        stats: dict[str, Any] = {
            "fqn": name,
            "param_per_module": parameters,
            "grad_per_module": parameters,
            "grad_total": alive.before(backward[0], "gradient"),
            "act_fw_per_module": max(
                0, alive.before(forward[1], "activation") - alive.before(forward[0], "activation") - output
            ),
            "act_bw_per_module": alive.most(*backward, "activation"),
            "act_grad_per_module": alive.most(*backward, "temporary")
            - alive.before(backward[0], "temporary"),
            "act_total": alive.before(forward[1], "activation"),
            "input_per_module": 0,
            "output_per_module": output,
            "fw_runtime_per_module": 1e3 * sum(self._seconds[slice(*forward)]),
            "bw_runtime_per_module": 1e3 * sum(self._seconds[slice(*backward)]),
        }
        return {**stats, **self._trade_off(name)}

    def _trade_off(self, name: str) -> dict[str, Any]:
        """Let PyTorch fit its two lines to the module's statistics; a leaf has none."""
        from torch.distributed._tools.sac_estimator import SACEstimator

        if name not in self.sac_stats:
            empty: dict[str, Any] = dict.fromkeys(("sac_runtime", "sac_memory", "n_segments"), 0)
            empty |= {key: [] for key in ("slopes", "intercepts", "breakpoints")}
            return {**empty, "tradeoff_curve": OrderedDict(), "is_leaf": True}
        stats = self.sac_stats[name]
        key = repr(stats)
        if key not in self._fits:
            estimator = SACEstimator()
            order = estimator._get_greedy_order_meta(stats)
            self._fits[key] = estimator._get_sac_tradeoff_pwlf_stats(stats, order)
        found = self._fits[key]
        return {
            "sac_runtime": found.sac_runtime,
            "sac_memory": found.sac_memory,
            "n_segments": found.n_segments,
            "slopes": found.slopes,
            "intercepts": found.intercepts,
            "breakpoints": found.fit_breaks,
            "tradeoff_curve": found.tradeoff_curve,
            "is_leaf": False,
        }


class _Alive:
    """Bytes of one category over the step, as PyTorch's memory tracker would snapshot them."""

    def __init__(self, timeline: Timeline) -> None:
        self._rows = timeline.by_category

    def before(self, op: int, category: str) -> int:
        """Return what is alive between the op before and this one."""
        return int(self._rows[CATEGORIES.index(category), max(op - 1, 0)])

    def most(self, first: int, last: int, category: str) -> int:
        row = self._rows[CATEGORIES.index(category), max(first, 0) : max(last, 1)]
        return int(row.max()) if len(row) else 0


def _own_and_below(trace: Trace, module: int) -> Iterator[int]:
    prefix = trace.modules[module].name
    for other in trace.modules:
        if other.name == prefix or other.name.startswith(prefix + "."):
            yield sum(trace.occupied_bytes[storage] for storage in other.parameters)


def _outputs(trace: Trace, number: int) -> Iterator[int]:
    """Yield the storages made in a call that a later op of forward reads."""
    call = trace.calls[number]
    for op in trace.ops[call.forward_start : call.forward_end]:
        for storage in op.creates:
            later = (reader for reader in trace.readers[storage] if reader >= call.forward_end)
            if any(trace.ops[reader].phase == "forward" for reader in later):
                yield storage


def _executed(region: RegionGraph, policy: list[int]) -> Choice:
    """Return what PyTorch's selective checkpointing does with a policy, one entry per op of the region."""
    last = max(number for number, group in enumerate(region.groups) if group.needed)
    stored = {region.group_of_op[op] for op, keep in zip(region.ops, policy) if keep}
    kept = {n for n, group in enumerate(region.groups) if group.storages and not group.repeatable}
    kept |= {n for n in stored if region.groups[n].keepable}
    repeated = {
        n
        for n, group in enumerate(region.groups)
        if n not in kept and n <= last and group.repeatable and not group.free
    }
    return Choice(
        frozenset(kept),
        frozenset(repeated),
        bytes=sum(region.groups[n].bytes for n in kept),
        seconds=sum(region.groups[n].seconds for n in repeated),
    )
