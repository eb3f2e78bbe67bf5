"""flex_attention with a score modification (ALiBi) and a causal block mask."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import trainfit


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask) -> torch.Tensor:
        def alibi(score, b, h, q, k):
            return score + (k - q) * torch.exp2(-(h + 1.0))

        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(flex_attention(q, k, v, score_mod=alibi, block_mask=mask).transpose(1, 2).flatten(2))


def causal(b, h, q, k):
    return q >= k


def build(batch: int = 2, seq: int = 128, device: str = "cpu") -> trainfit.Step:
    model = Attention().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    mask = create_block_mask(causal, None, None, seq, seq, device=device)
    x = torch.randn(batch, seq, 32, device=device)

    def run() -> torch.Tensor:
        loss = (model(x, mask) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
