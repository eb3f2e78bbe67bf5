"""Lengths of a mask that is made like data are known, however large the data is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trainfit
from trainfit.traces.simulate import simulate

SAMPLES = 1 << 18
"""More floats than are computed for real, and with 8 rows more integers, too."""
Mask = Callable[[torch.Tensor], torch.Tensor]


def like_the_data(data: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(data, dtype=torch.long)


def new(data: torch.Tensor) -> torch.Tensor:
    return data.new_full(data.shape, 1, dtype=torch.int32)


def truth_values(data: torch.Tensor) -> torch.Tensor:
    return torch.ones(data.shape, dtype=torch.bool, device=data.device).long()


def partly_written(data: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(data, dtype=torch.long)
    mask[:, data[0].argmax() :] = 0
    return mask


def build(mask: Mask, rows: int) -> trainfit.Step:
    """A convolution over samples, and a loss over as many frames as the mask says."""
    model = nn.Conv1d(1, 8, 1024, stride=1024)
    optimizer = torch.optim.SGD(model.parameters())
    data = torch.randn(rows, SAMPLES)

    def run() -> torch.Tensor:
        frames = model(data.unsqueeze(1)).permute(2, 0, 1).log_softmax(-1)
        lengths = torch.div(mask(data).sum(-1), 1024, rounding_mode="floor")
        targets = torch.ones(rows, 4, dtype=torch.long)
        loss = nn.functional.ctc_loss(frames, targets, lengths, lengths // 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)


@pytest.mark.parametrize("mask", [like_the_data, new, truth_values])
@pytest.mark.parametrize("rows", [1, 8])
def test_lengths_are_known(mask: Mask, rows: int) -> None:
    found = trainfit.verify(lambda: build(mask, rows), costs="roofline", runs=1)
    assert found.predicted_peak_bytes == found.measured.peak_bytes
    assert not found.trace.warnings


def test_a_mask_that_data_was_written_to_is_not_known() -> None:
    with pytest.raises(trainfit.TrainfitError, match="lengths whose values depend on data"):
        trainfit.capture(lambda: build(partly_written, 8))


def test_for_a_gpu_as_well() -> None:
    trace = trainfit.capture(lambda: build(like_the_data, 8), device="h100")
    assert simulate(trace).peak_bytes > 8 * SAMPLES * 4
