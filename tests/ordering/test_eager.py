"""Captured steps as graphs: in the order of the trace they have the peak that is predicted for the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trainfit
from trainfit import Step
from trainfit.order_fronts.eager import trace_graph
from trainfit.ordering.best_order import best_order
from trainfit.ordering.order_timeline import order_timeline
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 256) for _ in range(3))
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.convolution(x[:, None]).mean(1), 0.1)
        return torch.stack([head(x).tanh().square().mean() for head in self.heads]).sum()


def build() -> Step:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return Step.of(model, (torch.randn(8, 16, 16),), loss=lambda value: value, optimizer=optimizer)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture(build)


def test_the_given_order_has_the_predicted_timeline(trace: Trace) -> None:
    found, predicted = order_timeline(trace_graph(trace)), simulate(trace)
    assert found.initial_bytes == predicted.persistent_bytes
    assert list(found.after_alloc) == predicted.used_bytes.tolist()
    assert found.peak_bytes == predicted.peak_bytes


def test_releasing_after_the_last_use_needs_no_more(trace: Trace) -> None:
    held, freed = order_timeline(trace_graph(trace)), order_timeline(trace_graph(trace, as_held=False))
    assert freed.peak_bytes <= held.peak_bytes
    assert best_order(freed.graph).peak_bytes <= best_order(held.graph).peak_bytes <= held.peak_bytes


def test_random_numbers_and_changes_in_place_keep_their_order(trace: Trace) -> None:
    graph = trace_graph(trace)
    position = {name: place for place, name in enumerate(best_order(graph).names)}
    for storage in range(len(trace.storages)):
        writers = [n for n, op in enumerate(trace.ops) if storage in op.writes]
        for writer in writers:
            for number, op in enumerate(trace.ops):
                if storage in op.reads and number != writer:
                    before = position[graph.nodes[number].name] < position[graph.nodes[writer].name]
                    assert before == (number < writer)
