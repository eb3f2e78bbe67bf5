"""An ensemble as one batched model: stack_module_state and vmap, one optimizer for all members."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    members = nn.ModuleList(
        [nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3)) for _ in range(5)]
    ).to(device)
    parameters, buffers = stack_module_state(list(members))
    skeleton = copy.deepcopy(members[0]).to("meta")
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-3)
    inputs, labels = torch.randn(5, 32, 20, device=device), torch.randint(0, 3, (5, 32), device=device)

    def one(parameters: dict, buffers: dict, x: torch.Tensor) -> torch.Tensor:
        return functional_call(skeleton, (parameters, buffers), (x,))

    def run() -> torch.Tensor:
        outputs = torch.vmap(one)(parameters, buffers, inputs)
        loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(members, optimizer, run)
