"""torch.profiler runs inside of the step, with its schedule, and record_function around the parts."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(16, 32, device=device), torch.randint(0, 2, (16,), device=device)

    def run() -> torch.Tensor:
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("update"):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)


if __name__ == "__main__":
    step = build()
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2)
    ) as profiler:
        for _ in range(4):
            step.run()
            profiler.step()
