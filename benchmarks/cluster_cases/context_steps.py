"""Context parallelism: each rank has a part of every sequence, and keys and values go around.

torch's own `context_parallel` divides the attention kernels of GPUs only. For a truth on processors, the cases
tell it how to divide theirs: the templates that run the ring, the sharding of buffers and the exchange are
torch's, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel, register_sharding
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.parallel import DistributedDataParallel

import trainfit

from .fsdp_steps import flat_mesh, sharded, two_by
from .small_transformer import Transformer, adamw, token_batch, token_loss

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = Shard(2)


def _ring(group: Any, query: Any, key: Any, value: Any, *options: Any, **others: Any) -> Any:
    dropout, is_causal = (*options, *(0.0, False)[len(options) :])
    run = _attention._templated_ring_attention
    return run(group, 2, _FORWARD, query, key, value, is_causal=is_causal, dropout_p=dropout, **others)


def _ring_backward(group: Any, gradient: Any, *saved: Any, **others: Any) -> Any:
    *tensors, dropout, is_causal = saved
    run = _attention._templated_ring_attention_backward
    return run(group, 2, _BACKWARD, gradient, "grad_out", *tensors, is_causal, dropout_p=dropout, **others)


def _divided(call: Any, args: Any, kwargs: Any) -> Any:
    """Run the ring on the local parts of an attention's arguments."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(call, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    ring = _ring if call is _FORWARD else _ring_backward
    found = ring(info.compute_mesh.get_group(), *info.local_args, **info.local_kwargs)
    return dispatcher.wrap(found, info.output_sharding.output_spec)


def _divide_attention_of_processors() -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        others = [None] * (len(args) - 3 + len(kwargs))
        return [([_SEQUENCE, _SEQUENCE], [_SEQUENCE, _SEQUENCE, _SEQUENCE, *others])]

    def backward(*args: Any, **kwargs: Any) -> Any:
        others = [None] * (len(args) - 6 + len(kwargs))
        return [([_SEQUENCE] * 3, [*[_SEQUENCE] * 6, *others])]

    register_sharding(_FORWARD)(forward)
    register_sharding(_BACKWARD)(backward)
    _attention.custom_ops |= {_FORWARD: _divided, _BACKWARD: _divided}


def _step(model: nn.Module, context: DeviceMesh, method: str) -> trainfit.Step:
    _divide_attention_of_processors()
    _attention.set_rotate_method(method)
    optimizer, tokens = adamw(model), token_batch()
    labels, places = tokens.clone(), torch.arange(tokens.shape[1])

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
    return _step(DistributedDataParallel(Transformer(), process_group=mesh.get_group()), mesh, "allgather")


def around_the_ring() -> trainfit.Step:
    """Keys and values go from rank to rank."""
    mesh = flat_mesh()
    return _step(DistributedDataParallel(Transformer(), process_group=mesh.get_group()), mesh, "alltoall")


def with_fsdp() -> trainfit.Step:
    """The ranks of a sequence are two, and FSDP divides the parameters among all ranks, as trainers do."""
    mesh = two_by(2, ("dp", "cp"))
    model = sharded(Transformer(), mesh["dp", "cp"]._flatten("dp_cp"))
    return _step(model, mesh["cp"], "allgather")
