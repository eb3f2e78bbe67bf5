"""Collectives under capture: nothing is exchanged, and the program can wait for them as it always does.

Small values that are known stay known: all ranks are taken to have the same, so that a sum is a multiple.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Work
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves

from trainfit.capturing.exchanges import collective_of, place_in_group, written_arguments
from trainfit.capturing.metadata import call_key
from trainfit.capturing.replacing import replaced, replaced_by_name
from trainfit.capturing.schemas import describe
from trainfit.operators.collectives import collective_kind, communicates
from trainfit.operators.names import OperatorSet
from trainfit.traces.ranks import Collective

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode
    from trainfit.capturing.ledger import LiveStorage
    from trainfit.capturing.session import Session

_functional = torch.ops._c10d_functional
_c10d: Any = _distributed_c10d
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def exchange(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Record a collective of `torch.distributed` that writes to tensors it is given."""
    key, tensors = call_key(func, args, kwargs)
    call = mode.oracle.without_results(describe(func), key)
    lives = [mode.live(tensor) for tensor in tensors]
    outputs = written_arguments(func, args)
    written = [mode.live(tensor) for tensor in _tensors(outputs)]
    known = all(live.known for live in lives if live not in written) and all(
        live.known for live in written if _is_input_too(func)
    )
    for live in lives:
        live.exchanged |= _is_made_for_exchange(live, received=live in written and not _is_input_too(func))
    mode.recorder.record(call, lives, written, ())
    asynchronous = any(
        argument.name == "asyncOp" and value is True for argument, value in zip(func._schema.arguments, args)
    )
    mode.recorder.queues.makes(written, _stashed(mode, tensors) if asynchronous else ())
    collective = collective_of(call.operator.name, key[1:])
    if not (known and collective and _agree(collective, func, args, outputs, written)):
        for live in written:
            live.forget()
    if len(func._schema.returns) == 0:
        return None
    work = _finished([*_tensors(outputs)])
    return (outputs[0], work) if len(func._schema.returns) == 2 else work


