"""The recorder: turns operator calls, module calls and backward nodes into the rows of a trace.

Rows are kept as cheap tuples while the step runs; `assemble.py` makes the `Trace` from them at the end.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainfit.capturing.exchanges import group_of
from trainfit.capturing.ledger import Ledger, LiveStorage
from trainfit.capturing.metadata import Call
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.queues import Queues
from trainfit.capturing.rows import NO_NODE, BackwardNode, CallInProgress, Lives, Row
from trainfit.capturing.values import user_line

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def _on_host(*used: Lives) -> bool:
    """Whether an operator uses storages of the host and no others; there are some for a GPU only."""
    return any(used) and all(live.on_host for lives in used for live in lives)


class Recorder:
    """Collects the rows of the step that is being recorded."""

    def __init__(self, ledger: Ledger) -> None:
        """Start with an empty recording."""
        self.ledger = ledger
        self._thread = threading.get_ident()
        self.queues = Queues(ledger)
        self.module_index: Callable[[Any], int] = lambda module: -1
        self.module_name: Callable[[int], str] = lambda module: ""
        self.parameter_module: dict[int, int] = {}
        # Counts that torch reports, inside the dispatch mode, for a gradient buffer that nothing shares.
        self.unshared_counts: tuple[int, int] | None = None
        # What runs now, innermost last: (BACKWARD or OPTIMIZER, number of modules active when it began).
        self.contexts: list[tuple[str, int]] = []
        self.between_nodes = False
        self.node = NO_NODE
        self.creating_graph = False
        self.node_start = 0
        self.number = 0
        self.notes_lines = False
        """Whether the user's line is noted for everything that is made; it takes a while to find."""
        self.rows: list[Row] = []
        self._unit: int | None = None
        self._exchange = ""
        self.is_step = False
        """Whether a run of the step is recorded, and not how it is built."""
        self.restart()

    def restart(self) -> None:
        """Drop what was recorded and begin a new recording at time 0."""
        with self.ledger.lock:
            self._note_births()
            self.ledger.restart_clock()
            self.start_bytes = self.ledger.live_bytes
            self.number += 1
            self.rows = []
            self.calls: list[CallInProgress] = []
            self.stack: list[int] = []
            self.forward_post_order: list[int] = []
            self.backward_pre_order: list[int] = []
            self.autocast: set[str] = set()
            """Dtypes that autocast was switched on for."""
            self._arrived: list[LiveStorage] = []
            self._events = 0
            self.wrapped = self.converted = 0
            """Calls on distributed tensors, and conversions of them, since the last row."""
            self.queues.restart()
            self.backward_seen = False
            self._boundaries: list[int] = [-1]
            self._boundary_calls: list[int] = [-1]

    def _note_births(self) -> None:
        """Note where in the recording everything was made that is still alive, before that is forgotten."""
        made = [live for live in self.ledger.alive.values() if live.start >= 0]
        if not made or not self.rows or not self.is_step:
            return
        passed = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0)
        places: list[tuple[str, int]] = []
        for row in self.rows:
            places.append((row.phase, passed[row.phase]))
            passed[row.phase] += 1
        places.append((self.rows[-1].phase, passed[self.rows[-1].phase]))
        for live in made:
            live.born = places[min(live.start, len(self.rows))]

    def record(self, call: Call, reads: Lives, writes: Lives, creates: Lives) -> None:
        """Append one operator call and move the clock."""
        if threading.get_ident() != self._thread and _on_host(reads, writes, creates):
            return  # a thread that prepares data for a GPU: its timing does not belong to the step
        ledger = self.ledger
        with ledger.lock:  # another thread of the step may record as well
            phase, recompute = self._phase()
            if phase is BACKWARD and not recompute:
                module_call, module, sequence = self.node.call, self.node.module, self.node.sequence
            else:
                module_call = self.stack[-1] if self.stack else -1
                module = self.calls[module_call].module if module_call >= 0 else -1
                sequence = _sequence_number()
                if recompute and module < 0:
                    module = self.node.module
            number = ledger.clock
            for live in creates:
                live.producer_op = number
                live.exchanged = self._unit is not None
            for live in writes:
                live.first_writer = live.first_writer or call.operator.name
            module = module if self._unit is None else self._unit
            hands_over = phase is BACKWARD and self.node.parameter is not None and self._unit is None
            if creates and hands_over and self._arrived:
                self._gradient_is_a_copy(creates)
            used = (reads, writes, creates)
            row = Row(call, phase, module, module_call, recompute, sequence, *used, ledger.live_bytes)
            group = group_of(call.operator.name, call.key[1:]) if call.operator.collective else None
            row.queue, row.waits_for = self.queues.issue(group, (*reads, *writes))
            row.exchange, row.line = self._exchange, user_line() if self.notes_lines and creates else ""
            row.wrapped, row.converted = self.wrapped, self.converted
            self.wrapped = self.converted = 0
            self.rows.append(row)
            ledger.clock = number + 1

    @contextlib.contextmanager
    def exchanging_for(self, module: int | None, exchange: str) -> Iterator[None]:
        """Attribute everything to a unit of FSDP: what it does, and its module, if that is not running."""
        before = self._unit, self._exchange
        self._unit, self._exchange = module, exchange
        try:
            yield
        finally:
            self._unit, self._exchange = before

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins its step: what it finds as gradients are gradients, whoever made them."""
        for group in optimizer.param_groups:
            for gradient in (parameter.grad for parameter in group["params"]):
                # The indices of a sparse one may be the tokens themselves.
                if gradient is not None and gradient.layout is torch.strided:
                    self.ledger.is_gradient(gradient)

    def host_waits(self) -> None:
        """The host goes on only when the device is done with the last operator."""
        if self.rows:
            self.rows[-1].host_waits = True

    def last_write(self, live: LiveStorage) -> Row | None:
        """Return the last recorded operator that wrote to a storage, if one did."""
        return next((row for row in reversed(self.rows) if any(live is one for one in row.writes)), None)

    def _phase(self) -> tuple[str, bool]:
        """Return the phase of the next operator, and whether it computes something again."""
        if not self.contexts:
            if self.backward_seen and not self.stack and not torch.is_grad_enabled():
                # Clipping, unscaling, averaging: what happens to gradients and weights around the optimizer.
                return OPTIMIZER, False
            return FORWARD, False
        context, modules = self.contexts[-1]
        if context is BACKWARD:
            # Inside backward gradients are recorded only while a checkpointed part is recomputed.
            return BACKWARD, torch.is_grad_enabled() and not self.creating_graph
        # A closure that an optimizer calls (LBFGS) runs forward inside the optimizer's step.
        forward = len(self.stack) > modules or torch.is_grad_enabled()
        return (FORWARD if forward else OPTIMIZER), False

    @property
    def in_backward(self) -> bool:
        """Whether the engine is running, innermost or not."""
        return any(context is BACKWARD for context, _ in self.contexts)

    @property
    def in_engine(self) -> bool:
        """Whether the engine is what runs now, innermost."""
        return bool(self.contexts) and self.contexts[-1][0] is BACKWARD

    @property
    def accumulating(self) -> bool:
        """Whether the engine is handing a gradient to a parameter that has none yet."""
        return self.node.parameter is not None and self.node.parameter.grad is None

    def enter_context(self, context: str) -> None:
        """Backward or an optimizer's step begins."""
        self.contexts.append((context, len(self.stack)))

    def leave_context(self) -> None:
        """The innermost backward or optimizer step has ended."""
        self.contexts.pop()

    def gradient_arrives(self, gradients: Sequence[Any]) -> None:
        """A gradient reaches a parameter that has none yet: it becomes the parameter's `.grad`."""
        self._arrived = []
        for gradient in filter(torch.is_tensor, gradients):
            for part in strided_parts(gradient):
                live = self.ledger.find(part)
                # What was there before the step (the tokens in a sparse gradient) stays what it is.
                if live is not None and live.gradient_since is None and live.start >= 0:
                    live.gradient_since = self.ledger.clock
                    self._arrived.append(live)

    def _gradient_is_a_copy(self, creates: Lives) -> None:
        """Autograd could not take the arriving gradient over and copied it: the copy is the `.grad`."""
        for live in self._arrived:
            live.gradient_since = None
        for live in creates:
            live.gradient_since = live.start
        self._arrived = []

    # Module calls ---------------------------------------------------------------------------------------

    def enter_module(self, module: Any) -> int:
        """A module's forward begins; returns the number of the call."""
        number = len(self.calls)
        recompute = self.in_backward
        parent = self.stack[-1] if self.stack else -1
        self.calls.append(CallInProgress(self.module_index(module), parent, recompute, self.ledger.clock))
        self.stack.append(number)
        self._boundaries.append(_sequence_number())
        self._boundary_calls.append(number)
        return number

    def leave_module(self, number: int) -> None:
        """A module's forward has ended, normally or not."""
        if number >= len(self.calls):
            return  # the recording was restarted inside the call
        while self.stack and self.stack.pop() != number:
            pass
        self.calls[number].forward_end = self.ledger.clock
        self.forward_post_order.append(number)
        self._boundaries.append(_sequence_number())
        self._boundary_calls.append(self.stack[-1] if self.stack else -1)

    def enter_body(self, number: int) -> None:
        """The hooks before a module's `forward` are done."""
        if number < len(self.calls):
            self.calls[number].body_start = self.ledger.clock

    def leave_body(self, number: int) -> None:
        """A module's `forward` has ended, and its hooks follow."""
        if number < len(self.calls) and self.calls[number].body_start >= 0:
            self.calls[number].body_end = self.ledger.clock

    def current_module(self) -> int:
        """Return the module whose forward or backward is running, or -1."""
        if self.stack:
            return self.calls[self.stack[-1]].module
        return self.node.module if self.in_backward else -1

    # Backward nodes -------------------------------------------------------------------------------------

    def node_info(self, node: Any) -> BackwardNode:
        """Find the module call in whose forward an autograd node was made, by its sequence number."""
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            return BackwardNode(-1, self.parameter_module.get(id(parameter), -1), -1, parameter)
        # The node of a write into a view takes its number after its operator, all others before.
        name = node.name()
        sequence = node._sequence_nr() - name.endswith("CopySlices")
        call = self._boundary_calls[bisect.bisect_right(self._boundaries, sequence) - 1]
        return BackwardNode(call, self.calls[call].module if call >= 0 else -1, sequence, name=name)

    def enter_node(self, info: BackwardNode) -> None:
        """A backward node begins to run."""
        self.node = info
        self.node_start = self.ledger.clock
        self.between_nodes = False
        call = info.call
        started: list[int] = []
        while call >= 0 and self.calls[call].backward_start < 0:
            self.calls[call].backward_start = self.ledger.clock
            started.append(call)
            call = self.calls[call].parent
        self.backward_pre_order.extend(reversed(started))

    def leave_node(self, info: BackwardNode) -> None:
        """A backward node has run; what follows until the next node is the engine's own work."""
        self.between_nodes = True
        self._events += 1
        call = info.call
        while call >= 0:
            self.calls[call].backward_end = self.ledger.clock
            self.calls[call].backward_left = self._events
            call = self.calls[call].parent

    def backward_post_order(self) -> list[int]:
        """Return the calls in the order in which their backward ended, inner before outer."""
        return sorted(self.backward_pre_order, key=lambda n: (self.calls[n].backward_left, -n))
