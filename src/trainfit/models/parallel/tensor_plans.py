"""The standard tensor-parallel plan of each built-in family, by module.

Projections into a block's inside (queries, keys, values, up, gate) are divided by columns and those back by
rows, so that a block communicates twice in forward: after attention and after the feed-forward (Shoeybi et
al. 2019, Megatron-LM). The embedding of tokens and the head are divided along the vocabulary, and the loss is
computed in parts. In Llama and Mixtral the sequence is divided where layers are not, at the norms and the
residuals (Korthikanti et al. 2022); the older models keep those whole on every rank.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from trainfit.models.parallel.tensor_styles import Copied, DividedExperts, FusedColwise

Plan = dict[str, ParallelStyle]
"""Module names, in which `*` is any one part, and how those are divided. The empty name is the model."""


def gpt2_plan() -> Plan:
    """Return GPT-2's: one fused projection to queries, keys and values; norms whole."""
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "position_embedding": Copied(),
        "blocks.*.attention_norm": Copied(),
        "blocks.*.attention.qkv": FusedColwise(3),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.feed_forward_norm": Copied(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(),
        "norm": Copied(),
        "head": _head(),
    }


def bert_plan() -> Plan:
    """Return BERT's: the transform before the decoder is whole, as it is small."""
    return {
        "embeddings.token": RowwiseParallel(input_layouts=Replicate()),
        "embeddings.position": Copied(),
        "embeddings.token_type": Copied(),
        "embeddings.norm": Copied(),
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.output": RowwiseParallel(),
        "layers.*.attention_norm": Copied(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "layers.*.feed_forward_norm": Copied(),
        "head.transform": Copied(),
        "head.norm": Copied(),
        "head.decoder": _head(),
    }


def vit_plan() -> Plan:
    """Return a ViT's: patches, class token and the small head are whole."""
    return {
        "": Copied("begin"),
        "patch_embedding": Copied(),
        "blocks.*.attention_norm": Copied(),
        "blocks.*.attention.qkv": FusedColwise(3),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.feed_forward_norm": Copied(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "norm": Copied(),
        "head": Copied(),
    }


def llama_plan() -> Plan:
    """Return Llama's, with the sequence divided between its layers."""
    return _llama_attention() | {
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def mixtral_plan() -> Plan:
    """Return Mixtral's: Llama's, and of every expert a part on every rank."""
    return _llama_attention() | {
        "blocks.*.mixture_norm": SequenceParallel(),
        "blocks.*.mixture": DividedExperts(),
    }


def _llama_attention() -> Plan:
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": _head(Shard(1)),
    }


def _head(input_layout: Shard | Replicate | None = None) -> ParallelStyle:
    """Return a head that leaves its logits divided along the vocabulary, for a loss in parts."""
    return ColwiseParallel(
        input_layouts=input_layout or Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
