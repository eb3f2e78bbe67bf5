"""Steps whose modules have names that nobody would give, except to do harm."""

from __future__ import annotations

import torch

import trainfit

SCRIPT = "</script><img src=x onerror=harmed=1>"
QUOTES = "\"'`><b onmouseover=harmed=1>${harmed=1}"
TURNED = "evil\u202egnp_exe\u2028\u2029\x00&amp;"
LONG = "n" * 10_000
NAMES = (SCRIPT, QUOTES, TURNED, LONG)


def build() -> trainfit.Step:
    """Return a small step with these modules."""
    model = torch.nn.Sequential()
    for name in NAMES:
        model.add_module(name, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 64)

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)
