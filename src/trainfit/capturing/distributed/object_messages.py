"""Python objects that ranks send to each other.

What one rank sends to another is found by running the step as the sender until it sends it. What every rank
brings (`all_gather_object`, `gather_object`) is taken to be the same everywhere: there may be thousands.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trainfit.capturing.distributed.rank_messages import Messages, RankHasSpoken
from trainfit.capturing.replacing import replaced, replaced_by_name
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError


@contextlib.contextmanager
def objects_exchanged(rank: int, messages: Messages, listener: int | None) -> Iterator[None]:
    """Let a rank send and receive objects; with a `listener`, only until it has been told something new."""
    mail = _Mail(rank, messages, listener)
    replacements: dict[str, Callable[..., Any]] = {
        "send_object_list": mail.send,
        "recv_object_list": mail.receive,
        "broadcast_object_list": mail.broadcast,
        "scatter_object_list": mail.scatter,
        "all_gather_object": _all_gather,
        "gather_object": _gather,
    }
    with contextlib.ExitStack() as stack:
        for owner in (dist, dist.distributed_c10d):
            for name, function in replacements.items():
                stack.enter_context(replaced(owner, name, partial(_in_its_place, function)))
            stack.enter_context(replaced(owner, "recv", _from_someone))
        stack.enter_context(replaced_by_name(dist, dist.distributed_c10d))
        yield


def _in_its_place(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return function


class _Mail:
    """What one rank sends and receives, in order: the third message to a rank is its third."""

    def __init__(self, rank: int, messages: Messages, listener: int | None) -> None:
        self._rank, self._messages, self._listener = rank, messages, listener
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        """Take objects for another rank."""
        to = _one(dst, group, group_dst)
        if to == self._listener:
            self._say(to, object_list)

    def receive(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        """Return what another rank sends; who it is has to be said."""
        if src is None and group_src is None:
            _refuse_anyone("recv_object_list")
        sender = _one(src, group, group_src)
        object_list[:] = self._hear(sender)
        return sender

    def broadcast(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Leave the source's own objects as they are; all others get those."""
        source = _one(src if src is not None or group_src is not None else 0, group, group_src)
        if source != self._rank:
            object_list[:] = self._hear(source)
        elif self._listener in dist.get_process_group_ranks(group):
            self._say(self._listener, object_list)

    def scatter(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Give each rank its own of the source's objects."""
        source = _one(src if src is not None or group_src is not None else 0, group, group_src)
        if source == self._rank:
            assert scatter_object_input_list is not None
            members = dist.get_process_group_ranks(group)
            scatter_object_output_list[0] = scatter_object_input_list[members.index(self._rank)]
            if self._listener in members:
                self._say(self._listener, [scatter_object_input_list[members.index(self._listener)]])
        else:
            scatter_object_output_list[0] = self._hear(source)[0]

    def _say(self, to: int | None, objects: list[Any]) -> None:
        assert to is not None
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(objects)):
            raise CaptureError(
                f"{script_line()} sends tensors as Python objects, which a capture cannot follow: send them "
                "with dist.send, dist.broadcast or their like."
            )
        self._sent[to] += 1
        # As they arrive: copies.
        if self._messages.say(self._rank, to, ("objects", self._sent[to]), pickle.dumps(objects)):
            raise RankHasSpoken

    def _hear(self, sender: int) -> list[Any]:
        self._received[sender] += 1
        heard = self._messages.hear(sender, self._rank, ("objects", self._received[sender]))
        objects: list[Any] = pickle.loads(heard)
        return objects


def _one(rank: int | None, group: Any, group_rank: int | None) -> int:
    """Return a rank of the world, which is given as such or as one of its group."""
    if group_rank is not None:
        known: Any = group or dist.group.WORLD
        return dist.get_global_rank(known, group_rank)
    assert rank is not None
    return rank


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    if object_gather_list:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _from_someone(original: Any) -> Any:
    def recv(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        if src is None and group_src is None:
            _refuse_anyone("recv")
        return original(tensor, src, group, tag, group_src)

    return recv


def _refuse_anyone(function: str) -> None:
    raise CaptureError(
        f"{script_line()} receives from whichever rank sends first, and a capture runs only one: say from "
        f"which, as in dist.{function}(..., src=0)."
    )
