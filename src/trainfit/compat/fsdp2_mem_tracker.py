"""`FSDPMemTracker` of `torch.distributed._tools.fsdp2_mem_tracker`: memory of FSDP2 modules, and of FSDP.

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((batch,))
    with tracker:
        step()
    tracker.display_snapshot("peak", units="MiB")
    tracker.display_modulewise_snapshots(depth=3, units="MiB")

All figures are read off one trace of what runs. A storage is of one kind all the time: what turns out to be
an unsharded gradient is one from the beginning. Several iterations may run; `reset_mod_stats` forgets the
calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.observed_calls import Instant
from trainfit.capturing.observing import Observation
from trainfit.capturing.replacing import replaced
from trainfit.compat.fsdp2_mem_states import _FSDPModMemStats, _FSDPModState, _FSDPRefType
from trainfit.compat.mem_states import TOTAL, Snapshot, print_states, print_states_table
from trainfit.compat.mem_tracker import MemTracker, in_order_of_names
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.memory.history import MemoryHistory, history_of

__all__ = ["FSDPMemTracker", "_FSDPModMemStats", "_FSDPModState", "_FSDPRefType"]


_KIND_OF = {
    "parameter": _FSDPRefType.SHARDED_PARAM,
    "buffer": _FSDPRefType.BUFFER,
    "gradient": _FSDPRefType.SHARDED_GRAD,
    "activation": _FSDPRefType.ACT,
    "temporary": _FSDPRefType.TEMP,
    "optimizer_state": _FSDPRefType.OPT,
    "input": _FSDPRefType.INP,
    "communication": _FSDPRefType.TEMP,
}
"""Of storages that FSDP itself says nothing about."""
_NAMES = tuple(_FSDPRefType)
_AROUND = {
    "pre_forward": (None, _FSDPModState.AFT_PRE_FW),
    "post_forward": (_FSDPModState.BEF_POST_FW, None),
    "pre_backward": (_FSDPModState.BEF_PRE_BW, _FSDPModState.AFT_PRE_BW),
    "post_backward": (_FSDPModState.BEF_POST_BW, _FSDPModState.AFT_POST_BW),
}
"""What FSDP calls for the parameters of a module, and the states before and after it."""
_FORWARD = (_FSDPModState.BEF_PRE_FW, _FSDPModState.AFT_POST_FW)
_PEAKS = {
    _FSDPModState.PEAK_FW: _FORWARD,
    _FSDPModState.PEAK_BW: (_FSDPModState.BEF_PRE_BW, _FSDPModState.AFT_POST_BW),
}
"""Between which moments the most is looked for."""
_GATHERS = torch.ops.c10d._allgather_base_.default
_REDUCES = torch.ops.c10d._reduce_scatter_base_.default


class _FSDPObservation(Observation):
    """Also notes what FSDP's own buffers are for."""

    def __init__(self, device: Device | None) -> None:
        super().__init__(device)
        self.kinds: dict[int, _FSDPRefType] = {}
        """By the address of the ledger's entry, which lives as long as the ledger."""
        self.fsdp_works = False
        self.around_call: Callable[[nn.Module, bool], None] = lambda module, begins: None
        """Called when a call of a module begins, and when it has ended."""

    def moment(self, state: _FSDPModState) -> _Moment:
        """Return the present moment."""
        occupied = self.ledger.memory.occupied
        alive = [
            (live, self._device_of[id(live)], occupied(live.nbytes))
            for live in self.ledger.alive.values()
            if live.nbytes
        ]
        return _Moment(state, self.now(), tuple(alive))

    def _module_call(self, original: Any) -> Any:
        inner = super()._module_call(original)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.around_call(module, True)
            try:
                return inner(module, *args, **kwargs)
            finally:
                self.around_call(module, False)

        return __call__

    def mark(self, value: Any, kind: _FSDPRefType) -> None:
        """Say what the tensors in a value are; the first word counts."""
        for live in self.storages_of(value):
            self.kinds.setdefault(id(live), kind)

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super()._note(func, args, kwargs, result)
        if self.fsdp_works and func is _GATHERS:
            self.mark(args[0], _FSDPRefType.ALL_GATHER)
        elif self.fsdp_works and func is _REDUCES:
            self.mark(args[1], _FSDPRefType.REDUCE_SCATTER)


