"""A transformers model, and mixtures of experts whose experts are divided among the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import trainfit

from .fsdp_steps import flat_mesh, two_by
from .small_transformer import VOCABULARY, WIDTH, adamw, own_device, token_batch, usual_step


def hf_llama() -> trainfit.Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = flat_mesh()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, tokens = adamw(model), token_batch()

    def run() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


class Experts(nn.Module):
    """Experts of one rank; tokens go to the rank of their expert and back, as many to each."""

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return tokens in the order of all experts: (ranks * count, tokens per expert, width)."""
        ranks, count = dist.get_world_size(self.group), self.up.shape[0]
        here = _AllToAll.apply(x.contiguous(), self.group)
        per_rank = here.view(ranks, count, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)
        done = torch.bmm(functional.gelu(torch.bmm(per_rank, self.up)), self.down)
        back = done.view(count, ranks, -1, x.shape[-1]).transpose(0, 1).contiguous()
        return _AllToAll.apply(back.view_as(x), self.group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup):
        ctx.group = group
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=group)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor):
        result = torch.empty_like(gradient)
        dist.all_to_all_single(result, gradient.contiguous(), group=ctx.group)
        return result, None


class MixtureBlock(nn.Module):
    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Experts(group, experts // dist.get_world_size(group))
        self.count = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        # Each expert chooses its tokens, so that all have as many.
        weights, chosen = scores.t().topk(tokens.shape[0] // self.count, dim=-1)
        outputs = self.experts(tokens[chosen])
        result = torch.zeros_like(tokens).index_add(
            0, chosen.flatten(), (outputs * weights.unsqueeze(-1)).flatten(0, 1)
        )
        return x + result.view_as(x)


class Mixture(nn.Module):
    def __init__(self, group: dist.ProcessGroup, layers: int = 2, experts: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MixtureBlock(group, experts) for _ in range(layers))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def experts_parallel() -> trainfit.Step:
    """Experts on different ranks, everything else on all of them."""
    mesh = flat_mesh()
    group = mesh.get_group()
    model = Mixture(group).to(own_device())
    own = {parameter for layer in model.layers for parameter in layer.experts.parameters()}
    shared = [parameter for parameter in model.parameters() if parameter not in own]

    def reduce_shared() -> None:
        for parameter in shared:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)

    return usual_step(model, adamw(model), token_batch(), reduce_shared)


def experts_parallel_and_fsdp() -> trainfit.Step:
    """Experts divided over the inner ranks and sharded over the outer ones, the rest sharded over all."""
    mesh = two_by(2, ("outer", "experts"))
    whole = mesh._flatten("all")
    model = Mixture(mesh["experts"].get_group())
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["outer"])
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    return usual_step(model, adamw(model, foreach=False), token_batch())
