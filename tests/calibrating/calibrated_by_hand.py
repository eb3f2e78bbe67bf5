"""A calibration made by hand, as a GPU might give it."""

from __future__ import annotations

from dataclasses import replace

from trainfit.calibrating.calibration_result import UNTRIED, CalibrationResult, MeasuredFigure
from trainfit.calibrating.checking import CheckedStep
from trainfit.devices.device_table import find_device

DEVICE = replace(
    find_device("h100"),
    name="h100-sxm-80gb (calibrated)",
    matmul_share=0.72,
    calibrated=True,
    context_bytes=500 << 20,
    source="measured by hand",
    constants={"stream_share": 0.91, "forward_op": 8e-6, "depthwise_cycles": 1.2, "uncertainty": 0.25},
    spreads={"bf16": 0.01, "stream_share": 0.2},
)
RESULT = CalibrationResult(
    device=DEVICE,
    figures=(
        MeasuredFigure("fp32 product", "matrix products", 5.2e13, "FLOP/s", 0.014, 6.7e13),
        MeasuredFigure("bf16 product", "matrix products", 7.12e14, "FLOP/s", 0.01, 9.89e14),
        MeasuredFigure("memory", "memory", 3.015e12, "bytes/s", 0.003, 3.35e12),
        MeasuredFigure("CUDA context", "memory", 500 << 20, "bytes", None, None),
    ),
    constants=(
        MeasuredFigure("stream_share", "constants", 0.91, "share", 0.2, 0.8),
        MeasuredFigure("depthwise_cycles", "constants", 1.2, "cycles", 2.5, 0.8),
        MeasuredFigure("forward_op", "constants", 8e-6, "seconds", None, 9e-6),
        MeasuredFigure("reload", "constants", 3e-5, "seconds", None, None),
    ),
    undetermined=("winograd_gain",),
    steps=(
        CheckedStep("gpt2", "--batch 8 --dtype bf16-autocast", 0.125, 0.1, 0.02, 9),
        CheckedStep("resnet-50", "--batch 64", 0.095, 0.1, 0.01, 12),
    ),
    torch="2.13.0",
    seconds={"memory": 30.0, "matrix products": 20.0, "total": 181.0},
    other_load=0.04,
    warnings=(UNTRIED,),
)
