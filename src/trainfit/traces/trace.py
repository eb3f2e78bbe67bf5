"""`Trace`: one steady training step as plain data. What every later stage reads, and nothing else.

Time is counted in operators. A storage with `start=7, end=9` is alive while ops 7 and 8 run. What was there
before the step has `start=-1`; what is still there after it has `end=None`.

A storage's `holders` say who kept it alive and when: the `program` (Python variables, and the engine's own
buffers), `autograd` (saved for backward, one interval per saved tensor), `gradient` (it is some parameter's
`.grad`), `optimizer` (it is optimizer state). The storage is free when the last of them lets go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from trainfit.traces.assumptions import Assumption
from trainfit.traces.memory_model import MemoryModel, memory_model
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.settings import UNKNOWN_SETTINGS, Settings
from trainfit.traces.step_runs import USUAL_STEPS, Steps

PHASES = ("forward", "backward", "optimizer")
CATEGORIES = (
    *("parameter", "buffer", "gradient", "activation", "optimizer_state", "input", "temporary"),
    "communication",
)
HOLDERS = ("program", "autograd", "gradient", "optimizer")
WORKSPACE_SOURCES = ("none", "formula", "measured", "unknown")
TF32_KINDS = ("matmul", "convolution")
WORK_SOURCES = ("none", "registry", "formula", "traffic")
EXCHANGES = ("", "gather", "fill", "reduce", "hook")
COMPUTE = "compute"
"""The queue that kernels run on unless the program chooses another one."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of one tensor argument or result."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """A distinct operator call: name and argument metadata. Many ops share one.

    `workspace_bytes` is what the kernel allocates and frees inside itself on the trace's device, on top of
    its results; `workspace_source` says where the figure comes from. `flops` and `moved_bytes` are what any
    device has to do: `work_source` says who counted (torch's `registry`, a `formula` of ours; only `traffic`
    where nobody knows the operator). What goes `over_link` is copied from or to the host.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: str
    view: bool
    in_place: bool
    random: bool
    collective: Collective | None = None
    workspace_bytes: int = 0
    workspace_source: str = "none"
    flops: int = 0
    moved_bytes: int = 0
    work_source: str = "none"
    over_link: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched operator call. Numbers refer to the trace's tables; -1 means "none"."""

    signature: int
    phase: str
    module: int
    call: int
    recompute: bool
    forward_op: int
    """For an op in backward: the forward op that it differentiates."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    queue: str = COMPUTE
    """What runs in order: `compute`, or another stream, or a communication group's."""
    waits_for: tuple[int, ...] = ()
    """Ops of other queues that are done before this one begins; -1 is the last op of the step before."""
    host_waits: bool = False
    """Whether the host goes on only when this op, and so all before it on its queue, is done."""
    reads_value: bool = False
    """Whether all it does is to show values to Python (`.item()`): they may decide what comes next."""
    exchange: str = ""
    """What a unit of FSDP does by it, which is then its module: `gather` parameters from other ranks, `fill`
    the memory that they are read from, `reduce` gradients; `hook` for what else its hooks do around forward.
    Empty for what the program itself computes."""
    wrapped: int = 0
    """How many operators on distributed tensors (DTensor) the host was asked for since the op before: each
    finds out, in Python, what this rank has to compute of it. `detach` does not count."""
    converted: int = 0
    """How many distributed tensors were made of local ones since then, or taken apart, or divided anew."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One holder's hold on a storage: from `start` until before `end` (None: beyond the step)."""

    holder: str
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of device memory; views share it. Bytes are those that the program asked for."""

    bytes: int
    category: str
    producer: int
    start: int
    end: int | None
    holders: tuple[Interval, ...]
    resizes: tuple[tuple[int, int], ...] = ()
    """(time, new size) for storages that are resized in place; `bytes` is the size at `start`."""
    born: int = -1
    """Of what is there in every step but the first, as optimizer state is: before which op of the first step
    it is made. -1 for everything else."""
    gathered: bool = False
    """Whether it holds parameters that are gathered from other ranks, beside this rank's part of them."""
    stream: str = COMPUTE
    """The queue that it was allocated on: a GPU's memory is kept apart by it."""
    also_used_on: tuple[str, ...] = ()
    """Queues that `record_stream` named: its memory is not used again before they are done with it."""

    @property
    def persistent(self) -> bool:
        """Whether the storage existed before the step."""
        return self.start < 0

    def held_by(self, holder: str) -> Iterator[Interval]:
        """Yield the intervals of one kind of holder."""
        return (interval for interval in self.holders if interval.holder == holder)

    def alive_at(self, op: int) -> bool:
        """Return whether the storage is alive while op number `op` runs (-1: before the step)."""
        return self.start <= op and (self.end is None or op < self.end)


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation or a free. `time` is the op that it happens in or before; -1 is before the step."""

    time: int
    storage: int
    """-1: the workspace of the op's kernel."""
    bytes: int
    """What is asked for; negative where as much is freed."""
    stream: str = COMPUTE
    """Where it is asked for."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module: its qualified name, which begins with the root's class name, and what it owns itself."""

    name: str
    class_name: str
    parent: int
    parameters: tuple[int, ...]
    """The storages of its parameters; those of shared ones are the first module's."""
    buffers: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    """The storages that its parameters are gathered into."""
    unit: bool = False
    """Whether it is a unit of FSDP: its parameters, and those inside, are gathered around its call."""
    whole_parameter_bytes: int = 0
    """Its parameters on all ranks together, each counted once: `parameters` has this rank's part."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module, in op positions; backward positions are -1 where none of it ran."""

    module: int
    parent: int
    recompute: bool
    forward_start: int
    forward_end: int
    backward_start: int
    backward_end: int
    body_start: int = -1
    """Where `forward` itself begins, after the hooks that come before it; -1 if the module has no hooks."""
    body_end: int = -1

    @property
    def body(self) -> range:
        """The ops of the module's `forward`, without those of its hooks."""
        if self.body_start < 0:
            return range(self.forward_start, self.forward_end)
        return range(self.body_start, self.body_end)


