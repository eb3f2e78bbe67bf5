"""Train with a plan: two lines in an ordinary training loop.

    trainfit plan examples/train_step.py:build --batch 8 --budget 140MiB --device cpu -o plan.json
    python examples/train_with_plan.py plan.json

Without the name of a plan it makes the one above itself.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from train_step import Classifier, build

import trainfit

STEPS = 4
BATCH = 8
SEQ = 128


def train(plan_file: str | None) -> list[float]:
    """Train for a few steps and return the losses."""
    torch.manual_seed(0)
    model = Classifier()
    if plan_file is not None:
        plan = trainfit.load_plan(plan_file)  # the first line
        trainfit.apply(model, plan)  # the second line; all else is as it was
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: list[float] = []
    for _ in range(STEPS):
        tokens, labels = torch.randint(0, 8192, (BATCH, SEQ)), torch.randint(0, 10, (BATCH,))
        loss = functional.cross_entropy(model(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_plan(folder: str) -> str:
    """Write the plan that the command line above writes."""
    file = str(Path(folder) / "plan.json")
    trainfit.save_plan(trainfit.plan(lambda: build(BATCH, SEQ), budget="140MiB"), file)
    return file


def main() -> None:
    """Train without and with the plan."""
    with tempfile.TemporaryDirectory() as folder:
        plan_file = sys.argv[1] if len(sys.argv) > 1 else make_plan(folder)
        plan = trainfit.load_plan(plan_file)
        print(f"the step needs {plan.baseline_peak_bytes / 2**20:.0f} MiB without a plan, ", end="")
        print(f"{plan.peak_bytes / 2**20:.0f} MiB with it (predicted)\n")
        without_plan, with_plan = train(None), train(plan_file)
    print("step   loss without   loss with plan")
    for step, (one, other) in enumerate(zip(without_plan, with_plan), start=1):
        print(f"{step:4}   {one:12.6f}   {other:14.6f}")
    print("\nthe losses are", "the same" if without_plan == with_plan else "different")


if __name__ == "__main__":
    main()
