"""DistributedDataParallel, tensor and sequence parallelism, and tensor parallelism with FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import trainfit

from .fsdp_steps import flat_mesh, sharded, two_by
from .small_transformer import Transformer, adamw, own_device, start, token_batch, token_loss, usual_step


def _ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Transformer().to(start()), **options)


def ddp() -> trainfit.Step:
    model = _ddp()
    return usual_step(model, adamw(model), token_batch())


def ddp_bucket_views() -> trainfit.Step:
    model = _ddp(gradient_as_bucket_view=True)
    return usual_step(model, adamw(model), token_batch())


def ddp_small_buckets() -> trainfit.Step:
    model = _ddp(bucket_cap_mb=0.1)
    return usual_step(model, adamw(model), token_batch())


def ddp_no_sync() -> trainfit.Step:
    model = _ddp()
    optimizer, tokens = adamw(model), token_batch()

    def run() -> torch.Tensor:
        total = torch.zeros((), device=tokens.device)
        for part, micro_batch in enumerate(tokens.chunk(2)):
            with model.no_sync() if part == 0 else nullcontext():
                loss = token_loss(model(micro_batch), micro_batch) / 2
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def _tensor_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(),
            },
        )
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def tensor_parallel() -> trainfit.Step:
    model = _tensor_parallel(Transformer().to(own_device()), flat_mesh())
    return usual_step(model, adamw(model, foreach=False), token_batch())


def _sequence_parallel(model: Transformer, mesh: DeviceMesh, output: ColwiseParallel) -> Transformer:
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        # The positions are the same on all ranks, and each takes its part of them.
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "output": output,
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def sequence_parallel() -> trainfit.Step:
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    model = _sequence_parallel(Transformer().to(own_device()), flat_mesh(), output)
    return usual_step(model, adamw(model), token_batch())


def loss_parallel_step() -> trainfit.Step:
    """The logits stay divided by vocabulary, and so does the loss."""
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model = _sequence_parallel(Transformer().to(own_device()), flat_mesh(), output)
    optimizer, tokens = adamw(model), token_batch()

    def run() -> torch.Tensor:
        with loss_parallel():
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def tensor_parallel_and_fsdp() -> trainfit.Step:
    mesh = two_by(2, ("dp", "tp"))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    model = _sequence_parallel(Transformer().to(own_device()), mesh["tp"], output)
    sharded(model, mesh["dp"])
    return usual_step(model, adamw(model), token_batch())
