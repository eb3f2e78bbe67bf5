"""RLHF-like: sample a continuation with a KV cache, score it, update the policy with a KL penalty."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(layers)
            ]
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, cache: list | None = None) -> tuple[torch.Tensor, list]:
        past = cache[0][0].size(2) if cache else 0
        x = self.embed(tokens) + self.position(
            torch.arange(past, past + tokens.size(1), device=tokens.device)
        )
        new_cache = []
        for number, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp)):
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            if cache:
                k, v = torch.cat([cache[number][0], k], 2), torch.cat([cache[number][1], v], 2)
            new_cache.append((k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=past == 0)
            x = x + y.transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return self.head(x), new_cache


@torch.no_grad()
def generate(model: TinyGPT, prompt: torch.Tensor, length: int) -> torch.Tensor:
    logits, cache = model(prompt)
    tokens = prompt
    for _ in range(length):
        token = torch.multinomial(logits[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, token], dim=1)
        logits, cache = model(token, cache)
    return tokens


def build(batch: int = 4, device: str = "cpu") -> trainfit.Step:
    policy = TinyGPT().to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    prompt = torch.randint(0, 64, (batch, 8), device=device)

    def log_probs(model: TinyGPT, tokens: torch.Tensor) -> torch.Tensor:
        logits, _ = model(tokens[:, :-1])
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def run() -> torch.Tensor:
        policy.eval()
        tokens = generate(policy, prompt, 10)
        policy.train()
        reward = (tokens[:, 8:] == 7).float().mean(1)
        with torch.no_grad():
            reference_log_probs = log_probs(reference, tokens)
        current = log_probs(policy, tokens)
        kl = (current - reference_log_probs).mean(1)
        advantage = (reward - 0.1 * kl).detach()
        loss = -(advantage[:, None] * current[:, 7:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(policy, optimizer, run)
