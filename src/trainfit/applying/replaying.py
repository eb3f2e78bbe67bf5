"""A region recomputed in backward: kept results come back, what is needed runs, the rest is left out.

Ops that do not run return tensors of the right shape over memory that is not there. No op that runs reads
one of those: the recorder has worked out what each of them needs, and it is checked here once more.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._ops import OpOverload

from trainfit.applying.execution import execution
from trainfit.applying.modes import Facts, RegionMode, facts_of, is_weight_cast
from trainfit.applying.op_results import Constant, Created, make, tensors_in, with_tensors
from trainfit.applying.randomness import Draws
from trainfit.applying.records import VALUE, VIEW, OpRecord, OutsideArgument, Record, modified_error
from trainfit.capturing.hollow import absent_storage, is_absent
from trainfit.capturing.schemas import aten
from trainfit.plans.recomputation import NOBODY, Rerun

_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]
_function_modes: Any = torch._C._len_torch_function_stack
_detach, _to_copy = aten.detach.default, aten._to_copy.default
_END = OpRecord()
"""What comes after the last op."""
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


class Replayer(RegionMode):
    """Answers the ops of a region that is recomputed."""

    def __init__(self, name: str, record: Record, rerun: Rerun, *, release: bool) -> None:
        """Replay `record`; `release` what was kept as it comes back, if there will not be another time."""
        super().__init__()
        self._name = name
        self._record = record
        self._rerun = rerun
        self._release = release
        self._runs = (*rerun.runs, False)
        self._ops: tuple[OpRecord, ...] = (*record.ops, _END)
        self._next = 0
        self._draws = Draws()
        self._versions = [(left.tensor, left.tensor._version) for left in record.left.values()]
        self.absent: list[weakref.ref[torch.UntypedStorage]] = []
        """The storages without memory that were handed out; nobody should keep one."""

    def finish(self) -> None:
        """Leave random generators as they were, and torch's counts of writes: only copies were written to."""
        self._draws.put_back()
        for tensor, version in self._versions:
            _set_versions((tensor,), (version,))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one operator call: at once, if it is plainly the op that comes next."""
        number = self._next
        if types or type(func) is not OpOverload or execution.level != self._level or _function_modes():
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _detach:
            # Torch detaches what autograd saves; it is no op of the region.
            return func._op(*args)
        row = self._ops[number]
        if row.func is not func or func is _to_copy or not args or getattr(args[0], "is_meta", True):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._next = number + 1
        if row.kind is VIEW:
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        return self._answer(number, row, args, kwargs or {})

    def handle(self, facts: Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one op."""
        number = self._find(func, args, kwargs)
        if number == NOBODY:
            return func(*args, **kwargs)
        return self._answer(number, self._ops[number], args, kwargs)

    def _answer(self, number: int, row: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of an op of forward."""
        if row.kind is VIEW:
            return row.func(*args, **kwargs)
        if row.kind is VALUE:
            assert isinstance(row.result, Constant)
            return row.result.value
        if self._runs[number]:
            return self._run(number, row, args, kwargs)
        result = row.result
        if type(result) is Created and self._release:
            kept = self._record.kept.get(result.storage)
            if kept is not None and self._is_result(kept.tensor, result):
                del self._record.kept[result.storage]
                return kept.tensor
        return make(result, tensors_in(args, kwargs), self._storage)

    def _is_result(self, kept: torch.Tensor, result: Created) -> bool:
        """Whether a kept tensor is a result as it was, and may be returned itself.

        Torch counts writes to it together with those to the original, also of ops that do not run again.
        """
        layout, number = result.layout, result.storage
        return (
            number in self._rerun.restored
            and len(self._record.flow.makers[number]) == 1
            and kept.dtype is layout.dtype
            and kept.shape == layout.size
            and kept.stride() == layout.stride
            and kept.storage_offset() == layout.offset
        )

    def handle_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator again."""
        self._find(func, args, kwargs)
        return func(*args, **kwargs)

    def _find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of the op in forward; none for a cast that autocast's cache held there."""
        ops, number = self._record.ops, self._next
        if isinstance(func, OpOverload) and is_weight_cast(func, args, kwargs):
            if self._record.weights.get(number) != _storage_id(args[0]):
                return NOBODY
            self._next = number + 1
            return number
        while number < len(ops) and ops[number].cast:
            number += 1
        if number >= len(ops) or ops[number].func is not func:
            expected = ops[number].func if number < len(ops) else "nothing more"
            raise RuntimeError(
                f"{self._name} did something else when it was recomputed in backward: op {number} is "
                f"{func}, which was {expected} in forward. Such a module cannot be a region of a plan."
            )
        self._next = number + 1
        return number

    def _storage(self, number: int) -> torch.UntypedStorage:
        if number in self._rerun.restored:
            kept = self._record.kept
            return (kept.pop(number) if self._release else kept[number]).tensor.untyped_storage()
        nbytes, device = self._record.sizes[number]
        storage = absent_storage(nbytes, device)
        self.absent.append(weakref.ref(storage))
        return storage

    def _run(self, number: int, row: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, tensors = facts_of(row.func), tensors_in(args, kwargs)
        if row.outside or facts.statistics:
            replacements = {
                outside.argument: replacement
                for outside in row.outside
                if (replacement := self._as_in_forward(row, outside, tensors[outside.argument])) is not None
            }
            if facts.statistics:
                replacements.update(_spared_statistics(facts, args, tensors))
            if replacements:
                args, kwargs = with_tensors(args, kwargs, replacements)
        if self.absent and not facts.reads_metadata_only and any(map(is_absent, tensors)):
            raise AssertionError(f"{row.func} in {self._name} would read what was not recomputed")
        if row.generator is not None:
            state = self._record.states.get(number)
            self._draws.repeat(row.generator, state, number, row.draw_before)
        return row.func(*args, **kwargs)

    def _as_in_forward(
        self, row: OpRecord, outside: OutsideArgument, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a copy of an outside tensor as the op saw it in forward, if it has been written to since.

        An op that wrote to it in forward writes to a copy now: the write has been done.
        """
        flow = self._record.flow
        if outside.storage in flow.permanent:
            written = any(outside.storage == storage for storage, _ in row.writes)
            if outside.version == flow.version(outside.storage) and not written:
                return None
            snapshot = self._record.snapshots[outside.storage, outside.version]
            then = snapshot.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            return then.clone() if written else then
        count = self._record.counts[outside.place]
        counted = flow.version(outside.storage) == 0 and count >= 0 and not tensor.is_inference()
        if counted and tensor._version != count:
            reader = f"{row.func} in {self._name}"
            raise modified_error(f"a tensor of shape {list(tensor.shape)} that {reader} needs to run again")
        return None


class RunAll(RegionMode):
    """Computes everything again, with the random numbers of forward."""

    def __init__(self, record: Record) -> None:
        """Repeat the draws of the ops that have run so far."""
        super().__init__()
        rows = enumerate(record.ops)
        self._states = [
            (row.generator, record.states[number])
            for number, row in rows
            if row.generator and row.draw_before < 0
        ]
        self._draws = Draws()
        self._begun = False
        self.absent: list[weakref.ref[torch.UntypedStorage]] = []

    def finish(self) -> None:
        """Leave random generators as they were."""
        self._draws.put_back()

    def handle(self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an op."""
        if not self._begun and facts.draws:
            self._begun = True
            for generator, state in self._states:
                assert generator is not None
                self._draws.repeat(generator, state, 0, -1)
        return func(*args, **kwargs)


def _spared_statistics(facts: Facts, args: Any, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of running statistics that a normalisation updates without declaring it.

    They were updated in forward; recomputed, it updates a copy.
    """
    spared = {id(args[position]) for position in facts.statistics if position < len(args)}
    return {number: tensor.clone() for number, tensor in enumerate(tensors) if id(tensor) in spared}
