"""Forward of a region: every op is matched with the plan, and what is needed to run it again is noted.

Kept are the storages that the plan saves and one generator state per chain of random draws; of the rest
only a description. What will really be recomputed is decided at the end of the region, from what the ops
read and wrote and what autograd saved: a plan decides what is kept, it cannot make a result wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from trainfit.applying.following import Follower
from trainfit.applying.modes import Facts, RegionMode, is_plain, is_weight_cast
from trainfit.applying.op_results import (
    CONSTANTS,
    Alias,
    Argument,
    Constant,
    Created,
    Result,
    TensorLayout,
    can_be_absent,
    has_storage,
    parts_of,
    tensors_in,
)
from trainfit.applying.randomness import generator_of, state_of
from trainfit.applying.records import VALUE, VIEW, CountedTensor, LastDraw, OpCall, OpRecord, Record
from trainfit.capturing.exchanges import outputs_of
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.schemas import Operator, aten
from trainfit.operators.collectives import fills_outputs
from trainfit.plans.decisions import Decision
from trainfit.plans.recomputation import NOBODY, Rerun, copied_before_write, rerun, starts_stream

_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
_NO_SIZE = (0, torch.device("cpu"))
"""Of what was there before the region: it is never made again."""


class RegionRecorder(RegionMode):
    """Runs the ops of a region's forward and records them."""

    def __init__(self, follower: Follower, inputs: Iterable[torch.Tensor], module: torch.nn.Module) -> None:
        """Follow a plan; the region's inputs and the module's weights are there before it and after it."""
        super().__init__()
        self.record = Record()
        self.follower = follower
        self._module = module
        self._inputs = {_storage_id(tensor) for tensor in inputs if has_storage(tensor)}
        self._permanent: set[int] | None = None
        self._number_of: dict[int, int] = {}
        self._uninitialised: set[int] = set()
        self._was_read: set[tuple[int, int]] = set()
        """What was read, up to some op and some need; asked only where something outside is written to."""
        self._looked_at = (0, 0)
        self._needs: list[tuple[tuple[int, int], weakref.ref[Any] | None]] = []
        self._draws: dict[torch.Generator, LastDraw] = {}
        self._for_host: set[int] = set()

    # Storages -------------------------------------------------------------------------------------------

    def _storage(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; one that no op of the region made is from outside."""
        number = self._number_of.get(_storage_id(tensor))
        return self._enter(tensor, NOBODY) if number is None else number

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage if an op of the region or autograd in it touched it."""
        number: int = self._number_of.get(_storage_id(tensor), NOBODY) if has_storage(tensor) else NOBODY
        return number

    def _enter(self, tensor: torch.Tensor, maker: int) -> int:
        number = self.record.flow.storage(maker)
        self._number_of[_storage_id(tensor)] = number
        size = _NO_SIZE if maker == NOBODY else (tensor.untyped_storage().nbytes(), tensor.device)
        self.record.sizes.append(size)
        return number

    def _is_permanent(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a storage was there before the region; asked only of those that are written to."""
        if self.record.flow.makers[number][0] != NOBODY:
            return False
        if self._permanent is None:
            weights = (*self._module.parameters(), *self._module.buffers())
            parts = (part for weight in weights for part in parts_of(weight))
            self._permanent = {_storage_id(part) for part in parts if has_storage(part)} | self._inputs
        if _storage_id(tensor) not in self._permanent:
            return False
        self.record.flow.permanent.add(number)
        return True

    def _read(self, tensor: torch.Tensor) -> tuple[int, int]:
        number = self._storage(tensor)
        version = (number, self.record.flow.version(number))
        if number in self._uninitialised and version[1] == 0 and tensor.numel():
            self.record.flow.unseen_writes = True
        return version

    def _count(self, tensor: torch.Tensor) -> int:
        """Return torch's count of writes to what was there before the region, unless it is an input."""
        return -1 if _storage_id(tensor) in self._inputs or tensor.is_inference() else tensor._version

    def _is_read_so_far(self, version: tuple[int, int]) -> bool:
        ops, needs = self._looked_at
        for row in self.record.ops[ops:]:
            self._was_read.update(row.reads)
        self._was_read.update(need for need, _ in self._needs[needs:])
        self._looked_at = len(self.record.ops), len(self._needs)
        return version in self._was_read

    def _keep(self, number: int, tensor: torch.Tensor) -> None:
        if number not in self.record.kept and self.record.flow.makers[number][0] != NOBODY:
            # With this key torch shares the count of writes between the two.
            with torch._C._SetExcludeDispatchKeyGuard(_IN_PLACE_OR_VIEW, False):
                self.record.kept[number] = CountedTensor(tensor.detach(), number)

    # Operators ------------------------------------------------------------------------------------------

    def handle(self, facts: Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of the region and note what it did."""
        if facts.asks_for_values:
            value = func(*args, **kwargs)
            self._append(OpRecord(func=func, kind=VALUE, result=Constant(value)))
            return value
        operator, storages_before = facts.operator, len(self.record.flow.makers)
        cast = is_weight_cast(func, args, kwargs)
        decision = self.follower.decision(operator.name, weight_cast=cast)
        if operator.is_view:
            if func is aten.lift_fresh.default:
                self._enter(args[0], NOBODY)
            self._append(OpRecord(func=func, kind=VIEW))
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        written = list(filter(has_storage, operator.written(args, kwargs))) if operator.mutated else []
        row = OpRecord(func=func)
        if fills_outputs(operator.name):
            # All ranks run it again, or none: what one of them keeps must not decide.
            row.must_run = True
            written = list(filter(has_storage, outputs_of(func, args)))
        self._note_reads(row, facts, tensors, written)
        for argument in self.follower.host_inputs:
            self._note_host_input(tensors, argument)
        draw_before = None
        if facts.draws:
            generator = generator_of(args, kwargs, tensors)
            draw_before = self._draws.get(generator)
            self._note_draw(row, decision, generator)
        out = func(*args, **kwargs)
        self.follower.made(func, out)
        if written:
            self._note_writes(row, written)
        row.result = self._describe(row, operator, out, tensors)
        if decision.behaviour.restored:
            self._save(row, out, written, decision.behaviour.on_host)
        if cast:
            row.cast = True
            self._note_cast(row, args[0])
        self._append(row, OpCall(facts, args, kwargs, tensors, out, decision, storages_before, draw_before))
        return out

    def handle_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator; it will run again, on true values."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads = [self._read(tensor) for tensor in tensors if has_storage(tensor)]
        self._append(OpRecord(func=func, must_run=True, reads=reads))
        return func(*args, **kwargs)

    def handle_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no part of the region; what it makes may have the place of something that is gone."""
        out = func(*args, **kwargs)
        if self._number_of:
            given = {_storage_id(tensor) for tensor in tensors_in(args, kwargs) if has_storage(tensor)}
            for tensor in tensors_in((out,), {}):
                if has_storage(tensor) and _storage_id(tensor) not in given:
                    self._number_of.pop(_storage_id(tensor), None)
        return out

    def _append(self, row: OpRecord, call: OpCall | None = None) -> None:
        """Add an op; with the call, if it is one that computes."""
        self.record.ops.append(row)

    def _note_cast(self, row: OpRecord, weight: torch.Tensor) -> None:
        self.record.weights[len(self.record.ops)] = _storage_id(weight)
        # Autocast puts the result into its cache, also when it is recomputed: it must have values.
        self._needs.extend(((storage, 0), None) for storage in row.creates)

    def _note_reads(
        self, row: OpRecord, facts: Facts, tensors: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        flow = self.record.flow
        written_ids = {_storage_id(tensor) for tensor in written}
        reads: dict[tuple[int, int], None] = {}
        for argument, tensor in enumerate(tensors):
            if not has_storage(tensor):
                row.must_run = True
                continue
            identity, number = _storage_id(tensor), self._storage(tensor)
            if flow.makers[number][0] == NOBODY and not facts.reads_metadata_only:
                row.outside.append(self.record.outside(argument, number, self._count(tensor)))
            if identity in written_ids:
                self._before_write(number, flow.version(number), tensor, facts.operator)
            elif not facts.reads_metadata_only:
                reads[self._read(tensor)] = None
            if number in flow.permanent and identity not in self._inputs and not tensor.is_inference():
                self.record.left[id(tensor)] = CountedTensor(tensor, number)
        row.reads = list(reads)

    def _note_host_input(self, tensors: list[torch.Tensor], argument: int) -> None:
        """Remember an input that the plan has in the host's memory until backward."""
        tensor = tensors[argument] if argument < len(tensors) else None
        if tensor is not None and has_storage(tensor) and _storage_id(tensor) in self._inputs:
            self.record.inputs_for_host.add(self._storage(tensor))

    def _before_write(self, number: int, version: int, tensor: torch.Tensor, operator: Operator) -> None:
        """Keep a copy of what lies outside and is about to be overwritten, where an op may need it again."""
        if not self._is_permanent(number, tensor):
            return
        makes_more = any(argument is None for argument in operator.returned)
        if copied_before_write(was_read=self._is_read_so_far((number, version)), makes_more=makes_more):
            whole = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.record.snapshots[number, version] = tensor.as_strided((whole,), (1,), 0).clone()

    def _note_writes(self, row: OpRecord, written: list[torch.Tensor]) -> None:
        flow, position = self.record.flow, len(self.record.ops)
        writes: dict[int, int] = {}
        for tensor in written:
            number = self._storage(tensor)
            if number not in writes:
                flow.makers[number].append(position)
                writes[number] = flow.version(number)
        row.writes = list(writes.items())

    def _note_draw(self, row: OpRecord, decision: Decision, generator: torch.Generator) -> None:
        last = self._draws.get(generator) or LastDraw(len(self._draws), NOBODY, None)
        row.generator = generator
        row.stream, row.draw_before, decision_before = last
        row.starts_stream = starts_stream(decision, decision_before)
        self._draw(row, decision)

    def _draw(self, row: OpRecord, decision: Decision) -> None:
        """Remember the generator's state before a draw, if it starts a stream."""
        assert row.generator is not None
        if row.starts_stream:
            self.record.states[len(self.record.ops)] = state_of(row.generator)
        self._draws[row.generator] = LastDraw(row.stream, len(self.record.ops), decision)

    def _describe(self, row: OpRecord, operator: Operator, value: Any, tensors: list[torch.Tensor]) -> Result:
        """Describe what an op returned, entering the storages that it made."""
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(row, operator, value, tensors)
        if isinstance(value, list | tuple):
            return type(value)([self._describe(row, operator, item, tensors) for item in value])
        if not isinstance(value, CONSTANTS):
            row.must_run = True
            return Constant(None)
        return Constant(value)

    def _describe_tensor(
        self, row: OpRecord, operator: Operator, tensor: torch.Tensor, tensors: list[torch.Tensor]
    ) -> Result:
        for number, argument in enumerate(tensors):
            if argument is tensor:
                return Argument(number)
        if not has_storage(tensor):
            row.must_run = True
            return Constant(None)
        odd = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
        row.must_run |= odd or not can_be_absent(tensor)
        identity = _storage_id(tensor)
        for number, argument in enumerate(tensors):
            if has_storage(argument) and _storage_id(argument) == identity:
                return Alias(number, TensorLayout.of(tensor))
        storage = self._number_of.get(identity, NOBODY)
        if storage not in row.creates:
            storage = self._enter(tensor, len(self.record.ops))
            row.creates = (*row.creates, storage)
            if operator.uninitialised:
                self._uninitialised.add(storage)
        return Created(storage, TensorLayout.of(tensor))

    def _save(self, row: OpRecord, out: Any, written: list[torch.Tensor], on_host: bool) -> None:
        for tensor in (*tensors_in((out,), {}), *written):
            if has_storage(tensor):
                number = self._storage(tensor)
                if number in row.creates or any(number == changed for changed, _ in row.writes):
                    self._keep(number, tensor)
                    if on_host:
                        self._for_host.add(number)

    # What is needed later -------------------------------------------------------------------------------

    def noting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Return `pack`, which autograd calls with what it saves, so that it is noted."""
        numbers, makers = self._number_of, self.record.flow.makers
        needs, uninitialised = self._needs, self._uninitialised

        def pack_and_note(tensor: torch.Tensor) -> Any:
            holder = pack(tensor)
            try:
                number = numbers.get(_storage_id(tensor))
            except NotImplementedError:  # a sparse tensor has no storage of its own
                number = None
            if number is None or number in uninitialised:
                self._note_saved(tensor, holder)
            else:
                needs.append(((number, len(makers[number]) - 1), weakref.ref(holder)))
            return holder

        return pack_and_note

    def _note_saved(self, tensor: torch.Tensor, holder: Any) -> None:
        """Autograd has saved a tensor, for as long as `holder` lives."""
        plain = is_plain(type(tensor)) and has_storage(tensor)
        for part in (tensor,) if plain else strided_parts(tensor):
            if plain or torch._C._has_storage(part):
                self._needs.append((self._read(part), weakref.ref(holder)))

    def value_read(self, tensor: torch.Tensor) -> None:
        """Python code reads the values of a tensor without an operator call."""
        self.record.values_read = True
        if has_storage(tensor):
            self._needs.append((self._read(tensor), None))

    def finish(self, *, complete: bool = False) -> Record:
        """The region has ended: decide what will run again, and let go of what that does not need.

        `complete`: every result will have its values again, because someone else looks at them.
        """
        record = self.record
        self.follower.finish()
        record.flow.needed = [need for need, alive in self._needs if alive is None or alive() is not None]
        if complete:
            record.flow.needed += [(n, record.flow.version(n)) for n in range(len(record.flow.makers))]
        record.rerun = self._rerun()
        record.kept = {n: kept for n, kept in record.kept.items() if n in record.rerun.restored}
        record.for_host = [number for number in record.kept if number in self._for_host]
        for counted in (*record.kept.values(), *record.left.values()):
            counted.writes = counted.tensor._version
        return record

    def _rerun(self) -> Rerun:
        return rerun(self.record.flow, self.record.kept)
