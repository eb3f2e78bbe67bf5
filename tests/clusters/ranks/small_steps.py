"""A small transformer, arranged for several processes in ordinary PyTorch, with a plan applied on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import trainfit

WIDTH = 16
ApplyPlan = Callable[[nn.Module], object]
"""Applies a plan to a model, or does nothing."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.dropout(self.feed_forward(self.norm(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.output = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Staged(Transformer):
    """Blocks in two parts of three: such a part is a module around three units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), Block(), Block()) for _ in range(2))


def _nothing(model: nn.Module) -> None:
    """Apply no plan."""


def _mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def alone(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    model = Transformer()
    apply_plan(model)
    return model


def planned_then_sharded(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    mesh, model = _mesh(2, names=("dp",)), Transformer()
    apply_plan(model)
    return _shard(model, mesh)


def sharded_then_planned(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    model = _shard(Transformer(), _mesh(2, names=("dp",)))
    apply_plan(model)
    return model


def planned_then_replicated(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    _mesh(2, names=("dp",))
    model = Transformer()
    apply_plan(model)
    return DistributedDataParallel(model)


def replicated_then_planned(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    _mesh(2, names=("dp",))
    model = DistributedDataParallel(Transformer())
    apply_plan(model)
    return model


def planned_compiled_sharded(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    mesh, model = _mesh(2, names=("dp",)), Transformer()
    apply_plan(model)
    model.layers[0].compile(backend="eager")
    return _shard(model, mesh)


def parallel_planned_sharded(apply_plan: ApplyPlan = _nothing, backend: str = "") -> nn.Module:
    """The order that torchtitan uses; with a backend each block is compiled, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh, model = _mesh(dist.get_world_size() // 2, 2, names=("dp", "tp")), Transformer()
    for layer in model.layers:
        styles: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        styles |= {"attention.wo": RowwiseParallel()}
        styles |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], styles)
    apply_plan(model)
    for layer in model.layers if backend else ():
        layer.compile(backend=backend)
    return _shard(model, mesh["dp"])


def parallel_planned_compiled_sharded(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    return parallel_planned_sharded(apply_plan, "aot_eager")


def _shard_stages(model: Staged, **options: Any) -> Staged:
    mesh = _mesh(2, names=("dp",))
    for block in (block for stage in model.layers for block in stage):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def staged_then_sharded(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    model = Staged()
    apply_plan(model)
    return _shard_stages(model)


def staged_and_sharded(apply_plan: ApplyPlan = _nothing, **options: Any) -> nn.Module:
    model = _shard_stages(Staged(), **options)
    apply_plan(model)
    return model


def staged_and_kept(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    return staged_and_sharded(apply_plan, reshard_after_forward=False)


def staged_in_bf16(apply_plan: ApplyPlan = _nothing) -> nn.Module:
    """Inputs of units are cast in their hooks, and computed again with the region."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return staged_and_sharded(apply_plan, mp_policy=policy)


def keys_of(arrangement: str) -> list[str]:
    """Return the names of the weights of one process alone."""
    return list((Staged() if arrangement.startswith("staged") else Transformer()).state_dict())


def step_of(model: nn.Module, device: str = "cpu") -> trainfit.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    tokens = torch.randint(0, 32, (2, 8), device=device)

    def run() -> torch.Tensor:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)
