"""How much memory there is for a step that is about to run here, and what it is planned for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import nn

from trainfit.basics.units import parse_size
from trainfit.capturing.distributed.renewed_reducers import bucket_bytes
from trainfit.capturing.lent_tensors import LentState
from trainfit.devices.device_table import MARGIN_SHARE, Device, find_device
from trainfit.devices.hardware import CUDA, Cuda, free_bytes
from trainfit.errors import OptionError
from trainfit.planning.requests import bytes_of_budget
from trainfit.traces.ranks import Cluster

Size = int | str


@dataclass(frozen=True)
class Wishes:
    """What the user asks of a plan that is made here; None where they leave it to the machine."""

    budget: Size | None = None
    """The memory for the step's tensors, taken literally: bytes, or text such as `24GiB` or `80%`."""
    device: str | Device | None = None
    """Another device to plan for, instead of what is free on this one."""
    reserve: Size | None = None
    """What to leave free: bytes or text; by default the margin of a GPU, and nothing on a CPU."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense before any training begins."""
        if self.budget is not None and self.reserve is not None:
            raise OptionError(
                "a budget is taken literally, so there is nothing to reserve: give budget= or reserve=, "
                "not both."
            )
        if self.device is not None and not isinstance(self.device, Device):
            find_device(self.device)
        if self.budget is not None:
            bytes_of_budget(self.budget, Device("any", "cpu", 1 << 40))
        self.reserved_of(1 << 40)

    def reserved_of(self, size: int, kind: str = "cpu") -> int:
        """Return what to leave free of so many bytes."""
        if self.reserve is None:
            return math.ceil(MARGIN_SHARE * size) if kind == "cuda" else 0
        if isinstance(self.reserve, str):
            return parse_size(self.reserve, size)
        if type(self.reserve) is not int or self.reserve < 0:
            raise OptionError(f"reserve is a number of bytes, or text such as 2GiB, got {self.reserve!r}.")
        return self.reserve


def device_for(model: nn.Module, wishes: Wishes, cluster: Cluster | None = None) -> Device:
    """Return the device to plan for: the one that the model is on, unless the user names another.

    A process that trains together with others has the GPU of its number on its node.
    """
    places = {parameter.device for parameter in model.parameters()}
    if len(places) > 1:
        names = ", ".join(sorted(map(str, places)))
        raise OptionError(
            f"the model is on several devices ({names}); a plan is made for one. Put the model on one device."
        )
    place = places.pop() if places else torch.device("cpu")
    if cluster is not None and place.type == "cuda" and place.index not in (None, cluster.local_rank):
        raise OptionError(
            f"the model is on {place}, and the GPU of this process is taken to be cuda:{cluster.local_rank}, "
            f"by its place among the {cluster.local_world_size} of its node: put the model there, or make "
            "the plan beforehand, with trainfit plan."
        )
    if cluster is None and place.type == "cuda" and place.index:
        raise OptionError(
            f"the model is on {place}, and a process is taken to have one GPU, the first that it sees: start "
            f"it with CUDA_VISIBLE_DEVICES={place.index}, where that GPU is cuda:0."
        )
    if wishes.device is None:
        return find_device("cpu" if place.type == "cpu" else str(place))
    device = wishes.device if isinstance(wishes.device, Device) else find_device(wishes.device)
    if device.kind != place.type:
        raise OptionError(
            f"the model is on {place}, and {device.name} is a {device.kind} device: a plan for it would not "
            "be followed here. Name a device of the same kind, or make the plan with trainfit plan."
        )
    return device


def budget_for(
    device: Device, lent: LentState, wishes: Wishes, cluster: Cluster | None = None, cuda: Cuda = CUDA
) -> int:
    """Return the bytes that a plan may use: the user's, or what the device has less what is left free."""
    if wishes.budget is not None:
        return bytes_of_budget(wishes.budget, device)
    if wishes.device is not None:
        at_hand = device.usable_bytes
    else:
        at_hand = memory_at_hand(device.kind, lent, cuda, 1 if cluster is None else cluster.local_world_size)
    budget = at_hand - wishes.reserved_of(at_hand, device.kind)
    if budget < 1:
        raise OptionError("what reserve leaves free is all the memory that there is.")
    return budget


def memory_at_hand(kind: str, lent: LentState, cuda: Cuda = CUDA, processes: int = 1) -> int:
    """Return what is free here, with what the step's tensors take already: its peak counts them as well.

    On a GPU, what torch's allocator has reserved is this process's own, except for tensors of others. A CPU's
    memory is shared by all `processes` of the training that are on this machine.
    """
    taken = lent.bytes_on(kind) + bucket_bytes(lent.python.replicas, kind)
    if kind == "cpu":
        return free_bytes("cpu") // processes + taken
    return cuda.free_bytes() + cuda.reserved_bytes() - max(cuda.allocated_bytes() - taken, 0)


def allocator_setting() -> str:
    """Return how torch's CUDA allocator is set in this process, as `trainfit.plan` takes it."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "default")
