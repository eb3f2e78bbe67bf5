"""Test traces written as text, so that a test shows the whole situation.

    x            : 400 held                 there before the step, and after it
    w            : 100 held parameter @Net  a category; with a module: what that module owns
    t            : 400                      there before the step, dies after its last use
    -- forward                              the phase from here on: forward, backward, recompute, optimizer
    a = gelu(x)  : 400                      an op that reads x and creates a, which dies after its last use
    b, c = two(a): 400 8 saved              two results; autograd holds them until their last backward reader
    v = view(a)                             no size: v is a view of its first argument
    a += add(v)                             in place: reads and writes a
    y = sum(b)   :   4 output               alive beyond the end of the step
    m = mm(a, b) : 400 workspace 64         the kernel needs 64 bytes more while it runs
    g = back(b)  : 400 for y                differentiates the op that made y
    a -> 100                                a is resized to 100 bytes before the next op

`@Net.block.mlp` after the colon says whose op it is. Module calls follow from that: the first op of a module
opens its call and those of the modules around it, an op of another one closes it. `@Net.block#2` is a second
call of `Net.block`. `@Net.b/Net.a.core` is a module called by another than its parent, `@/Net.b` by none. In
backward the same words name the call whose forward is differentiated.

Holders are as in a capture: the program until the last use (with `saved`: the last use outside of backward),
autograd until the last use in backward, `gradient` and `optimizer` for those categories.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from textwrap import dedent

from trainfit.traces.trace import (
    CATEGORIES,
    Collective,
    Interval,
    Module,
    ModuleCall,
    Op,
    Signature,
    Storage,
    TensorSpec,
    Trace,
)

OP = re.compile(r"(?:(?P<names>[\w, ]+?) *(?P<sign>\+?=) *)?(?P<op>[\w.]+)\((?P<arguments>[\w, ]*)\)")


def trace(text: str, target: str = "text", device: str = "cpu") -> Trace:
    """Return the checked trace that the text describes."""
    reader = _Reader()
    for line in dedent(text).strip().splitlines():
        if line.strip():
            reader.read(line.strip())
    found = reader.finish(target, device)
    found.check()
    return found


def count_live_bytes(trace: Trace) -> tuple[int, ...]:
    """Count the bytes alive during every op, as dumbly as possible."""
    counts = []
    for now in range(len(trace.ops)):
        total = 0
        for storage in trace.storages:
            if storage.start <= now and (storage.end is None or now < storage.end):
                sizes = [storage.bytes] + [size for time, size in storage.resizes if time <= now]
                total += sizes[-1]
        counts.append(total)
    return tuple(counts)


@dataclass
class _Words:
    """What stands after the colon."""

    sizes: list[int] = field(default_factory=list)
    category: str = ""
    module: str = ""
    kept: bool = False
    saved: bool = False
    workspace_bytes: int = 0
    differentiates: str = ""


def _words(text: str) -> _Words:
    found = _Words()
    words = iter(text.split())
    for word in words:
        if word.isdigit():
            found.sizes.append(int(word))
        elif word in ("held", "output"):
            found.kept = True
        elif word == "saved":
            found.saved = True
        elif word == "workspace":
            found.workspace_bytes = int(next(words))
        elif word == "for":
            found.differentiates = next(words)
        elif word.startswith("@"):
            found.module = word[1:]
        elif word in CATEGORIES:
            found.category = word
        else:
            raise ValueError(f"what does {word!r} mean in {text!r}?")
    return found


@dataclass
class _Block:
    """A storage while the text is being read."""

    bytes: int
    category: str
    kept: bool
    saved: bool
    start: int
    program_until: int
    saved_since: int | None = None
    saved_until: int = -1
    resizes: list[tuple[int, int]] = field(default_factory=list)

    def use(self, op: int, backward: bool) -> None:
        if self.saved and self.saved_since is None:
            self.saved_since = op
        if self.saved and backward:
            self.saved_until = op + 1
        else:
            self.program_until = max(self.program_until, op + 1)

    def storage(self) -> Storage:
        end = None if self.kept else max(self.program_until, self.saved_until)
        holders = [Interval("program", self.start, None if self.kept else self.program_until)]
        if self.saved:
            assert self.saved_since is not None and self.saved_until >= 0, (
                "saved, but backward never reads it"
            )
            holders.append(Interval("autograd", self.saved_since, self.saved_until))
        if self.category in ("gradient", "optimizer_state"):
            holders.append(Interval(self.category.removesuffix("_state"), self.start, end))
        return Storage(
            bytes=self.bytes,
            category=self.category,
            producer=self.start,
            start=self.start,
            end=end,
            holders=tuple(holders),
            resizes=tuple(self.resizes),
        )


class _Modules:
    """The module table, and the calls that follow from whose ops run."""

    def __init__(self) -> None:
        self.owned: dict[str, dict[str, list[int]]] = {}
        self.calls: list[ModuleCall] = []
        self.post_order: list[int] = []
        self._open: list[tuple[str, int]] = []
        self._latest: dict[str, int] = {}
        self._closed: set[str] = set()

    def own(self, module: str, category: str, storage: int) -> None:
        self.number(module)
        self.owned[module].setdefault(category, []).append(storage)

    def number(self, module: str) -> int:
        parent = module.rpartition(".")[0]
        if parent:
            self.number(parent)
        self.owned.setdefault(module, {})
        return list(self.owned).index(module)

    def table(self) -> tuple[Module, ...]:
        names = list(self.owned)
        return tuple(
            Module(
                name=name,
                class_name=name.rpartition(".")[2].capitalize(),
                parent=names.index(parent) if (parent := name.rpartition(".")[0]) else -1,
                parameters=tuple(own.get("parameter", ())),
                buffers=tuple(own.get("buffer", ())),
            )
            for name, own in self.owned.items()
        )

    def forward(self, words: str, op: int, recompute: bool) -> int:
        """Close and open calls so that op number `op` runs in the call that the words name."""
        path = _call_path(words)
        while [key for key, _ in self._open] != path[: len(self._open)]:
            self._close(op)
        for key in path[len(self._open) :]:
            if key in self._closed:
                raise ValueError(f"the call {key} has ended; write {key}#2 for another one")
            parent = self._open[-1][1] if self._open else -1
            module = self.number(_module_of(key))
            self._open.append((key, len(self.calls)))
            if not recompute:
                self._latest[key] = len(self.calls)
            self.calls.append(ModuleCall(module, parent, recompute, op, op, -1, -1))
        return self._open[-1][1] if self._open else -1

    def backward(self, words: str, op: int) -> int:
        """Note that op number `op` belongs to the backward of the call that the words name."""
        path = _call_path(words)
        for call in (self._latest[key] for key in path):
            start = self.calls[call].backward_start
            self._change(call, backward_start=op if start < 0 else start, backward_end=op + 1)
        return self._latest[path[-1]] if path else -1

    def close_all(self, op: int) -> None:
        """End every call; in the next section the same words are new calls."""
        while self._open:
            self._close(op)
        self._closed.clear()

    def _close(self, op: int) -> None:
        key, call = self._open.pop()
        self._change(call, forward_end=op)
        self._closed.add(key)
        self.post_order.append(call)

    def _change(self, call: int, **changes: int) -> None:
        self.calls[call] = replace(self.calls[call], **changes)


def _call_path(words: str) -> list[str]:
    """Return the calls around an op: `Net.a#2/Net.c` is Net, Net.a#2, Net.a#2/Net.c."""
    first, *others = words.split("/")
    parts = first.split(".") if first else []
    path = [".".join(parts[: n + 1]) for n in range(len(parts))]
    for other in others:
        path.append(f"{path[-1] if path else ''}/{other}")
    return path


