"""Published step times and peaks, and the steps that they were measured on."""

from __future__ import annotations

import contextlib
import importlib.util

import torch


def _declare_vision_operators() -> None:
    """Declare what torchvision describes on import, where its own library does not load.

    timm and transformers import torchvision, and the registries' is built for CUDA: beside torch's CPU build
    it has no operators, and its import fails on these two, which no model here calls.
    """
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    with contextlib.suppress(RuntimeError):  # declared already: by a torchvision that was built for the CPU
        torch.library.define("torchvision::nms", arguments)
        torch.library.define("torchvision::qnms", arguments)


_declare_vision_operators()
