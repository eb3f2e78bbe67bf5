"""Experts of which each rank has some, whole (expert parallel): tokens go to the rank that has their expert.

Ranks along this dimension have data of their own. Each sends a token once for every expert that it chose,
computes with its own experts what it gets from all, and sends the answers back (Lepikhin et al. 2020,
GShard). Everything but the experts is as on ranks of `fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from trainfit.errors import OptionError


class ExchangedExperts(nn.Module):
    """Takes the place of a module of experts, which takes tokens, the experts of each and their weights."""

    def __init__(self, experts: nn.Module, count: int, mesh: DeviceMesh) -> None:
        """Keep the part of `count` experts that belongs to this rank of the mesh."""
        super().__init__()
        self.mesh, self.own_count = mesh, count // mesh.size()
        begin = mesh.get_local_rank() * self.own_count
        self.own = _part(experts, count, range(begin, begin + self.own_count))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ranks, group = self.mesh.size(), self.mesh.get_group()
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        rows = order // chosen.shape[-1]
        counts = torch.bincount(experts, minlength=ranks * self.own_count)
        theirs = all_to_all_single(counts, None, None, group)
        # One answer of the device for both: the host has to know how many tokens go where.
        by_expert = torch.stack((counts, theirs)).view(2, ranks, self.own_count)
        sent, received = by_expert.sum(dim=-1).tolist()
        own = torch.arange(self.own_count, device=tokens.device).repeat(ranks)
        own = own.repeat_interleave(theirs, output_size=sum(received))[:, None]
        given = all_to_all_single_autograd(tokens[rows], received, sent, group)
        answers = self.own(given, own, torch.ones_like(own, dtype=weights.dtype))
        answers = all_to_all_single_autograd(answers, sent, received, group)
        answers = answers * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add_(0, rows, answers.to(tokens.dtype))


def _part(experts: nn.Module, count: int, own: range) -> nn.Module:
    """Return a module of experts with some of them only; it has a list of them, or weights for all in one."""
    if isinstance(experts, nn.ModuleList):
        return type(experts)(list(experts)[own.start : own.stop])
    for name, parameter in list(experts.named_parameters(recurse=False)):
        part = parameter.detach()[own.start : own.stop].clone()
        experts.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
    cast(Any, experts).num_experts = len(own)
    return experts


def exchange_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of the mesh its part of every module of experts, in place."""
    found = list(_all_experts(model))
    if not found:
        raise OptionError(
            f"--mesh ep={mesh.size()}: the experts of this model are not modules `experts` that take tokens, "
            "the experts of each and their weights, so that they cannot be divided; use fsdp."
        )
    for parent, name, experts, count in found:
        setattr(parent, name, ExchangedExperts(experts, count, mesh))


def own_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have a rank's own experts."""
    return [module.own for module in model.modules() if isinstance(module, ExchangedExperts)]


def _all_experts(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, int]]:
    for parent in model.modules():
        for name, module in parent.named_children():
            count = getattr(module, "num_experts", None)
            if name == "experts" and type(count) is int and _is_divisible(module, count):
                yield parent, name, module, count


def _is_divisible(experts: nn.Module, count: int) -> bool:
    """Whether all of its weights belong to single experts."""
    if isinstance(experts, nn.ModuleList):
        return len(experts) == count
    own, all_of_them = list(experts.parameters(recurse=False)), list(experts.parameters())
    return len(own) == len(all_of_them) > 0 and all(one.shape[:1] == (count,) for one in own)