def make(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Record a functional collective, which returns new tensors, or writes to those it is given."""
    key, tensors = call_key(func, args, kwargs)
    collective = collective_of(describe(func).name, key[1:])
    lives = [mode.live(tensor) for tensor in tensors]
    values = None
    if collective is not None and len(tensors) == 1 and not describe(func).mutated and lives[0].known:
        with torch.utils._python_dispatch._disable_current_modes():
            values = _agreed(collective, args, tensors[0])
    call = mode.oracle.look_up(key) or mode.oracle.ask(func, key, args, kwargs)
    if values is None:
        result = mode.hollow(func, call, args, kwargs, tensors, lives)
    else:
        result = mode.adopted(call, values, lives)
    made = [mode.live(tensor) for tensor in _tensors(result)]
    mode.recorder.queues.makes(made, _stashed(mode, tensors))
    return result


def _is_made_for_exchange(live: LiveStorage, *, received: bool) -> bool:
    """Whether a storage that a collective uses is a buffer for that, and not a result that is exchanged.

    It was made without values, and nothing but copies, or the collective, has written to it; or with values
    that nobody used before it is received into.
    """
    if live.producer in _EMPTY:
        return not live.first_writer or live.first_writer in _COPIES or communicates(live.first_writer)
    return live.producer in _FILLED and received and not live.first_writer


_EMPTY = OperatorSet.of("empty empty_like new_empty empty_strided new_empty_strided empty_permuted")
_FILLED = OperatorSet.of("zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full")
_COPIES = OperatorSet.of(
    "copy_ _foreach_copy_ cat stack _chunk_cat split_with_sizes_copy mul div zero_ fill_"
)
"""What fills a buffer; DistributedDataParallel multiplies by a factor meanwhile."""


def _stashed(mode: CaptureMode, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what an asynchronous collective keeps until it is waited for: NCCL's keep all they are given.

    They run on a stream of their own, and do so instead of `record_stream`. Others run on the program's.
    """
    return [] if mode.streams is None else tensors


def _is_input_too(func: OpOverload) -> bool:
    return collective_kind(str(func)) in ("all_reduce", "broadcast", "reduce")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _finished(results: list[torch.Tensor]) -> Any:
    """Make what the program waits for. It holds the results, as that of a real backend does."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(results)
    return _c10d._create_work_from_future(future).boxed()


def _agree(
    collective: Collective, func: OpOverload, args: Arguments, outputs: Any, written: list[LiveStorage]
) -> bool:
    """Write what the ranks get if all have the same known values; say whether that could be done."""
    if any(live.backing is None for live in written) or collective.kind not in (*_AGREED, "all_to_all"):
        return False
    results = _tensors(outputs)
    given = (
        results if _is_input_too(func) else [t for t in _tensors(args) if all(t is not r for r in results)]
    )
    if collective.kind == "all_to_all" and isinstance(outputs[0], list):
        given = _chosen(given, args)
    if not given:
        return False  # it is received over what is sent
    with torch.utils._python_dispatch._disable_current_modes():
        whole = [_agreed(collective, args, tensor) for tensor in given]
        if any(value is None for value in whole):
            return False
        flat = torch.cat([value.flatten() for value in whole if value is not None])
        if flat.numel() != sum(result.numel() for result in results):
            return False
        for result, part in zip(results, flat.split([result.numel() for result in results])):
            result.copy_(part.view(result.shape))
    for live, result in zip(written, results):
        live.fill(result)
    return True


def _agreed(collective: Collective, args: Arguments, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a rank gets if all ranks put in the same values; None if that is not known."""
    if collective.kind == "all_to_all":
        return _dealt_out(tensor, collective.group_size, args)
    how = _AGREED.get(collective.kind)
    return None if how is None else how(tensor, collective.group_size, _reduction(args))


def _chosen(given: list[torch.Tensor], args: Arguments) -> list[torch.Tensor]:
    """Return what a rank gets of lists that all ranks send alike: from each what is meant for it."""
    place = place_in_group(args)
    if place is None or len({tensor.shape for tensor in given}) != 1 or place >= len(given):
        return []
    return [given[place]] * len(given)


def _dealt_out(tensor: torch.Tensor, ranks: int, args: Arguments) -> torch.Tensor | None:
    """Return the rank's own part, from every rank; None if parts are not equal.

    Where a list is sent, they are chosen already.
    """
    if isinstance(args[0], list):
        return tensor
    sizes = {size for value in args if isinstance(value, list) for size in value if type(size) is int}
    place = place_in_group(args)
    if place is None or not tensor.dim() or tensor.shape[0] % ranks:
        return None
    each = tensor.shape[0] // ranks
    own = tensor[place * each : (place + 1) * each]
    return own.repeat(ranks, *(1 for _ in tensor.shape[1:])) if sizes <= {each} else None


def _reduction(args: Arguments) -> str:
    """Return how a collective reduces: `sum`, `avg`, `max`, ...; empty if it is not known."""
    named = (value.lower() for value in args if isinstance(value, str))
    return next((name for name in named if name in _REDUCTIONS), _stated[-1] if _stated else "")


_REDUCTIONS = ("sum", "avg", "max", "min", "product")
_stated: list[str] = []
"""What the program said of its reductions that run now: torch's operators do not show it."""


@contextlib.contextmanager
def reductions_stated() -> Iterator[None]:
    """Notice what `all_reduce` and `reduce` are asked for."""

    def noticed(original: Any) -> Any:
        place = list(inspect.signature(original).parameters).index("op")

        def call(*args: Any, **kwargs: Any) -> Any:
            asked = args[place] if len(args) > place else kwargs.get("op", dist.ReduceOp.SUM)
            _stated.append(str(asked).rpartition(".")[2].lower())
            try:
                return original(*args, **kwargs)
            finally:
                _stated.pop()

        return call

    with contextlib.ExitStack() as stack:
        for owner in (dist, dist.distributed_c10d):
            for name in ("all_reduce", "reduce"):
                stack.enter_context(replaced(owner, name, noticed))
        stack.enter_context(replaced_by_name(dist, dist.distributed_c10d))
        yield


def _reduced(tensor: torch.Tensor, ranks: int, reduction: str) -> torch.Tensor | None:
    if reduction == "sum":
        return tensor * ranks
    return tensor.clone() if reduction in ("avg", "max", "min") else None


def _scattered(tensor: torch.Tensor, ranks: int, reduction: str) -> torch.Tensor | None:
    """Return any of the parts: which one it is depends on the rank, and all have to be equal for that."""
    parts = tensor.chunk(ranks) if tensor.dim() and tensor.shape[0] % ranks == 0 else ()
    same = bool(parts) and all(torch.equal(part, parts[0]) for part in parts)
    return _reduced(parts[0], ranks, reduction) if same else None


def _gathered(tensor: torch.Tensor, ranks: int, reduction: str) -> torch.Tensor:
    return tensor.repeat(ranks, *(1 for _ in tensor.shape[1:])) if tensor.dim() else tensor.repeat(ranks)


_AGREED: dict[str, Callable[[torch.Tensor, int, str], torch.Tensor | None]] = {
    "all_reduce": _reduced,
    "reduce": _reduced,
    "broadcast": lambda tensor, ranks, reduction: tensor.clone(),
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}


def wait_tensor(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Wait for the collective that made a tensor; torch's fake kernel returns another one, for compilers."""
    mode.recorder.queues.wait_for([mode.live(args[0])])
    return args[0]


def wrapped(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Make the tensor that waits when it is used first."""
    return AsyncCollectiveTensor(args[0])


@contextlib.contextmanager
def waits_seen(session: Session) -> Iterator[None]:
    """Notice where the program waits for a collective."""

    def noticed(original: Any) -> Any:
        def wait(self: Work, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            find = session.ledger.find
            lives = [find(tensor) for tensor in _tensors(self.get_future().value())]
            session.recorder.queues.wait_for([live for live in lives if live is not None])
            return done

        return wait

    with replaced(Work, "wait", noticed):
        yield


def _overloads(namespace: Any, names: str) -> Iterator[OpOverload]:
    return (getattr(namespace, name).default for name in names.split())


COLLECTIVE_HANDLERS: dict[OpOverload, Callable[..., Any]] = {
    _functional.wait_tensor.default: wait_tensor,
    _functional._wrap_tensor_autograd.default: wrapped,
    **dict.fromkeys(
        _overloads(
            torch.ops.c10d,
            "broadcast_ allreduce_ allreduce_coalesced_ reduce_ allgather_ _allgather_base_ "
            "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ "
            "reduce_scatter_tensor_coalesced_ gather_ scatter_ alltoall_ alltoall_base_ send recv_ "
            "recv_any_source_ barrier monitored_barrier_",
        ),
        exchange,
    ),
    **dict.fromkeys(
        _overloads(
            _functional,
            "broadcast broadcast_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ "
            "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced "
            "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced "
            "all_to_all_single",
        ),
        make,
    ),
}