@dataclass(frozen=True)
class _Moment:
    """A moment in the life of a module: what was alive then, of which device, and how large it was.

    What FSDP resizes between two ops would look the same in a history, which counts in ops.
    """

    state: _FSDPModState
    instant: Instant
    alive: tuple[tuple[LiveStorage, torch.device, int], ...]


class FSDPMemTracker(MemTracker):
    """Follows the memory of a model that `fully_shard` has sharded."""

    _observation: _FSDPObservation

    def __init__(
        self,
        mod: nn.Module,
        optm: torch.optim.Optimizer | None = None,
        *,
        device: str | Device | None = None,
    ) -> None:
        """Prepare for a sharded model and its optimizer; `device` is what everything counts as being on."""
        if not isinstance(mod, FSDPModule):
            raise OptionError(
                f"FSDPMemTracker follows models that fully_shard has sharded, and this {type(mod).__name__} "
                "is not; MemTracker follows any model."
            )
        super().__init__(device)
        self._root, self._optimizer = mod, optm
        self._moments: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._observation.around_call = self._around_call
        self._patches = contextlib.ExitStack()

    def _observation_on(self, device: Device | None) -> Observation:
        return _FSDPObservation(device)

    @classmethod
    def of(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse: what a captured step knows is in its trace."""
        raise OptionError(
            "FSDPMemTracker follows code that runs; for a captured step, trainfit.estimate with cluster= "
            "shows what is gathered and sent."
        )

    # Following ------------------------------------------------------------------------------------------

    def track_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Count the tensors in a value as inputs."""
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor):
                self._observation.include(tensor)
                self._observation.mark(tensor, _FSDPRefType.INP)

    def track_external(self, *external: nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        """Do nothing: model and optimizer are known, and `track_inputs` takes the rest."""

    def __enter__(self) -> Self:
        """Begin to follow, or go on."""
        if self._depth == 0:
            self._observation.include(self._root)
            if self._optimizer is not None:
                self._observation.include(self._optimizer)
            for group in self._groups():
                # What is gathered into is there from an earlier step, without bytes.
                self._observation.include(
                    *(output for parameter in group.fsdp_params for output in parameter.all_gather_outputs)
                )
                self._mark_parts(group)
            for name in _AROUND:
                self._patches.enter_context(replaced(FSDPParamGroup, name, self._around))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop following."""
        super().__exit__(*error)
        if self._depth == 0:
            self._patches.close()

    def reset_mod_stats(self) -> None:
        """Forget the module calls so far."""
        super().reset_mod_stats()
        self._moments = WeakIdKeyDictionary()

    def _groups(self) -> dict[FSDPParamGroup, nn.Module]:
        """Return the groups of parameters that are gathered together, and the module of each."""
        found: dict[FSDPParamGroup, nn.Module] = {}
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    found.setdefault(group, module)
        return found

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = _AROUND[original.__name__]

        def followed(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            module = self._groups().get(group)
            if module is None:  # of another model
                return original(group, *args, **kwargs)
            self._mark_parts(group)
            self._notice(module, before)
            outer, self._observation.fsdp_works = self._observation.fsdp_works, True
            try:
                result = original(group, *args, **kwargs)
            finally:
                self._observation.fsdp_works = outer
            self._mark_parts(group)
            self._notice(module, after)
            return result

        return followed

    def _notice(self, module: nn.Module, state: _FSDPModState | None) -> None:
        if state is not None:
            self._moments.setdefault(module, []).append(self._observation.moment(state))

    def _around_call(self, module: nn.Module, begins: bool) -> None:
        if isinstance(module, FSDPModule) and module in self._groups().values():
            again = torch._C._current_graph_task_id() != -1
            around = (_FSDPModState.PRE_FW_AC, _FSDPModState.POST_FW_AC) if again else _FORWARD
            self._notice(module, around[0 if begins else 1])

    def _mark_parts(self, group: FSDPParamGroup) -> None:
        """Say of each tensor that FSDP has for a group of parameters what it is."""
        mark = self._observation.mark
        for parameter in group.fsdp_params:
            mark(parameter.sharded_param, _FSDPRefType.SHARDED_PARAM)
            mark(parameter.all_gather_outputs, _FSDPRefType.UNSHARDED_PARAM)
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                mark(unsharded, _FSDPRefType.UNSHARDED_PARAM)
                mark(
                    [
                        one
                        for one in (unsharded.grad, parameter.unsharded_accumulated_grad)
                        if one is not None
                    ],
                    _FSDPRefType.UNSHARDED_GRAD,
                )
            if parameter.sharded_param.grad is not None:
                mark(parameter.sharded_param.grad, _FSDPRefType.SHARDED_GRAD)

    # Reading --------------------------------------------------------------------------------------------

    def _kind(self, live: LiveStorage, category: str) -> _FSDPRefType:
        return self._observation.kinds.get(id(live)) or _KIND_OF[category]

    def _histories(self) -> dict[torch.device, MemoryHistory]:
        traces = self._look().traces  # which gives storages their numbers
        lives = {live.index: live for live in self._observation.ledger.created}
        return {
            device: history_of(
                trace, [self._kind(lives[n], one.category) for n, one in enumerate(trace.storages)], _NAMES
            )
            for device, trace in traces.items()
        }

    def _shown(self, by_category: dict[str, int]) -> dict[str, int]:
        return {**by_category, TOTAL: sum(by_category.values())}

    @property
    def memory_tracking(self) -> Any:
        """What is known of each FSDP module that was called, by module."""
        found = WeakIdKeyDictionary()
        histories = self._histories()
        for module, moments in self._moments.items():
            number = self._observation.modules.find(module)
            assert number is not None, "it is part of the root, which is included"
            stats = found[module] = _FSDPModMemStats(self._observation.modules.name(number))
            begun: dict[_FSDPModState, tuple[_Moment, Snapshot]] = {}
            for moment in moments:
                snapshot = self._snapshot(moment)
                stats.snapshots.setdefault(moment.state, []).append(snapshot)
                for peak, (first, last) in _PEAKS.items():
                    if moment.state is first:
                        begun[peak] = moment, snapshot
                    elif moment.state is last and peak in begun:
                        most = self._most(histories, *begun.pop(peak), moment, snapshot)
                        stats.snapshots.setdefault(peak, []).append(most)
                        stats.local_peak = {device: sizes[TOTAL] for device, sizes in most.items()}
        return found

    def _snapshot(self, moment: _Moment) -> Snapshot:
        trace = self._look().trace
        sizes: dict[torch.device, dict[str, int]] = {}
        for live, device, size in moment.alive:
            on_device = sizes.setdefault(device, dict.fromkeys(_NAMES, 0))
            on_device[self._kind(live, trace.storages[live.index].category)] += size
        return {device: self._shown(found) for device, found in sizes.items()}

    def _most(
        self,
        histories: dict[torch.device, MemoryHistory],
        first: _Moment,
        at_first: Snapshot,
        last: _Moment,
        at_last: Snapshot,
    ) -> Snapshot:
        """Return what is alive when most is, from one moment to another, on each device."""
        found: Snapshot = {}
        for device, history in histories.items():
            choices = [snapshot[device] for snapshot in (at_first, at_last) if device in snapshot]
            op = history.largest(first.instant.time, last.instant.time)
            if op is not None:
                choices.append(self._shown(history.at_op(op)))
            if choices:
                found[device] = max(choices, key=lambda sizes: sizes[TOTAL])
        return found

    def display_modulewise_snapshots(self, depth: int = 2, units: str = "B", tabulate: bool = False) -> None:
        """Print the snapshots of all FSDP modules down to a depth, in the order of their names."""
        for stats in in_order_of_names(self.memory_tracking.values()):
            if stats.mod_fqn.count(".") < depth:
                print(f"Module:  {stats.mod_fqn}")
                show = print_states_table if tabulate else print_states
                show(stats.snapshots, units)
