"""Where in the step something happens, as a stack of frames: the operator, its modules, the phase.

Viewers of memory show frames as `file:line:name`, the innermost first. A frame of an operator is
`op:NUMBER:aten.mm.default`, one of a module `Linear:0:GPT2.h.0.mlp`, and the outermost `step:0:forward`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from trainfit.memory.module_stats import gradient_modules
from trainfit.traces.trace import Trace

Frame = dict[str, Any]


def frame(filename: str, line: int, name: str) -> Frame:
    """Return one frame; signs that end a name in the text forms of torch's tools are replaced."""
    return {"filename": _plain(filename), "line": line, "name": _plain(name)}


def _plain(text: str) -> str:
    return "".join(
        sign if sign.isprintable() and sign != ";" else "\N{REPLACEMENT CHARACTER}" for sign in text
    )


class OpFrames:
    """The frames of a trace's ops and storages. Lists are shared: pickles keep one of each."""

    def __init__(self, trace: Trace, libraries: tuple[str, ...] = ()) -> None:
        """Take the trace, and the names of what libraries keep: storages after those of the trace."""
        self._trace = trace
        self._libraries = libraries
        self._owner = dict(gradient_modules(trace))
        for number, module in enumerate(trace.modules):
            for storage in (*module.parameters, *module.buffers, *module.gathered):
                self._owner.setdefault(storage, number)
        self.of_op = cache(self._of_op)
        self.of_storage = cache(self._of_storage)
        self._of_module = cache(self._module_frames)
        self._of_phase = cache(self._phase_frame)

    def category(self, storage: int) -> str:
        """Return what a storage counts as."""
        if storage >= len(self._trace.storages):
            return "library"
        return "temporary" if storage < 0 else self._trace.storages[storage].category

    def _of_op(self, op: int) -> list[Frame]:
        trace = self._trace
        if not 0 <= op < len(trace.ops):
            return [self._of_phase("before the step" if op < 0 else "after the step")]
        found = trace.ops[op]
        phase = "recomputation" if found.recompute else found.phase
        return [frame("op", op, trace.op_name(op)), *self._of_module(found.module), self._of_phase(phase)]

    def _of_storage(self, storage: int, op: int) -> list[Frame]:
        """Return the frames of an allocation that belongs to an op; -1 is its kernel's workspace."""
        trace = self._trace
        if storage >= len(trace.storages):
            name = self._libraries[storage - len(trace.storages)]
            return [frame("library", 0, f"workspace of {name}"), self._of_phase("before the step")]
        if storage < 0:
            return [frame("workspace", op, "of the kernel"), *self._of_op(op)]
        kept = trace.storages[storage]
        first = frame("storage", storage, kept.category.replace("_", " "))
        if op >= 0 and not kept.persistent:
            return [first, *self._of_op(op)]
        owner = self._of_module(self._owner.get(storage, -1))
        return [first, *owner, self._of_phase("before the step")]

    def _module_frames(self, module: int) -> list[Frame]:
        found: list[Frame] = []
        while module >= 0:
            one = self._trace.modules[module]
            found.append(frame(one.class_name, 0, one.name))
            module = one.parent
        return found

    def _phase_frame(self, phase: str) -> Frame:
        return frame("step", 0, phase)
