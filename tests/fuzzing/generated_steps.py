"""Small training steps, generated: a model of random parts, an optimizer, and a loop as people write them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from model_parts import COMPOSITES, LEAVES, Part
from torch import Tensor, nn

from trainfit import Step

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "two_groups": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 1e-4}], lr=1e-3),
}
SPARSE_OPTIMIZERS = ("sgd", "adagrad")
"""Those that take the gradients of a sparse embedding."""

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: y.float().square().mean(),
    "sum": lambda y: y.float().sum() * 1e-3,
    "entropy": lambda y: nn.functional.cross_entropy(
        y.float().flatten(0, 1), torch.arange(y.shape[0] * y.shape[1], device=y.device) % y.shape[2]
    ),
    "smooth": lambda y: nn.functional.smooth_l1_loss(y.float(), torch.zeros_like(y, dtype=torch.float32)),
}
RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda loss, y: loss,
    "detached": lambda loss, y: loss.detach(),
    "number": lambda loss, y: loss.item(),
    "dict": lambda loss, y: {"loss": loss.detach(), "mean": y.detach().float().mean().item()},
    "tuple": lambda loss, y: (loss, y.detach()),
    "nothing": lambda loss, y: None,
}


@dataclass(frozen=True)
class GeneratedStep:
    """All that decides about a step; what is shown of it is enough to write it down."""

    parts: tuple[Part, ...]
    batch: int
    seq: int
    width: int
    optimizer: str
    loss: str
    returns: str
    accumulate: int
    clip: str
    precision: str
    inputs: str
    average: bool
    scheduler: bool
    to_none: bool

    def build(self, device: str = "cpu") -> Step:
        """Make the step, in ordinary PyTorch."""
        torch.manual_seed(0)
        ends = (nn.Linear(self.width, self.width), nn.Linear(self.width, self.width))
        inside = (part.module(self.width) for part in self.parts)
        model = nn.Sequential(ends[0], *inside, ends[1]).to(device)
        if self.precision == "bf16":
            model.to(torch.bfloat16)
        average = copy.deepcopy(model).requires_grad_(False) if self.average else None
        next_inputs = self._inputs(device, model[0].weight.dtype)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer](trained)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if self.scheduler else None

        def run() -> Any:
            for _ in range(self.accumulate):
                with torch.autocast(device, torch.bfloat16, enabled=self.precision == "autocast"):
                    output = model(next_inputs())
                    loss = LOSSES[self.loss](output) / self.accumulate
                loss.backward()
            if self.clip == "norm":
                nn.utils.clip_grad_norm_(trained, 1.0)
            elif self.clip == "value":
                nn.utils.clip_grad_value_(trained, 0.5)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=self.to_none)
            if average is not None:
                with torch.no_grad():
                    for kept, new in zip(average.parameters(), model.parameters()):
                        kept.lerp_(new, 0.1)
            return RETURNS[self.returns](loss, output)

        return Step(model=model, optimizer=optimizer, run=run)

    def _inputs(self, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Return where batches come from: always the same, drawn anew, or two that take turns."""
        shape = (self.batch, self.seq, self.width)
        if self.inputs == "drawn":
            return lambda: torch.randn(shape, device=device, dtype=dtype)
        count = 1 if self.inputs == "same" else 2
        batches = itertools.cycle([torch.randn(shape, device=device, dtype=dtype) for _ in range(count)])
        return lambda: next(batches)


def _uses(parts: tuple[Part, ...], name: str) -> bool:
    return any(part.name == name or _uses(part.inside, name) for part in parts)


def _leaves() -> st.SearchStrategy[Part]:
    return st.sampled_from(sorted(LEAVES)).map(Part)


def _composites(inside: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    parts = st.lists(inside, min_size=1, max_size=3).map(tuple)
    return st.builds(Part, st.sampled_from(sorted(COMPOSITES)), parts)


def _cast_once(part: Part, inside_of_a_cast: bool = False) -> Part:
    """Leave out casts in casts: the outer one would convert the weights of the inner one as well."""
    is_cast = part.name in ("bfloat16", "float64")
    name = "sequence" if is_cast and inside_of_a_cast else part.name
    return Part(name, tuple(_cast_once(one, is_cast or inside_of_a_cast) for one in part.inside))


PARTS = st.recursive(_leaves(), _composites, max_leaves=5).map(_cast_once)


@st.composite
def generated_steps(draw: st.DrawFn) -> GeneratedStep:
    """Draw a step that runs on a CPU without this project."""
    parts = tuple(draw(st.lists(PARTS, min_size=1, max_size=4)))
    sparse = _uses(parts, "sparse_embedding")
    return GeneratedStep(
        parts=parts,
        batch=draw(st.sampled_from((2, 3, 8))),
        seq=draw(st.sampled_from((2, 5, 16))),
        width=draw(st.sampled_from((4, 8, 32))),
        optimizer=draw(st.sampled_from(SPARSE_OPTIMIZERS if sparse else sorted(OPTIMIZERS))),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        returns=draw(st.sampled_from(sorted(RETURNS))),
        accumulate=draw(st.sampled_from((1, 1, 2))),
        clip="" if sparse else draw(st.sampled_from(("", "", "norm", "value"))),
        precision=draw(st.sampled_from(("fp32", "fp32", "autocast", "bf16"))),
        inputs=draw(st.sampled_from(("same", "same", "drawn", "turns"))),
        average=draw(st.sampled_from((False, False, True))),
        scheduler=draw(st.booleans()),
        to_none=draw(st.booleans()),
    )
