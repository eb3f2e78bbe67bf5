"""Operators that need more than metadata: questions about values, shapes that depend on values, resizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from trainfit.capturing.distributed.collective_calls import COLLECTIVE_HANDLERS
from trainfit.capturing.metadata import Call, call_key, describe_call
from trainfit.capturing.schemas import SIZED_BY_VALUES_OVERLOADS, aten, describe, overloads
from trainfit.capturing.values import user_line
from trainfit.capturing.waiting import Arguments, Keywords, is_mask, note_read
from trainfit.errors import CaptureError
from trainfit.operators.memory_use import TOUCH_NO_DATA
from trainfit.workspace.measured import run_for_workspace

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

NOT_HANDLED = object()
Handler = Callable[["CaptureMode", OpOverload, Arguments, Keywords], Any]


def item(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Answer `.item()`, `bool(tensor)`, `int(tensor)`."""
    value = mode.values.scalar(args[0], mode.live(args[0]))
    _note_read(mode, func, args, kwargs)
    return value


def _note_read(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
    """Record an operator that only answers a question about values."""
    key, tensors = call_key(func, args, kwargs)
    call = mode.oracle.without_results(describe(func), key)
    note_read(mode, call, [mode.live(tensor) for tensor in tensors])


def equal(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Answer `torch.equal`."""
    if args[0].shape == args[1].shape:
        _note_read(mode, func, args, kwargs)
    if mode.live(args[0]).known and mode.live(args[1]).known:
        return func(*args, **kwargs)
    if args[0].shape == args[1].shape:
        mode.values.assume("two tensors whose values depend on data were assumed to be different")
    return False


def lift_fresh(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """A constant that torch has just made (`torch.tensor(...)`): from now on it belongs to the program."""
    tensor = args[0]
    if mode.ledger.find(tensor) is not None or tensor.is_meta:
        return tensor
    key, _ = call_key(func, args, kwargs)
    live, storage = mode.ledger.adopt(tensor, "torch.tensor", known=True, without_device=True)
    wrapped = mode.ledger.tensor(live, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    mode.recorder.record(describe_call(func, key, [], wrapped), (), (), (live,))
    del storage
    return wrapped


def with_known_values(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator whose output shape depends on values, if the values are known."""
    key, tensors = call_key(func, args, kwargs)
    lives = [mode.live(tensor) for tensor in tensors]
    if not all(live.known for live in lives):
        return NOT_HANDLED
    for live in lives:
        mode.values.rely_on(live)
    result = mode.run_real(func, None, key, args, kwargs, tensors, lives)
    mode.values.answers.append([part.shape for part in tree_leaves(result) if isinstance(part, torch.Tensor)])
    return result


def nonzero(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """List the true positions; of an unknown mask, all positions (an upper bound)."""
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_HANDLED:
        return result
    _known_or_all_true(mode, args[0])

    def kernel(mask: torch.Tensor) -> torch.Tensor:
        return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)

    return mode.compute(func, args, kwargs, kernel=kernel)


def masked_select(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Gather the masked elements into a new 1-D tensor; an unknown mask selects all."""
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_HANDLED:
        return result
    _, mask = torch.broadcast_tensors(args[0], args[1])
    count = int(mask.sum()) if _known_or_all_true(mode, mask) else mask.numel()

    def kernel(tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.new_empty((count,))

    return mode.compute(func, args, kwargs, kernel=kernel, shape_args=(*args, count))


def index(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Index with tensors; boolean masks count as the positions of their true elements."""
    if not any(map(is_mask, args[1])):
        return NOT_HANDLED
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_HANDLED:
        return result
    positions: list[torch.Tensor | None] = []
    for i in args[1]:
        positions.extend(_true_positions(mode, i) if is_mask(i) else [i])
    return mode.compute(func, args, kwargs, shape_args=(args[0], positions, *args[2:]))


def _true_positions(mode: CaptureMode, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return one index tensor per dimension of `mask`; all positions when its values are unknown."""
    if _known_or_all_true(mode, mask):
        return list(torch.nonzero(mask).unbind(1))
    return [torch.empty(1, dtype=torch.int64).expand(mask.numel()) for _ in range(mask.dim())]


def _known_or_all_true(mode: CaptureMode, mask: torch.Tensor) -> bool:
    """Whether a mask is known; if not, it is assumed to be all true."""
    live = mode.live(mask)
    if live.known:
        mode.values.rely_on(live)
    else:
        mode.values.assume(f"a mask of {mask.numel()} elements was assumed to be all true", "data")
    return live.known


def check_finite_and_unscale(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Unscale gradients in place; a healthy step finds no infinity, so `found_inf` stays as it is."""
    found_inf = mode.live(args[1])
    known = found_inf.known
    result = mode.compute(func, args, kwargs)
    found_inf.known = known
    return result


def ctc_loss(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """One result's shape depends on the longest target; the lengths are numbers, or tensors."""
    lengths = args[3]
    longest = max(known_numbers(mode, lengths) if isinstance(lengths, torch.Tensor) else lengths)

    def kernel(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        steps, batch = log_probs.shape[:2]
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * longest + 1))

    return mode.compute(func, args, kwargs, kernel=kernel, shape_args=(*args, longest))


def known_numbers(mode: CaptureMode, lengths: torch.Tensor) -> list[int]:
    """Return the values of a tensor of lengths; they must not depend on data."""
    live = mode.live(lengths)
    if not live.known:
        raise CaptureError(
            f"{user_line()} needs lengths whose values depend on data; capture cannot follow it."
        )
    mode.values.rely_on(live)
    return [int(length) for length in lengths.tolist()]


def pack_padded_sequence(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Pack sequences of known lengths: one row per element, and the (known) batch size of each step."""
    tensor, lengths, batch_first = args
    longest = max(known_numbers(mode, lengths))
    narrow = torch.zeros((*tensor.shape[:2], 1))
    rows = int(lengths.sum())

    def kernel(tensor: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.new_empty((rows, *tensor.shape[2:])), tensor.new_empty(longest, dtype=torch.int64)

    data, sizes = mode.compute(func, args, kwargs, kernel=kernel, shape_args=(*args, rows, longest))
    live = mode.live(sizes)
    live.on_host = True
    if not live.known and live.backing is not None:
        sizes.copy_(func(narrow, lengths, batch_first)[1])
        live.known = True
    return data, sizes


def allclose(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Answer `torch.allclose`: yes for unknown values, because such tests check that all is well."""
    _note_read(mode, func, args, kwargs)
    if mode.live(args[0]).known and mode.live(args[1]).known:
        return func(*args, **kwargs)
    mode.values.assume("two tensors whose values depend on data were assumed to be close to each other")
    return True


def resize(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Resize a tensor: within its storage only metadata changes, beyond it there is new memory."""
    tensor, size = args[0], args[1].shape if isinstance(args[1], torch.Tensor) else torch.Size(args[1])
    live = mode.live(tensor)
    needed = (size.numel() + tensor.storage_offset()) * tensor.element_size()
    if needed <= tensor.untyped_storage().nbytes():
        return func(*args, **kwargs)
    key, _ = call_key(func, args, kwargs)
    old = tensor.untyped_storage()  # alive, as in a real run, until its content is copied
    new, storage = mode.ledger.allocate(needed, describe(func).name, keep_values=False)
    tensor.set_(storage, 0, size)
    call = mode.oracle.without_results(describe(func), key)
    mode.recorder.record(call, (live,), (), (new,))
    del old
    return tensor


def workspace_by_values(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Measure the workspace of a kernel whose path depends on values, with the step's own values.

    The matrix exponential takes more terms the larger the matrix is. Where the values are not known, the
    kernel is measured on made-up ones, which are large (see `workspace/made_up_arguments.py`).
    """
    if not mode.measures_workspaces:
        return NOT_HANDLED
    key, tensors = call_key(func, args, kwargs)
    lives = [mode.live(tensor) for tensor in tensors]
    call = mode.oracle.look_up(key) or mode.oracle.ask(func, key, args, kwargs)
    workspace = None
    if all(live.known for live in lives) and mode.small_outputs(call, tensors):
        with torch.utils._python_dispatch._disable_current_modes():
            workspace = run_for_workspace(func, args, kwargs)
    if workspace is None:
        mode.values.kernel_lacked_values = True
        mode.values.assume(f"{call.operator.name} was measured on values that need the most", "data")
        return NOT_HANDLED
    for live in lives:
        mode.values.rely_on(live)
    # Calls of the same shapes with another workspace are another row of the trace's table.
    key = ((func, workspace), *key[1:])
    seen = mode.oracle.look_up(key) or mode.oracle.remember(
        Call(call.operator, key, call.outputs, call.single, workspace_bytes=workspace)
    )
    return mode.run_real(func, seen, key, args, kwargs, tensors, lives)


def run_for_real(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Run what touches no data: giving a tensor another storage, questions about metadata."""
    return func(*args, **kwargs)


HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys(SIZED_BY_VALUES_OVERLOADS, with_known_values),
    aten._local_scalar_dense.default: item,
    aten.equal.default: equal,
    aten.lift_fresh.default: lift_fresh,
    aten.nonzero.default: nonzero,
    aten.index.Tensor: index,
    aten.index_put.default: index,
    aten.index_put_.default: index,
    aten._index_put_impl_.default: index,
    aten.masked_select.default: masked_select,
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_finite_and_unscale,
    aten._ctc_loss.default: ctc_loss,
    aten._ctc_loss.Tensor: ctc_loss,
    aten._pack_padded_sequence.default: pack_padded_sequence,
    aten.allclose.default: allclose,
    aten.linalg_matrix_exp.default: workspace_by_values,
    aten.resize_.default: resize,
    aten.resize_as_.default: resize,
    **{func: run_for_real for name in TOUCH_NO_DATA for func in overloads(name)},
    **COLLECTIVE_HANDLERS,
}
