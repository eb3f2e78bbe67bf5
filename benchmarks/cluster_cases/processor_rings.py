"""The attention kernel of processors as a part of torch's `context_parallel`, which has those of GPUs only.

The templates that run the ring, the division of buffers and the exchange are torch's, as on a GPU: so there
is a truth to compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.experimental._context_parallel import _attention

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


def divide_attention_of_processors() -> None:
    """Tell torch's `context_parallel` how to divide the attention kernel of processors."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        others = [None] * (len(args) - 3 + len(kwargs))
        return [([_SEQUENCE, _SEQUENCE], [_SEQUENCE, _SEQUENCE, _SEQUENCE, *others])]

    def backward(*args: Any, **kwargs: Any) -> Any:
        others = [None] * (len(args) - 6 + len(kwargs))
        return [([_SEQUENCE] * 3, [*[_SEQUENCE] * 6, *others])]

    register_sharding(_FORWARD)(forward)
    register_sharding(_BACKWARD)(backward)
    _attention.custom_ops |= {_FORWARD: _divided, _BACKWARD: _divided}