@dataclass(frozen=True)
class Trace:
    """One steady-state step: ops, storages, modules, and who keeps what alive."""

    target: str
    device: str
    """The kind of device the step was captured for: `cpu` or `cuda`."""
    torch: str
    signatures: tuple[Signature, ...]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    modules: tuple[Module, ...]
    calls: tuple[ModuleCall, ...]
    forward_post_order: tuple[int, ...]
    """Calls in the order in which their forward ended."""
    backward_pre_order: tuple[int, ...]
    """Calls in the order in which their backward began."""
    backward_post_order: tuple[int, ...]
    """Calls in the order in which their backward ended."""
    observed_peak_bytes: int | None = None
    """The most bytes the recorder saw alive at once (without workspaces); None if nothing was recorded."""
    releases: tuple[int, ...] = ()
    """Storages in the order in which they were freed or made smaller: orders what happens at one time."""
    architecture: str = ""
    """The GPU's architecture if it decided about a kernel, or the step asked for it; empty if it did not."""
    tf32: tuple[str, ...] = ()
    """Which kinds of float32 products may be rounded to TF32 on a GPU: `matmul`, `convolution`."""
    samples: int | None = None
    """How many samples the step trains on, where it says so."""
    tokens: int | None = None
    settings: Settings = UNKNOWN_SETTINGS
    """What step it is: batch, dtype, optimizer, the model's size."""
    model: int = -1
    """The module that the step trains, `Step.model`; plans are made for it and what is inside."""
    steps: Steps = USUAL_STEPS
    assumptions: tuple[Assumption, ...] = ()
    cluster: Cluster | None = None
    """Which rank of which cluster the step is; None for a step of one process."""

    def __repr__(self) -> str:
        """One line: a trace has hundreds of thousands of entries."""
        return (
            f"<Trace of {self.target} for {self.device}: {len(self.ops)} ops, {len(self.storages)} storages>"
        )

    @property
    def forward_pre_order(self) -> tuple[int, ...]:
        """Calls in the order in which their forward began, without recomputation."""
        return tuple(number for number, call in enumerate(self.calls) if not call.recompute)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The assumptions as sentences."""
        return tuple(map(str, self.assumptions))

    @property
    def memory(self) -> MemoryModel:
        """What bytes asked for become on the device of the trace."""
        return memory_model(self.device)

    @cached_property
    def occupied_bytes(self) -> tuple[int, ...]:
        """What each storage takes on the device, at the size that it begins with."""
        occupied = self.memory.occupied
        return tuple([occupied(storage.bytes) for storage in self.storages])

    def occupied_at(self, storage: int, op: int) -> int:
        """Return what a storage takes while op number `op` runs, if it is alive then."""
        resizes = self.storages[storage].resizes
        resized = next((size for time, size in reversed(resizes) if time <= op), None)
        return self.occupied_bytes[storage] if resized is None else self.memory.occupied(resized)

    @cached_property
    def workspace_bytes(self) -> tuple[int, ...]:
        """What the workspace of each signature's kernel takes on the device."""
        return tuple([self.memory.occupied(signature.workspace_bytes) for signature in self.signatures])

    @property
    def persistent_bytes(self) -> int:
        """Bytes alive before the step begins."""
        occupied = zip(self.storages, self.occupied_bytes)
        return sum(size for storage, size in occupied if storage.persistent)

    @property
    def depends_on_data(self) -> bool:
        """Whether values that decide about memory were assumed, such as where a router sends tokens."""
        return any(assumption.kind == "data" for assumption in self.assumptions)

    @cached_property
    def in_model(self) -> frozenset[int]:
        """The model and all modules inside it."""
        found: set[int] = set()
        for number, module in enumerate(self.modules):
            if number == self.model or module.parent in found:
                found.add(number)
        return frozenset(found)

    def op_name(self, op: int) -> str:
        """Return the operator name of op number `op`."""
        return self.signatures[self.ops[op].signature].name

    def module_name(self, module: int) -> str:
        """Return a module's qualified name, or `Global` for what runs outside of modules."""
        return self.modules[module].name if module >= 0 else "Global"

    def call_names(self, order: tuple[int, ...]) -> tuple[str, ...]:
        """Return the module names of a list of calls."""
        return tuple(self.modules[self.calls[number].module].name for number in order)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.storages]
        for number, op in enumerate(self.ops):
            for storage in dict.fromkeys(op.reads):
                found[storage].append(number)
        return tuple(tuple(numbers) for numbers in found)

    @cached_property
    def unit_ops(self) -> dict[int, tuple[int, ...]]:
        """For each unit of FSDP the ops that gather or fill it, in order."""
        found: dict[int, list[int]] = {}
        for number, op in enumerate(self.ops):
            if op.exchange in ("gather", "fill"):
                found.setdefault(op.module, []).append(number)
        return {module: tuple(numbers) for module, numbers in found.items()}

    def backward_readers(self, storage: int) -> tuple[int, ...]:
        """Return the ops of backward (not of recomputation) that read a storage."""
        readers = ((n, self.ops[n]) for n in self.readers[storage])
        return tuple(n for n, op in readers if op.phase == "backward" and not op.recompute)

    @property
    def events(self) -> tuple[Event, ...]:
        """Every allocation and free of the step, in order; see `trace_events.py`."""
        from trainfit.traces.trace_events import events_of

        return events_of(self)

    def check(self) -> None:
        """Check every invariant; see `trace_check.py`, which states them in words."""
        from trainfit.traces.trace_check import check

        check(self)
