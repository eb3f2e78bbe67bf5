"""The trace of a compiled step: that of the eager step with the kernels of compiled graphs in place of ops.

What is not compiled (the loss outside of the model, the optimizer) stays as it was captured. Where a compiled
module was called there are the kernels of its graphs, and where its backward began those of theirs, last
graph first. A buffer that forward hands to backward lives until the last kernel that reads it; gradients and
what the module returned as long as in the eager step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainfit.compiling.compiled_parts import CompiledPart, compiled_parts
from trainfit.compiling.graph_runs import GraphRun
from trainfit.compiling.kernel_calls import KernelCall, KernelRun
from trainfit.compiling.step_graphs import GraphCall
from trainfit.traces.trace import Interval, Module, ModuleCall, Op, Signature, Storage, Trace

_TIMES = ("forward_start", "forward_end", "backward_start", "backward_end", "body_start", "body_end")
"""What of a module call is counted in ops."""


@dataclass(frozen=True)
class CompiledTrace:
    """The trace of a compiled step."""

    trace: Trace
    kernels: tuple[bool, ...]
    """Whether each of its ops is a kernel of compiled code."""


def compiled_trace(trace: Trace, runs: Sequence[GraphRun], calls: Sequence[GraphCall]) -> CompiledTrace:
    """Return the trace of a step whose graphs are compiled; `calls` are those before backward, in order.

    Where the step calls a compiled module again after backward, the same graphs run.
    """
    made = _Compiled(trace, runs, calls)
    return CompiledTrace(made.trace(), made.kernels)


class _Compiled:
    """Puts the new step together, op by op."""

    def __init__(self, trace: Trace, runs: Sequence[GraphRun], calls: Sequence[GraphCall]) -> None:
        self._old = trace
        self._runs = runs
        self._parts = list(compiled_parts(trace, calls))
        self._ops: list[tuple[Op, bool]] = []
        """The ops of the new step, and whether they are kernels of compiled code."""
        self._signatures = list(trace.signatures)
        self._known: dict[Signature, int] = {s: n for n, s in enumerate(trace.signatures)}
        self._modules = {module.name: n for n, module in enumerate(trace.modules)}
        self._place: list[int] = []
        """For each op of the eager step, and its end, where the new step is then."""
        self._stays: list[bool] = []
        self._storages: list[Storage] = []
        self._gradients: dict[int, list[int]] = {}
        """Those that compiled graphs make in place of the eager step, by size."""
        self._number: dict[int, int] = {}
        """The new number of each storage of the eager step that is still there."""
        self._reads: dict[int, list[int]] = {}
        """The storages that each kernel reads and makes, by its place."""
        self._makes: dict[int, list[int]] = {}

    @property
    def kernels(self) -> tuple[bool, ...]:
        return tuple(is_kernel for _, is_kernel in self._ops)

    def trace(self) -> Trace:
        self._lay_out()
        self._keep_storages()
        for part in self._parts:
            self._add_buffers(part)
        old = self._old
        calls, numbers = self._calls()
        orders = (old.forward_post_order, old.backward_pre_order, old.backward_post_order)
        post, before, after = (tuple(numbers[c] for c in order if c in numbers) for order in orders)
        return replace(
            old,
            target=f"{old.target}, compiled",
            signatures=tuple(self._signatures),
            ops=tuple(self._finished(place, numbers) for place in range(len(self._ops))),
            storages=tuple(self._storages),
            modules=tuple(self._owning(module) for module in old.modules),
            calls=calls,
            forward_post_order=post,
            backward_pre_order=before,
            backward_post_order=after,
            observed_peak_bytes=None,
            releases=(),
        )

    # What runs ---------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        forward = {number: part for part in self._parts for number in part.forward}
        backward = {call: part for part in self._parts for call in part.inside}
        again = {op: part for part in self._parts for op in part.again}
        for number, op in enumerate(self._old.ops):
            self._place.append(len(self._ops))
            part = forward.get(number)
            if part is not None and not part.forward_at:
                self._run_forward(part)
            elif part is None and op.phase == "backward":
                part = again.get(number) or backward.get(op.call)
                if part is not None and not part.backward_at:
                    self._run_backward(part)
            self._stays.append(part is None)
            if part is None:
                self._ops.append((op, False))
        self._place.append(len(self._ops))

    def _run_forward(self, part: CompiledPart) -> None:
        for graph in part.graphs:
            part.forward_at.append(len(self._ops))
            for kernel in self._runs[graph].forward.calls:
                self._add_kernel(kernel, part, "forward")

    def _run_backward(self, part: CompiledPart) -> None:
        for place in reversed(range(len(part.graphs))):
            run = self._runs[part.graphs[place]]
            part.backward_at[place] = len(self._ops)
            for call in run.backward.calls:
                self._add_kernel(call, part, "backward")

    def _add_kernel(self, call: KernelCall, part: CompiledPart, phase: str) -> None:
        if call.signature not in self._known:
            self._known[call.signature] = len(self._signatures)
            self._signatures.append(call.signature)
        name = f"{part.module}.{call.module}" if call.module else part.module
        module = self._modules.get(name, self._modules[part.module])
        op = Op(self._known[call.signature], phase, module, -1, call.again, -1, (), (), ())
        self._ops.append((op, True))

    # What is alive -----------------------------------------------------------------------------------------

    def _keep_storages(self) -> None:
        for number, storage in enumerate(self._old.storages):
            if storage.producer >= 0 and not self._stays[storage.producer]:
                if storage.category == "gradient":
                    self._gradients.setdefault(storage.bytes, []).append(number)
                continue
            start = storage.start if storage.start < 0 else self._place[storage.start]
            producer = -1 if storage.producer < 0 else self._place[storage.producer]
            end = self._moved(storage.end)
            self._number[number] = len(self._storages)
            self._storages.append(
                replace(
                    storage,
                    producer=producer,
                    start=start,
                    end=end,
                    holders=tuple(self._held(interval, start, end) for interval in storage.holders),
                    resizes=tuple((self._place[time], size) for time, size in storage.resizes),
                    born=storage.born if storage.born < 0 else self._place[storage.born],
                )
            )

    def _moved(self, time: int | None) -> int | None:
        return None if time is None else self._place[time]

    def _held(self, interval: Interval, start: int, end: int | None) -> Interval:
        begin = interval.start if interval.start < 0 else self._place[interval.start]
        return replace(interval, start=max(begin, start), end=self._moved(interval.end))

    def _add_buffers(self, part: CompiledPart) -> None:
        escaping = self._escaping(part)
        for place, graph in enumerate(part.graphs):
            run = self._runs[graph]
            base = part.forward_at[place]
            back = part.backward_at.get(place)
            until = {name: self._saved_until(run, name, back) for name, _ in run.saved}
            returned = set(run.returned)
            made: dict[str, int] = {}
            for buffer in run.forward.buffers:
                end = None if buffer.end is None else base + buffer.end + 1
                known = -1
                if buffer.end is None:
                    ends = [until[buffer.name]] if buffer.name in until else []
                    if buffer.name in returned:
                        known, later = self._returned_until(part, place, buffer.bytes, escaping)
                        ends.append(later)
                    end = None if None in ends else max((e for e in ends if e is not None), default=base)
                    end = None if end is None else max(end, base + len(run.forward.calls))
                kept = "activation" if buffer.end is None else "temporary"
                made[buffer.name] = self._add(
                    buffer.bytes, kept, base + buffer.start, end, buffer.name in until
                )
                if known >= 0:
                    self._number[known] = made[buffer.name]
            self._note_reads(base, run.forward, made)
            if back is not None:
                self._add_backward(
                    run, back, {taken: made[name] for name, taken in run.saved if name in made}
                )

    def _add_backward(self, run: GraphRun, base: int, taken: dict[str, int]) -> None:
        gradients = set(run.gradients)
        made = dict(taken)
        for buffer in run.backward.buffers:
            if buffer.start < 0:
                continue  # it was made by forward
            end, known = None if buffer.end is None else base + buffer.end + 1, -1
            if buffer.end is None:
                known = self._gradient(buffer.bytes) if buffer.name in gradients else -1
                end = self._moved(self._old.storages[known].end) if known >= 0 else self._after(base, run)
                end = None if end is None else max(end, self._after(base, run))
            kind = "gradient" if known >= 0 else "temporary"
            made[buffer.name] = self._add(buffer.bytes, kind, base + buffer.start, end, False)
            if known >= 0:
                self._number[known] = made[buffer.name]
        self._note_reads(base, run.backward, made)
        for size, last in run.tangents:
            self._free_tangent(size, base, base + last + 1, self._after(base, run))

    def _free_tangent(self, size: int, begin: int, end: int, after: int) -> None:
        """Free a gradient that eager code made for a graph with its last reader: compiled code does so.

        But for the one that `backward()` begins with, which it keeps itself.
        """
        for number, storage in enumerate(self._storages):
            op, is_kernel = self._ops[max(storage.start, 0)]
            made_outside = 0 <= storage.start < begin and not is_kernel and op.phase == "backward"
            if made_outside and storage.bytes == size and storage.end == after and end < after:
                held = [replace(i, end=end) if i.end == after else i for i in storage.holders]
                self._storages[number] = replace(storage, end=end, holders=tuple(held))
                return

    def _after(self, base: int, run: GraphRun) -> int:
        return base + len(run.backward.calls)

    def _add(self, size: int, category: str, start: int, end: int | None, saved: bool) -> int:
        holders = [Interval("program", start, end)]
        if saved:
            holders.append(Interval("autograd", start, end))
        if category == "gradient":
            holders.append(Interval("gradient", start, end))
        number = len(self._storages)
        self._storages.append(Storage(size, category, start, start, end, tuple(holders)))
        self._makes.setdefault(start, []).append(number)
        return number

    def _note_reads(self, base: int, run: KernelRun, made: dict[str, int]) -> None:
        for place, call in enumerate(run.calls):
            found = [made[name] for name in call.reads if name in made]
            alive = [n for n in found if self._storages[n].alive_at(base + place)]
            self._reads.setdefault(base + place, []).extend(alive)

    def _saved_until(self, run: GraphRun, name: str, back: int | None) -> int | None:
        """Return when a buffer that is handed to backward is free."""
        if back is None:
            return None
        names = {taken for buffer, taken in run.saved if buffer == name}
        given = [buffer for buffer in run.backward.buffers if buffer.start < 0 and buffer.name in names]
        if len(given) < len(names) or any(buffer.end is None for buffer in given):
            return self._after(back, run)
        return back + 1 + max(buffer.end for buffer in given if buffer.end is not None)

    def _returned_until(
        self, part: CompiledPart, place: int, size: int, escaping: list[int]
    ) -> tuple[int, int | None]:
        """Return which storage of the eager step something returned is, and until when it is there."""
        if place == len(part.graphs) - 1:
            for number in escaping:
                if self._old.storages[number].bytes == size:
                    escaping.remove(number)
                    return number, self._moved(self._old.storages[number].end)
        # The next graph of the same call keeps what it was given for its own backward.
        user = min(place + 1, len(part.graphs) - 1)
        back = part.backward_at.get(user)
        return -1, None if back is None else self._after(back, self._runs[part.graphs[user]])

    def _escaping(self, part: CompiledPart) -> list[int]:
        """Return the storages that the eager call makes and that are read after it in forward, or stay."""
        found = []
        for number, storage in enumerate(self._old.storages):
            if storage.producer not in part.forward or not storage.alive_at(part.forward.stop):
                continue
            later = (
                reader >= part.forward.stop and self._old.ops[reader].phase == "forward"
                for reader in self._old.readers[number]
            )
            if storage.end is None or any(later):
                found.append(number)
        return found

    def _gradient(self, size: int) -> int:
        """Return a gradient of the eager step that a compiled backward makes, and that is not found yet."""
        left = self._gradients.get(size)
        return left.pop(0) if left else -1

    # The tables --------------------------------------------------------------------------------------------

    def _finished(self, place: int, calls: dict[int, int]) -> Op:
        """Return an op with the numbers that calls, ops and storages have now."""
        op, is_kernel = self._ops[place]
        if is_kernel:
            reads, made = self._reads.get(place, []), self._makes.get(place, [])
            return replace(op, reads=tuple(dict.fromkeys(reads)), creates=tuple(made))
        stays = self._stays
        differentiated = op.forward_op >= 0 and stays[op.forward_op]
        return replace(
            op,
            call=calls.get(op.call, -1),
            forward_op=self._place[op.forward_op] if differentiated else -1,
            reads=self._there(op.reads, place),
            writes=self._there(op.writes, place),
            creates=self._there(op.creates, place),
            waits_for=tuple(n if n < 0 else self._place[n] for n in op.waits_for if n < 0 or stays[n]),
        )

    def _there(self, storages: Sequence[int], place: int) -> tuple[int, ...]:
        """Return the new numbers of storages, of those that are there when an op runs."""
        found = [self._number[storage] for storage in storages if storage in self._number]
        return tuple(number for number in found if self._storages[number].alive_at(place))

    def _owning(self, module: Module) -> Module:
        owned = [
            tuple(self._number[storage] for storage in storages if storage in self._number)
            for storages in (module.parameters, module.buffers, module.gathered)
        ]
        return replace(module, parameters=owned[0], buffers=owned[1], gathered=owned[2])

    def _calls(self) -> tuple[tuple[ModuleCall, ...], dict[int, int]]:
        """Return the module calls that are left, those around and beside compiled ones, and their numbers."""
        inner = {n for part in self._parts for n in part.inside if n != part.call}
        numbers: dict[int, int] = {}
        found: list[ModuleCall] = []
        for number, call in enumerate(self._old.calls):
            if number in inner:
                continue
            numbers[number] = len(found)
            times = {name: getattr(call, name) for name in _TIMES}
            moved = {name: time if time < 0 else self._place[time] for name, time in times.items()}
            found.append(replace(call, parent=numbers.get(call.parent, -1), **moved))
        return tuple(found), numbers
