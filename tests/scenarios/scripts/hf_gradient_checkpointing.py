"""A Hugging Face GPT-2 with gradient checkpointing switched on, and a Trainer-like loop around it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import trainfit


def build(batch: int = 2, seq: int = 48, device: str = "cpu") -> trainfit.Step:
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=3, n_head=4)
    model = GPT2LMHeadModel(config).to(device)
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)
    tokens = torch.randint(0, 300, (batch, seq), device=device)
    mask = torch.ones_like(tokens)
    mask[0, -8:] = 0

    def run() -> torch.Tensor:
        outputs = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        return outputs.loss.detach()

    return trainfit.Step(model, optimizer, run)