def _module_of(key: str) -> str:
    return re.sub(r"#\d+", "", key.rpartition("/")[2])


class _Reader:
    """Reads line after line, then makes the trace."""

    def __init__(self) -> None:
        self.section = "forward"
        self.names: dict[str, int] = {}
        self.made_by: dict[str, int] = {}
        self.blocks: list[_Block] = []
        self.ops: list[Op] = []
        self.signatures: dict[Signature, int] = {}
        self.modules = _Modules()

    def read(self, line: str) -> None:
        if line.startswith("--"):
            self.section = line.removeprefix("--").strip()
            assert self.section in ("forward", "backward", "recompute", "optimizer"), line
            self.modules.close_all(len(self.ops))
        elif "->" in line:
            name, size = line.split("->")
            self.resize(name.strip(), int(size))
        else:
            left, _, right = (part.strip() for part in line.partition(":"))
            match = OP.fullmatch(left)
            if match:
                self.op(match, _words(right))
            else:
                self.before(left, _words(right))

    def before(self, name: str, words: _Words) -> None:
        assert name.isidentifier() and len(words.sizes) == 1, f"not understood: {name}"
        self.block(name, words.sizes[0], words, start=-1)
        if words.module:
            self.modules.own(words.module, words.category, self.names[name])

    def block(self, name: str, size: int, words: _Words, start: int) -> int:
        """Add a storage; without a category it gets the one that capture would give it."""
        inside = "activation" if self.section in ("forward", "recompute") else "temporary"
        category = words.category or (inside if start >= 0 else "input")
        self.names[name] = len(self.blocks)
        self.blocks.append(_Block(size, category, words.kept, words.saved, start, start + 1))
        return self.names[name]

    def resize(self, name: str, size: int) -> None:
        block, now = self.blocks[self.names[name]], len(self.ops)
        block.resizes.append((now, size))
        block.program_until = max(block.program_until, now)

    def op(self, match: re.Match[str], words: _Words) -> None:
        number, recompute = len(self.ops), self.section == "recompute"
        reads, writes, creates = self.storages_of(match, words)
        for block in (*reads, *writes, *creates):
            self.blocks[block].use(number, self.section == "backward")
        if self.section == "backward":
            call = self.modules.backward(words.module, number)
        else:
            call = self.modules.forward(words.module, number, recompute)
        communicates = words.category == "communication"
        signature = Signature(
            name=match["op"],
            inputs=tuple(self.spec(block) for block in reads),
            outputs=tuple(self.spec(block) for block in creates),
            arguments="[[],{}]",
            view=bool(match["names"]) and not writes and not creates,
            in_place=bool(writes),
            random=False,
            collective=Collective("all_gather", 8, "0", sum(words.sizes)) if communicates else None,
            workspace_bytes=words.workspace_bytes,
            workspace_source="formula" if words.workspace_bytes else "none",
        )
        self.ops.append(
            Op(
                signature=self.signatures.setdefault(signature, len(self.signatures)),
                phase="backward" if recompute else self.section,
                module=self.modules.calls[call].module if call >= 0 else -1,
                call=call,
                recompute=recompute,
                forward_op=self.made_by[words.differentiates] if words.differentiates else -1,
                reads=reads,
                writes=writes,
                creates=creates,
            )
        )
        self.made_by.update((name, number) for name in _split(match["names"]))

    def storages_of(self, match: re.Match[str], words: _Words) -> tuple[tuple[int, ...], ...]:
        """Return what an op reads, writes and creates; its results get their names."""
        names = _split(match["names"])
        reads = tuple(self.names[name] for name in _split(match["arguments"]))
        if match["sign"] == "+=":
            writes = tuple(self.names[name] for name in names)
            return (*writes, *reads), writes, ()
        if not words.sizes:
            self.names.update((name, reads[0]) for name in names)
            return reads, (), ()
        made = zip(names, words.sizes, strict=True)
        return reads, (), tuple(self.block(name, size, words, len(self.ops)) for name, size in made)

    def spec(self, block: int) -> TensorSpec:
        return TensorSpec("uint8", (self.blocks[block].bytes,), (1,))

    def finish(self, target: str, device: str) -> Trace:
        self.modules.close_all(len(self.ops))
        calls = self.modules.calls
        backwards = [number for number, call in enumerate(calls) if call.backward_start >= 0]
        found = Trace(
            target=target,
            device=device,
            torch="2.13.0",
            signatures=tuple(self.signatures),
            ops=tuple(self.ops),
            storages=tuple(block.storage() for block in self.blocks),
            modules=self.modules.table(),
            calls=tuple(calls),
            forward_post_order=tuple(self.modules.post_order),
            backward_pre_order=tuple(sorted(backwards, key=lambda n: (calls[n].backward_start, n))),
            backward_post_order=tuple(sorted(backwards, key=lambda n: (calls[n].backward_end, -n))),
            observed_peak_bytes=0,
            model=0 if self.modules.owned else -1,
        )
        peak = max(count_live_bytes(found), default=found.persistent_bytes)
        return replace(found, observed_peak_bytes=peak)


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]
