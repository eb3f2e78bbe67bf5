"""The steps of published runs on clusters: torchtitan's Llamas and Qwen3, nanotron's Llama, and MPT.

Each is written as its trainer ran it then: what FSDP gathers together, what a checkpoint keeps, in which
dtype rotations, norms and the loss are computed. Compiled steps are captured as they are written, with
checkpoints where the compiler would compute pointwise kernels again; `compiled_pricing.py` prices what it
fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainfit import Step
from trainfit.models.gpt2 import GPT2, GPT2Config
from trainfit.models.parallel.tensor_plans import llama_plan

from .models import CannotExpress

DEVICE = "cuda"
Config = dict[str, Any]
Policy = Callable[..., CheckpointPolicy]


def build_cluster_row(row: dict[str, Any]) -> Callable[[DeviceMesh], Step]:
    """Return the function that builds the step of one rank; `mesh` has `dp`, and `tp` if that divides."""
    framework = row["config"]["framework"]
    if framework.startswith("torchtitan"):
        return lambda mesh: _titan(row, mesh)
    if framework.startswith("nanotron"):
        return lambda mesh: _nanotron(row, mesh)
    if framework.startswith("llm-foundry"):
        return lambda mesh: _mpt(row, mesh)
    raise CannotExpress(f"nobody has written the steps of {framework} here")


# ------------------------------------------------------------------------------------------- the Llamas


class _PlainRMSNorm(nn.Module):
    """RMSNorm as torch computed it before version 2.8: one kernel after the other, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(hidden) * self.weight


def _norm(width: int, fused: bool) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5) if fused else _PlainRMSNorm(width)


