"""Context parallelism: each rank has a part of every sequence, and keys and values go around."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.parallel import DistributedDataParallel

import trainfit

from .fsdp_steps import flat_mesh, sharded, two_by
from .processor_rings import divide_attention_of_processors
from .small_transformer import CONTEXT, Transformer, adamw, own_device, token_batch, token_loss

GPU_PART = 64
"""Tokens of a rank on a GPU, whose kernel for float32 takes pieces of 32, of which a rank has two."""


def _context(mesh: DeviceMesh) -> int:
    """Return the length of the sequences that all ranks of the mesh have together."""
    return CONTEXT if own_device().type == "cpu" else GPU_PART * mesh.size()


def _model(mesh: DeviceMesh) -> Transformer:
    return Transformer(context=_context(mesh)).to(own_device())


def _step(model: nn.Module, context: DeviceMesh, method: str) -> trainfit.Step:
    if own_device().type == "cpu":
        divide_attention_of_processors()
    _attention.set_rotate_method(method)
    optimizer, tokens = adamw(model), token_batch(context=_context(context))
    labels, places = tokens.clone(), torch.arange(tokens.shape[1], device=tokens.device)

    def run() -> torch.Tensor:
        buffers = [tokens, labels, places]
        with context_parallel(context, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            loss = token_loss(model(tokens, places), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def gathered() -> trainfit.Step:
    """Keys and values of all ranks are gathered at once; DDP adds up the gradients."""
    mesh = flat_mesh()
    model = DistributedDataParallel(_model(mesh), process_group=mesh.get_group())
    return _step(model, mesh, "allgather")


def around_the_ring() -> trainfit.Step:
    """Keys and values go from rank to rank."""
    mesh = flat_mesh()
    model = DistributedDataParallel(_model(mesh), process_group=mesh.get_group())
    return _step(model, mesh, "alltoall")


def with_fsdp() -> trainfit.Step:
    """The ranks of a sequence are two, and FSDP divides the parameters among all ranks, as trainers do."""
    mesh = two_by(2, ("dp", "cp"))
    model = sharded(_model(mesh["cp"]), mesh["dp", "cp"]._flatten("dp_cp"))
    return _step(model, mesh["cp"], "allgather")
