"""Copies between the host and a GPU take the time of the link between them, whoever makes them."""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch
from torch import nn

import trainfit
from trainfit.costs.host_link import link_seconds
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device

A100 = find_device("a100-40gb")
BYTES = 4 * 1024 * 1024


def build() -> trainfit.Step:
    """Moves its batch to the GPU, and a result back."""
    model = nn.Linear(1024, 1024).cuda()
    batch = torch.randn(1024, 1024)

    def run() -> torch.Tensor:
        out = model(batch.to("cuda"))
        out.sum().backward()
        model.zero_grad()
        return out.detach().cpu()

    return trainfit.Step(model, None, run)


def test_a_copy_takes_its_bytes_over_the_rate_of_the_link() -> None:
    """A hundred times the bytes, less the time of an empty copy, is a hundred times the time."""
    empty = link_seconds(A100, 0)
    assert empty > 0
    one, many = link_seconds(A100, BYTES) - empty, link_seconds(A100, 100 * BYTES) - empty
    assert abs(many / one - 100) < 1e-6
    assert BYTES / A100.pcie_bytes_per_second < one < 2 * BYTES / A100.pcie_bytes_per_second
    slower = replace(A100, pcie_bytes_per_second=A100.pcie_bytes_per_second / 2)
    assert link_seconds(slower, BYTES) > link_seconds(A100, BYTES)


def test_both_directions_of_the_users_own_copies_are_priced_so() -> None:
    trace = trainfit.capture(build, device="a100-40gb")
    costs = roofline_costs(trace, A100).costs
    copies = [op.signature for op in trace.ops if trace.signatures[op.signature].over_link]
    assert [costs[copy].seconds for copy in copies] == [link_seconds(A100, BYTES)] * 2
    assert all(costs[copy].bound == "link" for copy in copies)


def test_memory_of_others_does_not_count_on_a_cpu() -> None:
    def with_buffer() -> trainfit.Step:
        batch = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.float32).view(1024, 1024)
        return trainfit.Step.of(nn.Linear(1024, 8), batch, loss=torch.mean)

    trace = trainfit.capture(with_buffer, device="cpu")
    assert trace.persistent_bytes == 4 * (1024 * 8 + 8)
