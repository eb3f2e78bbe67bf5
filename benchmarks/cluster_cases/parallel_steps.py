"""DistributedDataParallel, tensor and sequence parallelism, and tensor parallelism with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
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


def ddp_static_graph() -> trainfit.Step:
    model = _ddp(static_graph=True)
    return usual_step(model, adamw(model), token_batch())


def ddp_find_unused() -> trainfit.Step:
    model = _ddp(find_unused_parameters=True)
    return usual_step(model, adamw(model), token_batch())


def _hooked(hook: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> trainfit.Step:
    model = _ddp()
    model.register_comm_hook(state(), hook)
    return usual_step(model, adamw(model), token_batch())


def ddp_fp16_hook() -> trainfit.Step:
    """Gradients are exchanged in float16."""
    return _hooked(default_hooks.fp16_compress_hook)


def ddp_power_sgd() -> trainfit.Step:
    """Gradients are exchanged as products of small matrices, from the second step on."""
    make = partial(
        power_sgd.PowerSGDState, process_group=None, start_powerSGD_iter=2, use_error_feedback=True
    )
    return _hooked(power_sgd.powerSGD_hook, make)


def zero_optimizer() -> trainfit.Step:
    """Each rank has the optimizer's state of some parameters."""
    model = _ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return usual_step(model, optimizer, token_batch())


def fsdp_of_old() -> trainfit.Step:
    """FullyShardedDataParallel, the first."""
    device = start()
    model = FullyShardedDataParallel(Transformer().to(device), device_id=device)
    return usual_step(model, adamw(model), token_batch())


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
