"""Inductor's own scheduler nodes for small functions, made without writing or compiling any code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for its random graphs


@dataclass
class Scheduled:
    """A graph that inductor has lowered and fused, before any order was chosen."""

    lowered: Any
    nodes: list[Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What inductor gives `reorder_for_peak_memory`."""
        scheduler = self.lowered.scheduler
        inputs = OrderedSet(self.lowered.graph_inputs.keys())
        outputs = OrderedSet(self.lowered.get_output_names())
        return self.nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs

    @property
    def outputs(self) -> Any:
        return self.arguments[4]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let inductor's functions see the graph, as they do while it is compiled."""
        with V.set_graph_handler(self.lowered):
            yield


def schedule(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Scheduled:
    """Lower a function of tensors of these shapes; nothing is allocated, so that shapes may be large."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [torch.empty(shape) for shape in shapes]
        module = make_fx(function, decomposition_table=select_decomp_table())(*tensors)
    lowered = GraphLowering(module, example_inputs=tensors)
    handlers = (V.set_graph_handler(lowered), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()))
    with handlers[0], handlers[1], handlers[2], config.patch(reorder_for_peak_memory=False):
        lowered.run(*tensors)
        lowered.init_wrapper_code()
        lowered._update_scheduler()
    return Scheduled(lowered, list(lowered.scheduler.nodes))


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Matrix products are kernels of their own: nothing is fused over them."""
    return ((x @ w) @ w) @ w


def heads(x: Tensor, w: Tensor) -> Tensor:
    wide = [x @ (w + n) for n in range(6)]
    return torch.stack([(one @ x).sum() for one in reversed(wide)])


def two_branches(x: Tensor, thin: Tensor, one: Tensor, wide: Tensor, more: Tensor) -> Tensor:
    """One branch is wide first and thin later, the other the other way round."""
    first, second = x @ wide, x @ one
    return (first @ thin).sum() + (second @ more).sum()


def branches_for_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same, as the forward of a training step: what backward will read is returned too.

    Inputs of a function that names none are called `arg...`, which inductor does not free.
    """
    x, thin, one, wide, more = tensors
    first, second = x @ wide, x @ one
    return (first @ thin).sum() + (second @ more).sum(), second, first


def several_outputs(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    values, indices = torch.topk(x @ w, 3)
    ordered, positions = torch.sort(x, 0)
    return values.sum() + (ordered @ w).sum() + indices.float().mean(), positions


def in_place(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = x @ w
    b = a @ w
    a.index_put_((torch.tensor([1]),), b[2], accumulate=True)
    c = a @ w
    a.index_put_((torch.tensor([2]),), b[3], accumulate=True)
    return c + b, a @ x


def changed_input(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    x.index_put_((torch.tensor([1]),), y[2], accumulate=True)
    return y @ x


def returned_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x @ w) @ w


def training_step(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    leaves = [weight.detach().requires_grad_() for weight in weights]
    hidden = x
    for weight in leaves:
        hidden = torch.nn.functional.gelu(hidden @ weight)
    loss = (hidden * hidden).mean()
    return (loss, *torch.autograd.grad(loss, leaves))


def attention(x: Tensor, w: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    w = w.detach().requires_grad_()
    q, k, v = (x @ w).chunk(3, -1)
    scores = torch.softmax(q @ k.transpose(-1, -2), -1)
    loss = ((scores @ v) @ out).square().sum()
    return (loss, *torch.autograd.grad(loss, [w]))


def convolutions(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    first, second = (w.detach().requires_grad_() for w in (first, second))
    hidden = torch.relu(torch.conv2d(x, first, padding=1))
    pooled = torch.nn.functional.max_pool2d(hidden, 2)
    loss = torch.conv2d(pooled, second).square().mean()
    return (loss, *torch.autograd.grad(loss, [first, second]))


SQUARE = (64, 64)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "chain": (chain, (SQUARE, SQUARE)),
    "heads": (heads, (SQUARE, SQUARE)),
    "two branches": (two_branches, ((2048, 1), (10, 1), (1, 1), (1, 10), (1, 10))),
    "branches for backward": (branches_for_backward, ((2048, 1), (10, 1), (1, 1), (1, 10), (1, 10))),
    "several outputs": (several_outputs, (SQUARE, SQUARE)),
    "in place": (in_place, (SQUARE, SQUARE)),
    "changed input": (changed_input, (SQUARE, SQUARE)),
    "returned input": (returned_input, (SQUARE, SQUARE)),
    "training step": (training_step, ((32, 64), (64, 128), (128, 16), (16, 256))),
    "attention": (attention, ((2, 16, 32), (32, 96), (32, 8))),
    "convolutions": (convolutions, ((2, 3, 16, 16), (8, 3, 3, 3), (4, 8, 3, 3))),
}


def scheduled(name: str) -> Scheduled:
    """Return one of the functions above."""
    function, shapes = FUNCTIONS[name]
    return schedule(function, *shapes)
