"""Small steps of many processes, as people write them: FSDP2, HSDP, DDP, tensor parallel and pipelines.

Each is a function of the kind of device, as a training script has it; nothing in them knows trainfit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainfit import Step

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 96, 32, 3, 4, 16
Build = Callable[[str], Step]


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the width of the projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    """Two layers with an activation between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """One layer of a transformer; `again` recomputes the feed-forward part."""

    def __init__(self, width: int, again: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        y = checkpoint(self.feed_forward, y, use_reentrant=False) if self.again else self.feed_forward(y)
        return x + y


class Transformer(nn.Module):
    """A small language model; `around` recomputes whole blocks."""

    def __init__(
        self, width: int = WIDTH, layers: int = LAYERS, *, inside: bool = False, around: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, inside) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.around = around

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.around else layer(x)
        return self.output(self.norm(x))


def start(device: str) -> torch.device:
    """Join the other processes, as the first lines of a training script do."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device != "cuda":
        return torch.device(device)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def tokens_on(place: torch.device) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=place)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(
    model: nn.Module,
    place: torch.device,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    **options: Any,
) -> Step:
    """Train the model on one batch of tokens."""
    optimizing = optimizer(model.parameters(), lr=1e-3, **options)
    tokens = tokens_on(place)

    def run() -> torch.Tensor:
        value = loss(model, tokens)
        value.backward()
        before_step(model)
        optimizing.step()
        optimizing.zero_grad()
        return value

    return Step(model=model, optimizer=optimizing, run=run)


# FSDP2 ----------------------------------------------------------------------------------------------------


def sharded(
    place: torch.device, *, model: dict[str, Any] | None = None, mesh: Any = None, **how: Any
) -> Transformer:
    """Shard each block and the root."""
    made = Transformer(**(model or {})).to(place)
    if mesh is None:
        mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    for layer in made.layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(made, mesh=mesh, **how)
    return made


def fsdp(device: str, **how: Any) -> Step:
    place = start(device)
    return trained(sharded(place, **how), place)


def fsdp_kept(device: str) -> Step:
    return fsdp(device, reshard_after_forward=False)


def fsdp_partly(device: str) -> Step:
    return fsdp(device, reshard_after_forward=2)


def fsdp_bf16(device: str) -> Step:
    return fsdp(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp_bf16_reduced_in_fp32(device: str) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(device, mp_policy=policy)


def fsdp_uneven(device: str) -> Step:
    return fsdp(device, model={"width": 40, "layers": 2})


def fsdp_checkpoint_inside(device: str) -> Step:
    return fsdp(device, model={"inside": True})


def fsdp_checkpoint_around(device: str) -> Step:
    return fsdp(device, model={"around": True})


def fsdp_offloaded(device: str) -> Step:
    place = start(device)
    model = sharded(place, offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"))
    return trained(model, place)


def fsdp_foreach(device: str) -> Step:
    place = start(device)
    return trained(sharded(place), place, foreach=True)


def fsdp_fused(device: str) -> Step:
    place = start(device)
    return trained(sharded(place), place, fused=True)


def fsdp_for_loop(device: str) -> Step:
    place = start(device)
    return trained(sharded(place), place, foreach=False)


def fsdp_sgd(device: str) -> Step:
    place = start(device)
    return trained(sharded(place), place, optimizer=torch.optim.SGD, momentum=0.9)


def fsdp_clipped(device: str) -> Step:
    place = start(device)
    return trained(sharded(place), place, before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0))


def fsdp_norm_read(device: str) -> Step:
    """The norm is gathered and printed, as loops do."""
    place = start(device)

    def clip(model: nn.Module) -> float:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return float(norm.full_tensor().item())

    return trained(sharded(place), place, before_step=clip)


def fsdp_prefetch(device: str) -> Step:
    place = start(device)
    model = sharded(place)
    blocks: list[Any] = list(model.layers)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    for before, block in itertools.pairwise(blocks):
        block.set_modules_to_backward_prefetch([before])
    return trained(model, place)


def accumulating(device: str, *, sync: bool) -> Step:
    place = start(device)
    model: Any = sharded(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = [tokens_on(place) for _ in range(3)]

    def run() -> torch.Tensor:
        for number, tokens in enumerate(parts):
            if not sync:
                model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = loss_of(model, tokens) / len(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def fsdp_accumulating(device: str) -> Step:
    return accumulating(device, sync=True)


def fsdp_accumulating_unsynced(device: str) -> Step:
    return accumulating(device, sync=False)


def fsdp_meta_init(device: str) -> Step:
    """Made on the meta device, sharded, then given memory, as large models are."""
    place = start(device)
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=place)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return trained(model, place)


def two_by(device: str, *names: str) -> DeviceMesh:
    """A mesh of two dimensions, the inner one of two ranks."""
    world = dist.get_world_size()
    return init_device_mesh(device, (world // 2, 2), mesh_dim_names=names)


def hsdp(device: str) -> Step:
    place = start(device)
    return trained(sharded(place, mesh=two_by(device, "replicate", "shard")), place)


def hsdp_bf16(device: str) -> Step:
    place = start(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(place, mesh=two_by(device, "replicate", "shard"), mp_policy=policy), place)


# DDP ------------------------------------------------------------------------------------------------------


def ddp(device: str, **how: Any) -> Step:
    place = start(device)
    ids = [place.index] if device == "cuda" else None
    model = DistributedDataParallel(Transformer().to(place), device_ids=ids, **how)
    return trained(model, place)


def ddp_views(device: str) -> Step:
    return ddp(device, gradient_as_bucket_view=True)


def ddp_small_buckets(device: str) -> Step:
    return ddp(device, bucket_cap_mb=0.02)


def ddp_no_sync(device: str, **how: Any) -> Step:
    place = start(device)
    model = DistributedDataParallel(Transformer().to(place), **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = [tokens_on(place) for _ in range(3)]

    def run() -> torch.Tensor:
        for number, tokens in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, tokens) / len(parts)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def ddp_views_no_sync(device: str) -> Step:
    return ddp_no_sync(device, gradient_as_bucket_view=True)


# Tensor parallel ------------------------------------------------------------------------------------------


def tensor_parallel(model: Transformer, mesh: DeviceMesh, **output: Any) -> Transformer:
    """Split attention, feed-forward, embedding and output over the mesh."""
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate(), **output),
    }
    parallelize_module(model, mesh, outside)
    for layer in model.layers:
        parts = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan = {
            **parts,
            "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def tp(device: str) -> Step:
    place = start(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return trained(tensor_parallel(Transformer().to(place), mesh), place, foreach=False)


def sequence_parallel(model: Transformer, mesh: DeviceMesh, output: ColwiseParallel) -> Transformer:
    """The plan of large language models: norms work on parts of the sequence."""
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": output,
    }
    parallelize_module(model, mesh, outside)
    for layer in model.layers:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": whole,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    return model


def sp(device: str) -> Step:
    place = start(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return trained(sequence_parallel(Transformer().to(place), mesh, output), place)


def parallel_loss(device: str) -> Step:
    place = start(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model = sequence_parallel(Transformer().to(place), mesh, output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = tokens_on(place)

    def run() -> torch.Tensor:
        with loss_parallel():
            loss = loss_of(model, tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def tp_fsdp(device: str) -> Step:
    place = start(device)
    mesh = two_by(device, "dp", "tp")
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    model = sequence_parallel(Transformer().to(place), mesh["tp"], output)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return trained(model, place)


# Pipelines ------------------------------------------------------------------------------------------------


def pipeline(device: str, schedule: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    place = start(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Transformer(layers=world)
    part = nn.Sequential()
    if rank == 0:
        part.append(model.embedding)
    part.append(model.layers[rank])
    if rank == world - 1:
        part.append(model.norm).append(model.output)
    part.to(place)
    del model
    stage = PipelineStage(part, rank, world, place)
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    schedules = kinds[schedule](
        stage,
        n_microbatches=4,
        loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
    )
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    tokens = tokens_on(place)

    def run() -> Any:
        first = (tokens,) if rank == 0 else ()
        losses: list[torch.Tensor] = []
        if rank == world - 1:
            schedules.step(*first, target=tokens, losses=losses)
        else:
            schedules.step(*first)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Step(model=part, optimizer=optimizer, run=run)


def gpipe(device: str) -> Step:
    return pipeline(device, "gpipe")


def one_f_one_b(device: str) -> Step:
    return pipeline(device, "1f1b")


FSDP: tuple[Build, ...] = (
    fsdp, fsdp_kept, fsdp_partly, fsdp_bf16, fsdp_bf16_reduced_in_fp32, fsdp_uneven, fsdp_checkpoint_inside,
    fsdp_checkpoint_around, fsdp_offloaded, fsdp_foreach, fsdp_fused, fsdp_for_loop, fsdp_sgd, fsdp_clipped,
    fsdp_norm_read, fsdp_prefetch, fsdp_accumulating, fsdp_accumulating_unsynced, fsdp_meta_init, hsdp,
    hsdp_bf16,
)  # fmt: skip
DDP: tuple[Build, ...] = (ddp, ddp_views, ddp_small_buckets, ddp_no_sync, ddp_views_no_sync)
TENSOR_PARALLEL: tuple[Build, ...] = (tp, sp, parallel_loss, tp_fsdp)
PIPELINES: tuple[Build, ...] = (gpipe, one_f_one_b)
EVERY_STEP = {build.__name__: build for build in (*FSDP, *DDP, *TENSOR_PARALLEL, *PIPELINES)}
