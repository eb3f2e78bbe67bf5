"""A process group for measuring on a CPU: the exchange is real, and takes no memory of torch's allocator.

gloo allocates whole outputs in threads of its own and copies inputs, so that the profiler shows its memory
with the step's. Here bytes go through `rank_links.py`, and sums are made in numpy's memory: what the profiler
shows is what the step itself allocates.

The group lets torch's `fake` backend take part in every call: the call passes torch's dispatcher exactly as
with a real backend, which whoever follows the operators of a step relies on. Results are written when the
work is waited for (or found complete), by the thread that asks, and contributions are sent when the call is
made; so no thread but the step's own ever holds a tensor. Sums are made in the order of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from trainfit.verifying.rank_links import RankLinks
from trainfit.verifying.silent_work import SilentWork
from trainfit.verifying.tensor_bytes import (
    Bytes,
    ExchangedPart,
    divided,
    joined,
    parts_of,
    reduced,
    whole,
    wholes,
    write_all,
)

Tensor = torch.Tensor
_c10d: Any = _distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup
"""Its methods take arguments in several ways; torch itself calls them in the one that is here."""
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class SilentGroup(_ProcessGroup):  # type: ignore[misc]
    """Some ranks of a run; `name` is the same on all of them, and another for every group."""

    def __init__(self, links: RankLinks, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, len(ranks))
        self._links, self._own, self._ranks, self._name = links, rank, tuple(ranks), name
        self._calls = 0
        self._passed: Counter[str] = Counter()
        self._coalescing: list[SilentWork] | None = None
        backend = _c10d.FakeProcessGroup._create_internal(rank, len(ranks), None)
        self._register_backend(torch.device("cpu"), _CUSTOM, backend)
        self._set_default_backend(_CUSTOM)

    # The exchange ---------------------------------------------------------------------------------------

    def _exchange(
        self,
        to_send: dict[int, Bytes],
        expected: Sequence[int],
        take: Callable[[dict[int, Bytes]], None],
        outputs: Sequence[ExchangedPart],
    ) -> SilentWork:
        """Send bytes to ranks of the group, and make a work that gives `take` what is expected."""
        self._calls += 1
        key = f"{self._name}/{self._calls}"
        for peer, content in to_send.items():
            self._links.send(self._ranks[peer], key, content)

        def finish() -> None:
            take({peer: self._links.receive(self._ranks[peer], key) for peer in expected})

        def is_ready() -> bool:
            return all(self._links.has(self._ranks[peer], key) for peer in expected)

        return self._begun(SilentWork(finish, is_ready, [part.tensor for part in outputs]))

    def _begun(self, work: SilentWork) -> SilentWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _everyone(self) -> range:
        return range(len(self._ranks))

    def _pieces(self, tensor: Tensor) -> list[ExchangedPart]:
        return parts_of(tensor, len(self._ranks))

    def _reduce_to(
        self, pieces: Sequence[Sequence[ExchangedPart]], outputs: Sequence[ExchangedPart], operation: Any
    ) -> SilentWork:
        """Send each rank its piece of every tensor; write the sums of one's own pieces to the outputs."""
        to_send = {rank: joined(pieces[rank]) for rank in self._everyone()}

        def take(arrived: dict[int, Bytes]) -> None:
            parts = [divided(arrived[rank], outputs) for rank in self._everyone()]
            for place, output in enumerate(outputs):
                output.write(reduced([part[place] for part in parts], output.dtype, operation))

        return self._exchange(to_send, self._everyone(), take, outputs)

    def _gather_to(
        self, inputs: Sequence[ExchangedPart], outputs: Sequence[Sequence[ExchangedPart]]
    ) -> SilentWork:
        """Send the inputs to everyone; write those of each rank to its outputs."""
        content = joined(inputs)

        def take(arrived: dict[int, Bytes]) -> None:
            for rank in self._everyone():
                write_all(outputs[rank], arrived[rank])

        flat = [output for of_rank in outputs for output in of_rank]
        return self._exchange(dict.fromkeys(self._everyone(), content), self._everyone(), take, flat)

    def _swap(self, outputs: Sequence[ExchangedPart], inputs: Sequence[ExchangedPart]) -> SilentWork:
        """Send each rank one input; write what each has sent to its output."""

        def take(arrived: dict[int, Bytes]) -> None:
            for rank, output in enumerate(outputs):
                output.write(arrived[rank])

        to_send = {rank: part.read() for rank, part in enumerate(inputs)}
        return self._exchange(to_send, self._everyone(), take, outputs)

    # What torch calls: first what is exchanged, then torch's own way through its dispatcher --------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SilentWork:
        """Add up tensors over all ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        parts = wholes(tensors)
        work = self._reduce_to([parts for _ in self._everyone()], parts, opts.reduceOp)
        super().allreduce(tensors, opts)
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SilentWork:
        """Add up several tensors over all ranks, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        parts = wholes(tensors)
        work = self._reduce_to([parts for _ in self._everyone()], parts, opts.reduceOp)
        super().allreduce_coalesced(tensors, opts)
        return work

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SilentWork:
        """Write the inputs of all ranks one after the other into the output."""
        work = self._gather_to([whole(input)], [[piece] for piece in self._pieces(output)])
        super().all_gather_single(output, input, opts or _c10d.AllgatherOptions())
        return work

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SilentWork:
        """Do that with several tensors."""
        work = self._gather_to(wholes(inputs), list(zip(*map(self._pieces, outputs))))
        super().all_gather_single_coalesced(outputs, inputs, opts or _c10d.AllgatherOptions())
        return work

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SilentWork:
        """Write the inputs of all ranks into a list of outputs."""
        work = self._gather_to(wholes(inputs), list(zip(*map(wholes, outputs))))
        super().allgather(outputs, inputs, opts or _c10d.AllgatherOptions())
        return work

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SilentWork:
        """Add up the inputs over all ranks, and write one's own piece of the sum into the output."""
        opts = opts or dist.ReduceScatterOptions()
        work = self._reduce_to([[piece] for piece in self._pieces(input)], [whole(output)], opts.reduceOp)
        super().reduce_scatter_single(output, input, opts)
        return work

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SilentWork:
        """Do that with several tensors."""
        opts = opts or dist.ReduceScatterOptions()
        work = self._reduce_to(list(zip(*map(self._pieces, inputs))), wholes(outputs), opts.reduceOp)
        super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        return work

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> SilentWork:
        """Add up lists of inputs over all ranks, and write one's own sum into the output."""
        opts = opts or dist.ReduceScatterOptions()
        work = self._reduce_to(list(zip(*map(wholes, inputs))), wholes(outputs), opts.reduceOp)
        super().reduce_scatter(outputs, inputs, opts)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SilentWork:
        """Write the root's tensors into those of all ranks."""
        parts = wholes(tensors)
        work = self._from_root(opts.rootRank, [parts for _ in self._everyone()], parts)
        super().broadcast(tensors, opts)
        return work

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SilentWork:
        """Write each rank's piece of what the root has into its output."""
        pieces = [[whole(piece)] for piece in (inputs[0] if inputs else [])]
        work = self._from_root(opts.rootRank, pieces, wholes(outputs))
        super().scatter(outputs, inputs, opts)
        return work

    def _from_root(
        self, root: int, pieces: Sequence[Sequence[ExchangedPart]], outputs: Sequence[ExchangedPart]
    ) -> SilentWork:
        def take(arrived: dict[int, Bytes]) -> None:
            write_all(outputs, arrived[root])

        to_send = {rank: joined(pieces[rank]) for rank in self._everyone()} if self._own == root else {}
        return self._exchange(to_send, [root], take, outputs)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SilentWork:
        """Add up tensors over all ranks; only the root gets the sum."""
        own = whole(tensors[0])

        def take(arrived: dict[int, Bytes]) -> None:
            if arrived:
                parts = [arrived[rank] for rank in self._everyone()]
                own.write(reduced(parts, own.dtype, opts.reduceOp))

        work = self._to_root(opts.rootRank, own, take, [own])
        super().reduce(tensors, opts)
        return work

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SilentWork:
        """Write the inputs of all ranks into outputs of the root."""
        places = wholes(outputs[0]) if outputs else []

        def take(arrived: dict[int, Bytes]) -> None:
            for rank, content in arrived.items():
                places[rank].write(content)

        work = self._to_root(opts.rootRank, whole(inputs[0]), take, places)
        super().gather(outputs, inputs, opts)
        return work

    def _to_root(
        self,
        root: int,
        own: ExchangedPart,
        take: Callable[[dict[int, Bytes]], None],
        outputs: Sequence[ExchangedPart],
    ) -> SilentWork:
        expected = self._everyone() if self._own == root else ()
        return self._exchange({root: own.read()}, expected, take, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> SilentWork:
        """Send each rank its part of the input, by sizes along the first dimension or evenly."""
        count = len(self._ranks)
        outputs, inputs = parts_of(output, count, output_sizes), parts_of(input, count, input_sizes)
        work = self._swap(outputs, inputs)
        super().all_to_all_single(output, input, output_sizes, input_sizes, opts or dist.AllToAllOptions())
        return work

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SilentWork:
        """Send each rank one tensor of a list."""
        work = self._swap(wholes(outputs), wholes(inputs))
        super().alltoall(outputs, inputs, opts or dist.AllToAllOptions())
        return work

    def barrier(self, opts: Any = None) -> SilentWork:
        """Wait until all ranks are here."""
        nothing: Bytes = np.empty(0, dtype=np.uint8)
        work = self._exchange(dict.fromkeys(self._everyone(), nothing), self._everyone(), lambda _: None, ())
        super().barrier(opts=opts or dist.BarrierOptions())
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here; who is missing is in the message of a failure."""
        self.barrier().wait()

    # From one rank to another ---------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> SilentWork:
        """Send a tensor to one rank."""
        self._links.send(self._ranks[dst], self._next_passed(self._own, dst, tag), whole(tensors[0]).read())
        super().send(tensors, dst, tag)
        return self._begun(SilentWork(lambda: None, lambda: True))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> SilentWork:
        """Receive a tensor from one rank."""
        key = self._next_passed(src, self._own, tag)
        sender, own = self._ranks[src], whole(tensors[0])

        def finish() -> int:
            own.write(self._links.receive(sender, key))
            return src

        super().recv(tensors, src, tag)
        return self._begun(SilentWork(finish, lambda: self._links.has(sender, key), tensors))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> SilentWork:
        """Receive a tensor from whoever sends one first."""
        own = whole(tensors[0])

        def finish() -> int:
            keys = {self._ranks[src]: self._passed_key(src, self._own, tag) for src in self._everyone()}
            sender, content = self._links.receive_any(keys)
            src = self._ranks.index(sender)
            self._next_passed(src, self._own, tag)
            own.write(content)
            return src

        super().recv_anysource(tensors, tag)
        return self._begun(SilentWork(finish, lambda: False, tensors))

    def _passed_key(self, src: int, dst: int, tag: int) -> str:
        way = f"{src}>{dst}#{tag}"
        return f"{self._name}/{way}/{self._passed[way]}"

    def _next_passed(self, src: int, dst: int, tag: int) -> str:
        """Return the key of the next tensor from one rank to another; both sides count."""
        key = self._passed_key(src, dst, tag)
        self._passed[f"{src}>{dst}#{tag}"] += 1
        return key

    # Several calls as one -------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> SilentWork:
        works, self._coalescing = self._coalescing or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        return SilentWork(finish, lambda: all(work.is_completed() for work in works))