class _Attention(nn.Module):
    """Grouped queries; keys and values are copied for every query head, as trainers did."""

    def __init__(self, arch: Config, fused_norm: bool, turns_in_float32: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = arch["n_heads"], arch["n_kv_heads"]
        self.head_size = arch.get("head_dim") or arch["dim"] // self.heads
        self.turns_in_float32 = turns_in_float32
        self.query = nn.Linear(arch["dim"], self.heads * self.head_size, bias=False)
        self.key = nn.Linear(arch["dim"], self.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(arch["dim"], self.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(self.heads * self.head_size, arch["dim"], bias=False)
        if arch.get("qk_norm"):
            self.query_norm = _norm(self.head_size, fused_norm)
            self.key_norm = _norm(self.head_size, fused_norm)

    def forward(self, hidden: Tensor, turning: Tensor) -> Tensor:
        batch, seq, _ = hidden.shape
        query = self.query(hidden).view(batch, seq, -1, self.head_size)
        key = self.key(hidden).view(batch, seq, -1, self.head_size)
        value = self.value(hidden).view(batch, seq, -1, self.head_size)
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._turned(query, turning), self._turned(key, turning)
        copies = self.heads // self.kv_heads
        key, value = _copied(key, copies).transpose(1, 2), _copied(value, copies).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected

    def _turned(self, vectors: Tensor, turning: Tensor) -> Tensor:
        pairs = torch.view_as_complex(vectors.float().reshape(*vectors.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turning[None, :, None]).flatten(3).type_as(vectors)


def _copied(heads: Tensor, times: int) -> Tensor:
    if times == 1:
        return heads
    batch, seq, count, size = heads.shape
    return heads[:, :, :, None].expand(batch, seq, count, times, size).reshape(batch, seq, -1, size)


class _FeedForward(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inside, bias=False)
        self.up = nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return narrowed


class _Block(nn.Module):
    def __init__(self, arch: Config, fused_norm: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(arch["dim"], fused_norm)
        self.attention = _Attention(arch, fused_norm, turns_in_float32=True)
        self.feed_forward_norm = _norm(arch["dim"], fused_norm)
        self.feed_forward = _FeedForward(arch["dim"], arch["ffn_hidden"])

    def forward(self, hidden: Tensor, turning: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), turning)
        added: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + added


class _Llama(nn.Module):
    """Names are those of the built-in Llama, so that its tensor-parallel plan holds."""

    def __init__(self, arch: Config, fused_norm: bool) -> None:
        super().__init__()
        self.head_size = arch.get("head_dim") or arch["dim"] // arch["n_heads"]
        self.token_embedding = nn.Embedding(arch["vocab"], arch["dim"])
        self.blocks = nn.ModuleList(_Block(arch, fused_norm) for _ in range(arch["n_layers"]))
        self.norm = _norm(arch["dim"], fused_norm)
        self.head = nn.Linear(arch["dim"], arch["vocab"], bias=False)
        if arch["tied"]:
            self.head.weight = self.token_embedding.weight

    def prepare(self, seq: int) -> None:
        """Keep the angles of every position, as trainers do."""
        exponents = torch.arange(0, self.head_size, 2, device=DEVICE).float() / self.head_size
        angles = torch.outer(torch.arange(seq, device=DEVICE).float(), 5e5**-exponents)
        self.register_buffer("turning", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.token_embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.turning)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


# ---------------------------------------------------------------------------------------- checkpointing


def _every_other_product() -> Policy:
    """Keep attention, reductions and every other product, count by count: "selective op"."""
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.name()
        if name == "aten::mm":
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = "scaled_dot_product" in name or "reduce_scatter_tensor" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _all_products() -> Policy:
    """Keep what a compiler would not compute again: products, attention and what ranks exchange."""

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.name()
        kept = name in ("aten::mm", "aten::addmm") or "scaled_dot_product" in name or "_c10d" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _checkpoint(block: nn.Module, policy: Callable[[], Policy] | None) -> None:
    forward = block.forward
    extra: dict[str, Any] = {}
    if policy is not None:
        extra["context_fn"] = lambda: create_selective_checkpoint_contexts(policy())
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, **extra)  # type: ignore[method-assign]


def _checkpoints(blocks: list[nn.Module], config: Config) -> None:
    kind, compiled = config["ac"], bool(config["compile"])
    if kind.startswith("selective op"):
        policy: Callable[[], Policy] | None = _every_other_product
    elif kind.startswith("full"):
        policy = None
    elif kind.startswith("selective layer"):
        every = int(kind.split()[-1])
        for number, block in enumerate(blocks):
            if (number + 1) % every == 0:
                _checkpoint(block, None)
        return
    elif kind.startswith("none"):
        if not compiled:
            return
        policy = _all_products
    else:
        raise CannotExpress(f"checkpointing {kind!r}")
    for block in blocks:
        _checkpoint(block, policy)


# -------------------------------------------------------------------------------------------- torchtitan


def _titan(row: dict[str, Any], mesh: DeviceMesh) -> Step:
    config = row["config"]
    if config.get("linear_precision", "bf16").startswith("float8"):
        raise CannotExpress("products in float8 by torchao, which casts and keeps what no capture shows")
    if str(config["compile"]).startswith("graph"):
        # torchtitan's graph_trainer: its README of these days says SimpleFSDP, and no inductor by default.
        raise CannotExpress("SimpleFSDP in a traced graph, which gathers and frees otherwise than FSDP2")
    fused_norm = "norm" in config or "separate groups" in config["sharding"]
    model = _Llama(row["arch"], fused_norm)
    model.prepare(config["seq_len"])
    model = model.to(DEVICE).train()
    divided = config.get("tp", 1) > 1
    if divided:
        parallelize_module(model, mesh["tp"], llama_plan())
    _checkpoints(list(model.blocks), config)
    _shard_titan(model, mesh["dp"], config)
    fused = "fused (" in config["optimizer"] and config.get("fused_optimizer") is not False
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=fused or None, foreach=None if fused else True
    )
    shape = (config["batch_per_gpu"], config["seq_len"])
    tokens = torch.randint(0, row["arch"]["vocab"], shape, device=DEVICE)
    labels = torch.randint(0, row["arch"]["vocab"], shape, device=DEVICE)
    chunked = "chunked" in config["loss"] and "unchunked" not in config["loss"]
    compiled = "loss" in str(config["compile"])
    loss_of = _chunked_loss if chunked else _CompiledLoss.apply if compiled else _loss

    def run() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if divided else nullcontext():
            logits = model(tokens)
            loss = loss_of(logits, labels)
            del logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss

    return Step(model=model, optimizer=optimizer, run=run, samples=shape[0], tokens=shape[0] * shape[1])


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class _CompiledLoss(torch.autograd.Function):
    """Cross-entropy as inductor runs it: of all that is computed in float32, nothing but sums is stored.

    It keeps the logits as they are and writes their gradient at once. Here that is done by few rows at a
    time, so that what they need for a moment does not count.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, 1), labels.flatten(0, 1)
        sums = [F.cross_entropy(part.float(), own, reduction="sum") for part, own in _few_rows(flat, wanted)]
        context.save_for_backward(logits, labels)
        return torch.stack(sums).sum() / wanted.numel()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, labels = context.saved_tensors
        found = torch.empty_like(logits)
        wanted = labels.flatten(0, 1)
        for (part, own), place in zip(
            _few_rows(logits.flatten(0, 1), wanted), found.flatten(0, 1).split(_ROWS), strict=True
        ):
            shares = torch.softmax(part.float(), -1)
            shares.scatter_add_(1, own[:, None], torch.full_like(own[:, None], -1.0, dtype=shares.dtype))
            place.copy_(shares.mul_(gradients[0] / wanted.numel()))
        return found, None


_ROWS = 256


def _few_rows(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(logits.split(_ROWS), labels.split(_ROWS), strict=True)


def _chunked_loss(logits: Tensor, labels: Tensor, chunks: int = 8) -> Tensor:
    """Cross-entropy of one part of the tokens after the other, so that few of them are in float32 at once."""
    parts = zip(logits.flatten(0, 1).chunk(chunks), labels.flatten(0, 1).chunk(chunks))
    return (
        sum(
            (checkpoint(_summed_loss, *part, use_reentrant=False) for part in parts),
            torch.zeros((), device=DEVICE),
        )
        / labels.numel()
    )


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def _shard_titan(model: _Llama, mesh: DeviceMesh, config: Config) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    blocks = list(model.blocks)
    always = config.get("reshard", "").startswith("always")
    separate = "separate groups" in config["sharding"]
    if separate:
        shard(model.token_embedding, reshard_after_forward=True)
    for number, block in enumerate(blocks):
        shard(block, reshard_after_forward=always or separate or number < len(blocks) - 1)
    if separate:
        shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)


# ------------------------------------------------------------------------------------------- llm-foundry


def _mpt(row: dict[str, Any], mesh: DeviceMesh) -> Step:
    """One micro-batch and the optimizer; `cluster_rows.py` counts the micro-batches."""
    arch, config = row["arch"], row["config"]
    if config["precision"] == "amp_fp8":
        raise CannotExpress("products in float8 by TransformerEngine")
    shape = GPT2Config(
        vocab_size=arch["vocab"],
        context=config["seq_len"],
        layers=arch["n_layers"],
        heads=arch["n_heads"],
        hidden=arch["dim"],
        dropout=0.0,
    )
    pure = config["mp_mode"] == "PURE"
    model = GPT2(shape).to(DEVICE).train()
    _checkpoints(list(model.blocks), config)
    reduce = torch.bfloat16 if pure else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    again = config["sharding"] == "FULL_SHARD"
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    size = (config["batch_per_gpu"], config["seq_len"])
    tokens = torch.randint(0, arch["vocab"], size, device=DEVICE)

    def run() -> Tensor:
        loss: Tensor = model(tokens, labels=tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run, samples=size[0], tokens=size[0] * size[1])


# ---------------------------------------------------------------------------------------------- nanotron


def _nanotron(row: dict[str, Any], mesh: DeviceMesh) -> Step:
    """bfloat16 parameters with float32 copies, gradients added up in float32; zero 1 divides the optimizer.

    A step has one micro-batch whose gradients stay here, if there are several, and one after which they are
    reduced; `cluster_pricing.py` counts the others.
    """
    arch, config = row["arch"], row["config"]
    model = _Llama(arch, fused_norm=True)
    model = model.to(device=DEVICE, dtype=torch.bfloat16).train()
    model.prepare(config["seq_len"])
    masters = _Masters(list(model.parameters()), mesh["dp"], divided=bool(config["zero"]))
    shape = (config["batch_per_gpu"], config["seq_len"])
    tokens = torch.randint(0, arch["vocab"], shape, device=DEVICE)
    micro = min(config["grad_accum"], 2)

    def run() -> Tensor:
        masters.gradients.zero_()
        for _ in range(micro):
            loss = _loss(model(tokens), tokens)
            loss.backward()
        masters.update()
        return loss.detach()

    samples = micro * shape[0]
    return Step(model=model, optimizer=masters.optimizer, run=run, samples=samples, tokens=samples * shape[1])


class _Masters:
    """Float32 copies of parameters, or of a rank's part of them, which the optimizer works on."""

    def __init__(self, parameters: list[nn.Parameter], mesh: DeviceMesh, *, divided: bool) -> None:
        self.parameters, self.group, self.divided = parameters, mesh.get_group(), divided
        size = sum(parameter.numel() for parameter in parameters)
        self.size = size + -size % mesh.size()
        self.gradients = torch.zeros(self.size, device=DEVICE)
        self.own = self.size // mesh.size() if divided else self.size
        self.weights = nn.Parameter(torch.zeros(self.own, device=DEVICE))
        self.optimizer = torch.optim.AdamW([self.weights], lr=3e-4, fused=True)
        for parameter, place in zip(parameters, _places(self.gradients, parameters)):
            parameter.register_post_accumulate_grad_hook(partial(_add_up, place))

    def update(self) -> None:
        """Reduce the gradients, step, and hand the weights to the parameters."""
        mine = self.gradients
        if self.divided:
            mine = torch.empty(self.own, device=DEVICE)
            dist.reduce_scatter_tensor(mine, self.gradients, group=self.group)
        else:
            dist.all_reduce(self.gradients, group=self.group)
        self.weights.grad = mine
        torch.nn.utils.clip_grad_norm_([self.weights], 1.0)
        self.optimizer.step()
        self.weights.grad = None
        updated = self.weights.detach().to(torch.bfloat16)
        if self.divided:
            whole = torch.empty(self.size, device=DEVICE, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(whole, updated, group=self.group)
            updated = whole
        with torch.no_grad():
            for parameter, place in zip(self.parameters, _places(updated, self.parameters)):
                parameter.copy_(place)


def _add_up(place: Tensor, parameter: Tensor) -> None:
    place.add_(parameter.grad)  # type: ignore[arg-type]
    parameter.grad = None


def _places(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    found, begin = [], 0
    for parameter in parameters:
        found.append(flat[begin : begin + parameter.numel()].view_as(parameter))
        begin += parameter.numel()
    return found
