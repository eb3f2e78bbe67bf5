"""Fine-tuning BERT-large as the Hugging Face Trainer did in January 2022: published rows of reserved memory.

One parameter is updated after the other (`adamw_hf`), gradients are set to zero and stay, attention writes
its probabilities out, and gradients are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit import Step

from .older_torch import SoftmaxWithInput

DEVICE = "cuda"


def build_fine_tuning(config: dict[str, Any]) -> Callable[[], Step]:
    """Return the function that builds the step of a row."""
    return lambda: _fine_tuning(config)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in plain operators, as BERT had it."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if attention_mask is None:  # BERT added a mask of zeros
        attention_mask = torch.zeros(query.shape[0], 1, 1, key.shape[2], device=query.device)
    weights = SoftmaxWithInput.apply(scores + attention_mask)
    weights = torch.nn.functional.dropout(weights, kwargs.get("dropout", 0.1), training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def _fine_tuning(config: dict[str, Any]) -> Step:
    import transformers as t

    shape = t.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    t.AttentionInterface.register("softmax_with_input", _attention)
    shape._attn_implementation = "softmax_with_input"
    model = t.BertForSequenceClassification(shape).to(DEVICE).train()
    if config["ac"] != "none":
        model.gradient_checkpointing_enable()
    batch, length = config["batch_per_gpu"], config["seq_len"]
    tokens = torch.randint(100, 30000, (batch, length), device=DEVICE)
    labels = torch.randint(0, 2, (batch,), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)
    pieces = config["grad_accum"]

    def run() -> Tensor:
        for _ in range(pieces):
            loss = model(input_ids=tokens, labels=labels).loss / pieces
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"], foreach=False)
        optimizer.step()
        model.zero_grad(set_to_none=False)
        return loss.detach()

    return Step(model=model, optimizer=optimizer, run=run)
