"""Resumes: model and optimizer come from the checkpoint of an earlier run, onto the device."""

import os

import torch
from torch import nn

import trainfit


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20)).to(device)
    return model, torch.optim.Adam(model.parameters())


def earlier_run() -> None:
    model, optimizer = make("cpu")
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "resume.pt")


if not os.path.exists("resume.pt"):
    earlier_run()


def build(device: str = "cpu") -> trainfit.Step:
    model, optimizer = make(device)
    checkpoint = torch.load("resume.pt", map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    inputs = torch.randn(16, 20, device=device)

    def run() -> torch.Tensor:
        loss = (model(inputs) - inputs).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
