"""Small models, divided and not: what they compute, step by step. Runs as one of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from trainfit.models.parallel.exchanged_experts import ExchangedExperts
from trainfit.models.recipe import StepOptions
from trainfit.steps.step import Step
from trainfit.targets import load
from trainfit.traces.ranks import Cluster

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from cluster_cases.processor_rings import divide_attention_of_processors

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A target and the mesh that it is divided over."""

    target: str
    mesh: dict[str, int]
    options: StepOptions = field(default_factory=lambda: StepOptions(batch=2, seq=32, optimizer="sgd"))

    def __str__(self) -> str:
        """Name the case in a test."""
        return f"{self.target}-{'-'.join(f'{name}{size}' for name, size in self.mesh.items())}"


@dataclass(frozen=True)
class Trained:
    """What came out of some steps: plain numbers, to be sent to another process."""

    losses: tuple[float | None, ...]
    """None on the stages of a pipeline that have no loss."""
    plain_losses: tuple[float, ...]
    """Of the same steps on one process."""
    largest_difference: float
    """Of any weight after the last step."""
    compared: int
    """How many weights this rank has."""


def trained(cases: list[Case]) -> list[Trained]:
    """Train every case divided as one rank of its mesh, and whole; compare."""
    return [_compared(case) for case in cases]


def _compared(case: Case) -> Trained:
    sizes = tuple(case.mesh.items())
    cluster = Cluster(world_size=torch.distributed.get_world_size(), mesh=sizes)
    with _rings_of_processors():
        losses, weights = _train(case.target, replace(case.options, cluster=cluster))
        losses = _averaged(losses, case.mesh)
    plain_losses, plain = _train(case.target, case.options)
    assert weights.keys() <= plain.keys(), sorted(weights.keys() - plain.keys())
    # The rows of a fused projection are in another order; what depends on them is compared.
    differences = [
        (weight.double() - plain[name].double()).abs().max().item()
        for name, weight in weights.items()
        if "qkv" not in name or "tp" not in case.mesh
    ]
    return Trained(tuple(losses), tuple(plain_losses), max(differences), len(differences))  # type: ignore[arg-type]


@contextmanager
def _rings_of_processors() -> Iterator[None]:
    """Let torch divide their attention along the sequence: without help it does so for GPUs only."""
    before = dict(_attention.custom_ops)
    divide_attention_of_processors()
    try:
        yield
    finally:
        _attention.custom_ops.clear()
        _attention.custom_ops.update(before)


def _averaged(losses: list[float | None], mesh: dict[str, int]) -> list[float | None]:
    """Return the mean over the ranks that have parts of the same sequences; the others have the same loss."""
    if "cp" not in mesh:
        return losses
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, losses)
    there = [found for found in every if found[0] is not None]
    mean = [sum(values) / len(there) for values in zip(*there)]
    return mean if losses[0] is not None else losses


def _train(target: str, options: StepOptions) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Return the loss of each step, and all weights whole after the last, by name."""
    torch.manual_seed(0)
    step = load(target, options).build()
    losses = [_number(step.run()) for _ in range(STEPS)]
    # Also by the second name of a weight that is shared: in a pipeline each end has one of the two.
    weights = step.model.named_parameters(remove_duplicate=False)
    found = {_plain_name(step, name): _whole(weight) for name, weight in weights}
    return losses, dict(_named_as_undivided(step.model, found))


def _named_as_undivided(
    model: torch.nn.Module, weights: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights as the undivided model names them: own experts have other numbers there.

    Weights of several experts in one are yielded as many.
    """
    divided = [module for module in model.modules() if isinstance(module, ExchangedExperts)]
    first = divided[0].mesh.get_local_rank() * divided[0].own_count if divided else 0
    for name, weight in weights.items():
        plain = name.replace("experts.own.", "experts.")
        owner, _, number = plain.partition("experts.")
        if plain.rpartition(".")[0].endswith("experts"):
            yield from ((f"{plain} {first + place}", one) for place, one in enumerate(weight))
        elif plain != name:
            number, _, rest = number.partition(".")
            yield f"{owner}experts.{first + int(number)}.{rest}", weight
        else:
            yield name, weight


def _plain_name(step: Step, name: str) -> str:
    """Return the name of a weight without what wraps the model."""
    wrapper = {"DistributedDataParallel": "module.", "PipelinePart": "model.", "TransformersPart": "model."}
    own = type(step.model).__name__.removeprefix("FSDP").removeprefix("Replicate")
    return name.removeprefix(wrapper.get(own, ""))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _number(loss: Any) -> float | None:
    return None if loss is None else float(_whole(loss).item())
